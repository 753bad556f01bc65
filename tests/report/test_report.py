"""The report shows what a run's folder holds, in a page of bounded size that asks for nothing else."""

import json
import re

import pytest

from vectorlm.cli import main
from vectorlm.errors import ConfigError
from vectorlm.report.live_run import LiveRun
from vectorlm.report.report import MAX_POINTS, MAX_ROWS, MAX_STEPS, write_report
from vectorlm.report.runs import RunFolder, differences, names_of


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


def test_a_line_that_a_crash_cut_short_is_left_out(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "train/loss": 2.0}])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "tr\n{"step": 3, "train/loss": 1.0}\n{"step')
    assert RunFolder(tmp_path).series("train/loss") == [(1, 2.0), (3, 1.0)]


@pytest.mark.parametrize("text", [b"", b'{"versions": {"py', b"\xff\xfe\x00", b"[1, 2]"])
def test_settings_that_a_crash_cut_short_are_none(tmp_path, text):
    run = make_run(tmp_path / "run")
    for name in ("run.json", "config.yaml"):
        (run.path / name).write_bytes(text)
    (live := LiveRun(run.path)).read()
    assert run.versions == run.config == live.settings == {}


def data_of(page):
    return json.loads(re.search(r'type="application/json">(.*?)</script>', page, re.DOTALL)[1])


def report_of(tmp_path, *runs):
    write_report(runs, tmp_path / "out" / "report.html")
    return (tmp_path / "out" / "report.html").read_text()


def test_the_page_holds_the_run_and_asks_for_nothing_else(tmp_path):
    page = report_of(tmp_path, make_run(tmp_path / "run"))
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


def test_the_worst_prompts_are_those_with_the_lowest_mean_reward_over_the_whole_run(tmp_path):
    rows = [rollout(1, "easy", 1.0), rollout(1, "hard", 0.0), *[rollout(9, "hard", 0.5, "last try")] * 3]
    rows += [rollout(1, "never", None), rollout(2, "hopeless", 0.0)]
    (run,) = data_of(report_of(tmp_path, make_run(tmp_path / "run", rollouts=rows)))["runs"]
    assert [(row["prompt"], row["mean"], row["num"]) for row in run["worst"]] == [
        ("hopeless", 0.0, 1),
        ("hard", 0.375, 4),
        ("easy", 1.0, 1),
    ]
    assert run["worst"][1]["text"] == "last try"
    assert run["worst"][1]["columns"] == "target: 24"


def test_a_long_run_gives_a_page_of_bounded_size(tmp_path):
    rows = [rollout(step, "p" * 5000, 0.0, "c" * 5000) for step in range(100) for _ in range(60)]
    page = report_of(tmp_path, make_run(tmp_path / "run", num_steps=2000, rollouts=rows))
    (run,) = data_of(page)["runs"]
    assert len(run["series"]["reward/mean"]) <= MAX_POINTS
    assert run["series"]["reward/mean"][0] == [6, 3.0]
    assert run["series"]["reward/mean"][-1][0] == 1999
    steps = [row["step"] for row in run["rollouts"]["rows"]]
    assert (steps[0], steps[-1], len(set(steps))) == (0, 99, MAX_STEPS)
    assert steps.count(99) == MAX_ROWS
    assert (run["rollouts"]["numRows"], run["rollouts"]["numSteps"]) == (6000, 100)
    assert len(page) < 1.5e6


def test_a_run_that_is_still_going_on_is_shown(tmp_path):
    run = make_run(tmp_path / "run")
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    assert data_of(report_of(tmp_path, run))["runs"][0]["steps"] == 2


def test_chat_messages_are_shown_as_a_conversation(tmp_path):
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    run = make_run(tmp_path / "run", rollouts=[rollout(1, prompt, 0.0)])
    (row,) = data_of(report_of(tmp_path, run))["runs"][0]["rollouts"]["rows"]
    assert row["prompt"] == "system: Be brief.\nuser: 1+1?"


def test_runs_are_told_apart_by_the_settings_that_differ(tmp_path):
    runs = [make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run")]
    text = "model: m\nrl: {algorithm: ppo, critic: {lr: 1}}\ntrain_parameters: {output_dir: x}\n"
    (tmp_path / "b" / "run" / "config.yaml").write_text(text)
    assert names_of(runs) == ["a/run", "b/run"]
    assert differences(runs) == {"rl.algorithm": ["grpo", "ppo"], "rl.critic.lr": [None, 1]}
    assert names_of([runs[0], runs[0]]) == ["run (1)", "run (2)"]
    assert data_of(report_of(tmp_path, *runs))["differences"]["rl.algorithm"] == ["grpo", "ppo"]


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no metrics.jsonl: name the output_dir of a run"):
        RunFolder(tmp_path)


def test_the_commands_write_their_files_and_say_where(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert main(["report", str(run.path)]) == 0
    assert "report.html (0.0 MB)" in capsys.readouterr().out
    assert main(["plot", str(run.path), "--metrics", "reward/mean", "--output", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plot", str(tmp_path)]) == 2
