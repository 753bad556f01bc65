"""The report page: it shows the files of a run's folder, has a bounded size and loads no other file."""

import json
import re
import subprocess
import sys
import time

import pytest
from kit.vision_models import picture

from vectorlm.cli import main
from vectorlm.cli.report import EVERY_S
from vectorlm.data.images import picture_of
from vectorlm.report.page import MAX_POINTS, MAX_ROWS, MAX_STEPS, write_page
from vectorlm.report.runs import RunFolder
from vectorlm.report.step_lines import StepLines
from vectorlm.train.checkpoint.folder import locked


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def rollout(step, prompt, reward, completion="c", **more):
    row = {"train_step": step, "group": 0, "prompt": prompt, "completion": completion, "reward": reward}
    return {**row, "advantage": 0.5, "columns": {"target": 24}, **more}


def make_run(folder, num_steps=3, rollouts=()):
    write_lines(
        folder / "metrics.jsonl",
        [{"step": step, "reward/mean": step, "time/update_s": 0.5} for step in range(num_steps)],
    )
    write_lines(
        folder / "samples.jsonl",
        [{"train_step": 0, "prompt": "1+1", "options": ["</script>2"], "rewards": [1.0]}],
    )
    write_lines(folder / "rollouts.jsonl", rollouts)
    trainer = [["generate", 100.0, 101.0], ["update", 101.0, 103.0]]
    write_lines(folder / "timeline.jsonl", [{"train_step": 1, "trainer": trainer, "engine": [[99.0, 100.5]]}])
    (folder / "config.yaml").write_text("model: m\nrl: {algorithm: grpo}\n")
    return RunFolder(folder)


def data_of(page):
    return json.loads(re.search(r'type="application/json">(.*?)</script>', page, re.DOTALL)[1])


def page_of(tmp_path, *runs):
    write_page(runs, tmp_path / "out" / "report.html")
    return (tmp_path / "out" / "report.html").read_text()


def test_a_config_whose_anchors_stand_for_billions_of_values_is_left_out(tmp_path):
    """Before, a config of 700 bytes kept the report busy for minutes."""
    run = make_run(tmp_path / "run")
    lines = ["a0: &a0 {" + ", ".join(f"k{number}: 1" for number in range(9)) + "}"]
    for depth in range(1, 10):
        values = ", ".join(f"k{number}: *a{depth - 1}" for number in range(9))
        lines.append(f"a{depth}: &a{depth} {{{values}}}")
    (run.path / "config.yaml").write_text("\n".join(lines))
    assert data_of(page_of(tmp_path, run))["runs"][0]["config"] == {}


def test_a_run_may_be_called_as_a_place_of_the_template(tmp_path):
    page = page_of(tmp_path, make_run(tmp_path / "$DATA"), make_run(tmp_path / "$TITLE"))
    assert "<title>$DATA, $TITLE</title>" in page
    assert [run["name"] for run in data_of(page)["runs"]] == ["$DATA", "$TITLE"]


def test_the_page_holds_the_run_and_asks_for_nothing_else(tmp_path):
    page = page_of(tmp_path, make_run(tmp_path / "run"))
    assert not re.search(r"https?:|<link|<img|src=|@import|url\(", page)
    data = data_of(page)
    (run,) = data["runs"]
    assert run["series"]["reward/mean"] == [[0, 0.0], [1, 1.0], [2, 2.0]]
    assert run["phases"] == [["update", 1.5, 1.0]]
    assert run["config"] == {"model": "m", "rl.algorithm": "grpo"}
    assert run["samples"]["rows"] == [{"step": 0, "prompt": "1+1", "text": "</script>2", "reward": 1.0}]
    timeline = {"step": 1, "trainer": [["generate", 0.0, 1.0], ["update", 1.0, 3.0]], "engine": [[0, 0.5]]}
    assert run["timeline"] == [timeline]
    assert [panel["title"] for panel in data["panels"]] == ["Reward"]


def test_a_cut_character_and_markup_in_a_timeline_do_no_harm(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    rows = [rollout(1, "half a smile \ud83d", 1.0), rollout(1, chat, 0.0)]
    run = make_run(tmp_path / "run", rollouts=rows)
    marked = "<img src=x onerror=alert(1)>"
    line = {"train_step": 1, "trainer": [[marked, 1.0, 2.0], ["update", 2.0, 3.0]], "engine": []}
    write_lines(run.path / "timeline.jsonl", [line])
    data = data_of(page_of(tmp_path, run))
    prompts = [row["prompt"] for row in data["runs"][0]["rollouts"]["rows"]]
    assert prompts == ["half a smile \ud83d", "system: Be brief.\nuser: 1+1?"]
    assert [name for name, *_ in data["runs"][0]["timeline"][0]["trainer"]] == ["update"]
    write_lines(run.path / "timeline.jsonl", [{**line, "train_step": marked}])
    with pytest.raises(ValueError, match="invalid literal"):
        page_of(tmp_path, run)


def test_the_worst_prompts_are_those_with_the_lowest_mean_reward_over_the_whole_run(tmp_path):
    rows = [rollout(1, "easy", 1.0), rollout(1, "hard", 0.0), *[rollout(9, "hard", 0.5, "last try")] * 3]
    rows += [rollout(1, "never", None), rollout(2, "hopeless", 0.0)]
    (run,) = data_of(page_of(tmp_path, make_run(tmp_path / "run", rollouts=rows)))["runs"]
    assert [(row["prompt"], row["mean"], row["num"]) for row in run["worst"]] == [
        ("hopeless", 0.0, 1),
        ("hard", 0.375, 4),
        ("easy", 1.0, 1),
    ]
    assert run["worst"][1]["text"] == "last try"
    assert run["worst"][1]["columns"] == "target: 24"


def test_no_spike_of_a_long_curve_is_lost(tmp_path):
    values = {step: 1.0 + step % 7 / 100 for step in range(1, 4001)}
    spikes = {23: 46.3, 24: -5.0, 1777: 99.0, 4000: 3.0}
    gap = dict.fromkeys(range(2000, 2100))
    folder = tmp_path / "run"
    run = make_run(folder)
    write_lines(
        folder / "metrics.jsonl",
        [{"step": step, "train/grad_norm": value} for step, value in (values | spikes | gap).items()],
    )
    (found,) = data_of(page_of(tmp_path, run))["runs"]
    points = found["series"]["train/grad_norm"]
    assert len(points) <= MAX_POINTS
    assert [list(spike) for spike in spikes.items()] == [point for point in points if point[0] in spikes]
    assert points == sorted(points, key=lambda point: point[0])
    assert sum(point[1] is None for point in points) >= 2
    assert len({point[0] for point in points}) == len(points)


def test_prompts_that_begin_alike_stay_apart(tmp_path):
    examples = "1 + 1 = 2\n" * 80
    rows = [rollout(1, f"{examples}{end}", reward) for end, reward in (("2 + 2 =", 1.0), ("9 * 9 =", 0.0))]
    (run,) = data_of(page_of(tmp_path, make_run(tmp_path / "run", rollouts=rows)))["runs"]
    assert [(row["prompt"][-7:], row["mean"], row["num"]) for row in run["worst"]] == [
        ("9 * 9 =", 0.0, 1),
        ("2 + 2 =", 1.0, 1),
    ]
    assert [row["prompt"][-7:] for row in run["rollouts"]["rows"]] == ["2 + 2 =", "9 * 9 ="]
    assert {len(row["prompt"]) for row in run["rollouts"]["rows"]} == {500}


def test_a_long_run_gives_a_page_of_bounded_size(tmp_path):
    rows = [rollout(step, "p" * 5000, 0.0, "c" * 5000) for step in range(100) for _ in range(60)]
    page = page_of(tmp_path, make_run(tmp_path / "run", num_steps=2000, rollouts=rows))
    (run,) = data_of(page)["runs"]
    assert len(run["series"]["reward/mean"]) <= MAX_POINTS
    assert run["series"]["reward/mean"][0] == [0, 0.0]
    assert run["series"]["reward/mean"][-1][0] == 1999
    steps = [row["step"] for row in run["rollouts"]["rows"]]
    assert (steps[0], steps[-1], len(set(steps))) == (0, 99, MAX_STEPS)
    assert steps.count(99) == MAX_ROWS
    assert (run["rollouts"]["numRows"], run["rollouts"]["numSteps"]) == (6000, 100)
    assert len(page) < 1.5e6


@pytest.mark.slow
def test_a_page_that_follows_is_written_while_a_run_goes_on_and_then_rests(tmp_path):
    run = make_run(tmp_path / "run")
    output = tmp_path / "page.html"
    command = [sys.executable, "-m", "vectorlm", "report", str(run.path), "--follow", "--output", str(output)]
    with locked(run.path):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline().startswith(f"{output} (")
        data = data_of(output.read_text())
        assert (data["reloadS"], data["runs"][0]["progress"]) == (EVERY_S, "step 2")
        StepLines(run.path / "metrics.jsonl", 2, key="step").write(3, [{"reward/mean": 0.9}])
        wait_for(lambda: data_of(output.read_text())["runs"][0]["progress"] == "step 3")
    assert process.wait(timeout=30) == 0
    data = data_of(output.read_text())
    assert (data["reloadS"], data["runs"][0]["state"]) == (None, "stopped after step 3")


def wait_for(is_so, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_commands_write_their_files_and_say_where(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert main(["report", str(run.path)]) == 0
    assert "report.html (0.0 MB)" in capsys.readouterr().out
    assert main(["plot", str(run.path), "--metrics", "reward/mean", "--output", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plot", str(tmp_path)]) == 2
    capsys.readouterr()
    assert main(["plot", str(run.path), "--output", str(tmp_path / "compared")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'compared.png'}\n"
    assert (tmp_path / "compared.png").is_file()


@pytest.mark.parametrize(
    ("command", "output"),
    [
        *(("report", "out"), ("report", "file/page.html"), ("report", "locked/page.html")),
        *(("plot", "out"), ("plot", "locked/plot.png"), ("plot", "compared.html")),
    ],
)
def test_an_output_that_cannot_be_written_is_refused(tmp_path, capsys, monkeypatch, command, output):
    run = make_run(tmp_path / "run")
    (tmp_path / "out").mkdir()
    (tmp_path / "locked").mkdir()
    (tmp_path / "file").touch()
    # Permissions do not stop a test that root runs.
    monkeypatch.setattr("os.access", lambda path, mode: path.name != "locked")
    before = sorted(tmp_path.rglob("*"))
    assert main([command, str(run.path), "--output", str(tmp_path / output)]) == 2
    assert output in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_pictures_of_rollouts_are_on_the_page_in_small(tmp_path):
    wide, stored = tmp_path / "wide.png", tmp_path / "run" / "pictures" / "abc"
    stored.parent.mkdir(parents=True)
    picture("r", (400, 200)).save(wide)
    picture("b").save(stored, format="PNG")

    def asked(*names):
        parts = [{"type": "image", "image": str(name)} for name in names]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": "which?"}]}]

    # The run was moved, and the folder `elsewhere` no longer exists.
    rows = [rollout(1, asked(wide), 1.0), rollout(1, asked(tmp_path / "missing.png"), 0.0)]
    rows.append(rollout(1, asked(wide), 0.5, messages=asked(wide, "elsewhere/pictures/abc")))
    run = make_run(tmp_path / "run", rollouts=rows)
    data = data_of(page_of(tmp_path, run))
    shown = [row["images"] for row in data["runs"][0]["rollouts"]["rows"]]
    assert shown[0] == [str(wide)]
    assert shown[2] == [str(wide), "elsewhere/pictures/abc"]
    assert data["runs"][0]["rollouts"]["rows"][0]["prompt"] == "user: [image wide.png] which?"
    assert set(data["pictures"]) == {str(wide), "elsewhere/pictures/abc"}
    small = picture_of(data["pictures"][str(wide)]).open()
    assert small.size == (96, 48)
    red, green, blue = small.getpixel((5, 5))
    assert red > 200
    assert max(green, blue) < 60
    blue = picture_of(data["pictures"]["elsewhere/pictures/abc"]).open().getpixel((5, 5))[2]
    assert blue > 200


def test_a_page_of_texts_has_no_pictures(tmp_path):
    run = make_run(tmp_path / "run", rollouts=[rollout(1, "text", 1.0), rollout(1, [1, 2], 1.0)])
    data = data_of(page_of(tmp_path, run))
    assert data["pictures"] == {}
    assert all("images" not in row for row in data["runs"][0]["rollouts"]["rows"])
