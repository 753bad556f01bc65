"""``vectorlm replay`` of scripted runs, and the first difference of two runs; test_reinforce.py replays vLLM's."""

import json
import shutil

import pytest
import yaml
from datasets import Dataset
from kit.rank_processes import save_tiny_llama
from kit.rl_runs import config_of, lines, save_files

from vectorlm import FakeEngine
from vectorlm.cli import main
from vectorlm.ranks import launcher
from vectorlm.runs.reinforcement import reinforce

APART = """
def first(completions, wanted):
    return [float(letter in LETTERS and index % 4 == 0) for index, letter in enumerate(wanted)]
"""

FORKS = """
import json
import urllib.request

def forks(url, key, row):
    for turn in range(3):
        body = json.dumps({"model": "policy", "prompt": f"{row['prompt']}{turn}"}).encode()
        request = urllib.request.Request(f"{url}/completions", body, {"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request) as answer:
            text = json.load(answer)["choices"][0]["text"]
    return float(len(text) % 3)
"""


def save_run(folder, rows, norms):
    folder.mkdir()
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = [
        {"step": step, "policy/grad_norm": norm, "policy/loss": 0.5} for step, norm in enumerate(norms)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    return str(folder)


@pytest.mark.parametrize(
    ("change", "norm", "found"),
    [
        ({}, 0.3, None),
        ({"prompt": "b"}, 0.3, ["prompts"]),
        ({"token_ids": [1, 3]}, 0.3, ["tokens"]),
        ({"reward": 0.5, "advantage": 0.1}, 0.4, ["rewards", "advantages", "gradient norm"]),
        ({}, 0.4, ["gradient norm"]),
    ],
    ids=str,
)
def test_the_first_step_at_which_two_runs_differ_is_named_with_what_differs(
    tmp_path, capsys, change, norm, found
):
    row = {"prompt": "a", "completion": "x", "token_ids": [1, 2], "reward": 1.0, "advantage": 0.2}
    rows = [{"train_step": step, **row} for step in (1, 2, 3)]
    other = [rows[0], *({**later_row, **change} for later_row in rows[1:])]
    runs = (
        save_run(tmp_path / "a", rows, [0.0, 0.1, 0.3, 0.3]),
        save_run(tmp_path / "b", other, [0.0, 0.1, norm, 9.0]),
    )
    if found is None:
        runs = runs[0], save_run(tmp_path / "c", rows, [0.0, 0.1, 0.3, 0.3])
    assert main(["replay", runs[0], "--bisect", runs[1]]) == int(found is not None)
    printed = capsys.readouterr().out.splitlines()
    for line, name in zip(printed, found or [""], strict=True):
        assert line.startswith("step 2") == bool(found)
        assert name in line


def test_a_step_without_rollouts_in_one_run_differs(tmp_path, capsys):
    rows = [{"train_step": step, "prompt": "a", "reward": 1.0} for step in (1, 2, 3)]
    norms = [0.0, 0.1, 0.2, 0.3]
    one = save_run(tmp_path / "one", rows, norms)
    other = save_run(tmp_path / "other", [rows[0], rows[2]], [0.0, 0.1, 0.0, 0.3])
    assert main(["replay", one, "--bisect", other]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "step 2: 1 rollouts and 0",
        "step 2: the gradient norm differs: 0.2 and 0.0",
    ]
    # The other run crashed in step 3, and both have the same rollouts of this step.
    crashed = save_run(tmp_path / "crashed", rows, norms[:3])
    assert main(["replay", one, "--bisect", crashed]) == 0


@pytest.mark.parametrize(
    ("arguments", "named"), [([], "--step"), (["--bisect", "nowhere"], "rollouts.jsonl")]
)
def test_what_is_missing_is_named(tmp_path, capsys, arguments, named):
    assert main(["replay", str(tmp_path), *arguments]) == 2
    assert named in capsys.readouterr().err


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    """Return a function that makes a run of four steps here, with a scripted engine; dynamic sampling drops groups."""
    monkeypatch.setattr(launcher, "launch", lambda fn, *args, world_size: [fn(*args)])
    files = save_files(tmp_path)
    save_tiny_llama(files / "model", vocab_size=128)

    def make(letters, *more):
        (tmp_path / "first.py").write_text(APART.replace("LETTERS", repr(letters)))
        overrides = [
            f"rl.rewards={{'{tmp_path}/first.py:first': 1.0}}",
            "rl.algorithm.dynamic_sampling=True",
            "rl.max_sampling_rounds=1",
            "rl.rollout.save_tokens=True",
            "rl.save_every=4",
            "rl.reward_workers=0",
            *more,
        ]
        with FakeEngine(lambda prompt, version: f"{prompt}{version}") as engine:
            reinforce(config_of(files, tmp_path / "run", "reinforce", overrides), engine=engine)
        metrics = lines(tmp_path / "run" / "metrics.jsonl")
        return tmp_path / "run", {line["step"]: line["rollout/groups"] for line in metrics if line["step"]}

    return make


def test_what_is_compared_leaves_out_the_groups_that_were_dropped(make_run, capsys):
    # The weight of the KL penalty adapts to the steps before, also to the number of groups that they kept.
    run, num_kept = make_run("abcd", "rl.kl_coef=0.1", "rl.kl_target=0.001", "rl.kl_horizon=17")
    assert 0 < num_kept[4] < 4
    assert len({line.get("reference/kl_coef") for line in lines(run / "metrics.jsonl")}) == 5
    assert main(["replay", str(run), "--step", "4"]) == 0
    printed = capsys.readouterr().out
    assert "  reward/trained_mean  0.25, as logged" in printed
    assert "  weights              as logged" in printed


def test_a_step_that_dropped_all_its_groups_is_made_again_only_on_the_way_to_others(make_run, capsys):
    # Only one prompt of eight has rewards that differ.
    run, num_kept = make_run("a")
    assert sorted(num_kept.values()) == [0, 0, 1, 1]
    # Replay the last step of each kind.
    for num, step in {num: step for step, num in num_kept.items()}.items():
        assert main(["replay", str(run), "--step", str(step)]) == (0 if num else 2)
        assert (f"--step {step}:" in capsys.readouterr().err) == (num == 0)


def test_a_step_that_dropped_all_its_groups_trains_on_texts(make_run, tmp_path, capsys):
    texts = {"input_ids": [[5, 9, 3]] * 8, "labels": [[5, 9, 3]] * 8, "attention_mask": [[1] * 3] * 8}
    Dataset.from_dict(texts).save_to_disk(tmp_path / "texts")
    run, num_kept = make_run("a", f"rl.sft.dataset={tmp_path}/texts")
    assert 0 in num_kept.values()
    assert all(line["sft/loss"] > 0 for line in lines(run / "metrics.jsonl") if line["step"])
    last = max(step for step, num in num_kept.items() if num)
    assert main(["replay", str(run), "--step", str(last)]) == 0


def test_a_replay_sends_the_engine_no_adapters_and_uploads_nothing(make_run, monkeypatch, capsys):
    run, _ = make_run(
        "abcd", "lora_peft_config={r: 4}", "engine.dtype=float32", "train_parameters.dtype=float32"
    )
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["rl"]["keep_adapters"] = {"every": 1, "last": 1}
    config["train_parameters"]["share_base"] = True
    config["push_to_hub"] = {"repo_id": "me/mine"}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    # With `push_to_hub`, a run without a token is refused.
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert main(["replay", str(run), "--step", "4"]) == 0
    assert "weights              as logged" in capsys.readouterr().out


def test_the_weights_of_another_step_are_not_compared(make_run, capsys):
    run, _ = make_run("abcd")
    shutil.rmtree(run / "checkpoints")
    assert main(["replay", str(run), "--step", "4"]) == 0
    assert "weights              as logged" in capsys.readouterr().out
    card = (run / "final-model" / "README.md").read_text()
    (run / "final-model" / "README.md").write_text(card.replace("\nstep: 4\n", "\nstep: 2\n"))
    assert main(["replay", str(run), "--step", "4"]) == 0
    assert "not compared" in capsys.readouterr().out


@pytest.mark.slow
def test_all_rows_of_an_agent_that_starts_afresh_are_logged_and_trained_on_again(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(launcher, "launch", lambda fn, *args, world_size: [fn(*args)])
    files, run = save_files(tmp_path), tmp_path / "run"
    save_tiny_llama(files / "model", vocab_size=128)
    (tmp_path / "agent.py").write_text(FORKS)
    overrides = [
        "rl.rewards={}",
        f"rl.environment='openai:{tmp_path}/agent.py:forks'",
        "rl.rollout.save_tokens=True",
        "rl.max_steps=2",
    ]
    answers = iter(range(10**6))
    with FakeEngine(lambda prompt, version: "ab" * (1 + next(answers) % 4)) as engine:
        reinforce(config_of(files, run, "gspo", overrides), engine=engine)
    rows, metrics = lines(run / "rollouts.jsonl"), lines(run / "metrics.jsonl")[1]
    assert {len(row["branches"]) for row in rows} == {2}
    first = [row for row in rows if row["train_step"] == 1]
    parts = [part for row in first for part in (row, *row["branches"])]
    lengths = [sum(sum(part["policy_mask"]) for part in (row, *row["branches"])) for row in first]
    assert metrics["completion/length_mean"] == pytest.approx(sum(lengths) / len(lengths))
    assert metrics["rollout/turns_mean"] == 3
    num_read = sum(len(part["prompt_token_ids"]) for part in parts)
    assert metrics["perf/tokens_seen"] == num_read + sum(lengths)
    assert metrics["perf/trained_tokens"] > 0
    assert main(["replay", str(run), "--step", "2"]) == 0
    assert "as logged" in capsys.readouterr().out
