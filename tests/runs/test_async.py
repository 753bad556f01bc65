"""Whole runs whose sampling and training overlap."""

import pytest
from kit.rank_processes import forked
from kit.rl_runs import check_rl, config_of, is_documented, lines, numbers, save_files, stop_after_step_2
from kit.sft_runs import are_equal, weights_of

from vectorlm.errors import ConfigError
from vectorlm.rl.evaluation.evaluator import Evaluator
from vectorlm.rl.update import Updater
from vectorlm.runs.reinforcement import reinforce


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return save_files(tmp_path_factory.mktemp("async"))


def overlapping(max_staleness, *more, steps=6):
    return [f"rl.async={{max_staleness: {max_staleness}}}", f"rl.max_steps={steps}", *more]


@pytest.mark.slow
def test_without_staleness_a_run_is_the_synchronous_one_bit_for_bit(files, tmp_path):
    for name, overrides in (("alone", ["rl.max_steps=3"]), ("overlapping", overlapping(0, steps=3))):
        reinforce(config_of(files, tmp_path / name, overrides=overrides))
    assert are_equal(*(weights_of(tmp_path / name) for name in ("alone", "overlapping")))
    assert numbers(tmp_path / "alone") == numbers(tmp_path / "overlapping")


CASES = {
    "in flight": (
        "grpo",
        overlapping(3, "rl.sampling_params={max_tokens: 30}", "rl.correction.preset=decoupled"),
    ),
    "adapters": (
        "rloo",
        overlapping(
            2,
            "train_parameters.lora_peft_config={r: 4, target_modules: [q_proj, v_proj]}",
            "rl.async.update=recompute",
            "rl.algorithm.dynamic_sampling=True",
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_run_overlaps_and_keeps_its_bound(files, tmp_path, case):
    algorithm, overrides = CASES[case]
    config = config_of(files, tmp_path / "run", algorithm, [*overrides, "rl.rollout.save_tokens=True"])
    forked(reinforce, config)
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(7))
    assert [name for line in metrics for name in line if name != "step" and not is_documented(name)] == []
    bound = config.rl.async_.max_staleness
    ages = [line["staleness/token_max"] for line in metrics[1:] if "staleness/token_max" in line]
    assert 0 < max(ages) <= bound
    idle = [line["perf/engine_idle"] for line in metrics if "perf/engine_idle" in line]
    assert len(idle) >= 2
    assert all(0 <= share < 1 for share in idle)
    assert (tmp_path / "run" / "timeline.png").exists()
    spans = [name for line in lines(tmp_path / "run" / "timeline.jsonl") for name, _, _ in line["trainer"]]
    assert {"evaluate", "publish", "generate", "update"} <= set(spans)
    for row in lines(tmp_path / "run" / "rollouts.jsonl"):
        assert len(row["versions"]) == len(row["sampler_logprobs"]) == len(row["token_ids"])
        assert row["train_step"] - 1 - min(row["versions"]) <= max(ages)
        assert max(row["versions"]) < row["train_step"]
    assert list((tmp_path / "run" / "final-model").glob("*model.safetensors"))


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_with_what_was_under_way(files, tmp_path):
    """test_overlap.py has a scripted run that keeps groups through updates."""
    overrides = overlapping(2, "rl.async.update=drain", "rl.rollout.save_tokens=True")
    config = config_of(files, tmp_path / "cut", overrides=overrides)
    with pytest.raises(AssertionError, match="rank"):
        forked(stop_after_step_2, config)
    assert [checkpoint.name for checkpoint in (tmp_path / "cut/checkpoints").iterdir()] == ["step-00000002"]
    forked(reinforce, config)
    forked(reinforce, config_of(files, tmp_path / "whole", overrides=overrides))
    assert are_equal(*(weights_of(tmp_path / name) for name in ("cut", "whole")))
    assert lines(tmp_path / "cut" / "rollouts.jsonl") == lines(tmp_path / "whole" / "rollouts.jsonl")
    metrics = lines(tmp_path / "cut" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(7))
    rollouts = lines(tmp_path / "cut" / "rollouts.jsonl")
    # Eight questions at four a step make a pass in two steps, also with groups in flight at the cut.
    asked = [row["prompt"] for row in rollouts[::4]]
    assert sorted(asked) == sorted([letter * 3 for letter in "abcdefgh"] * 3)


def test_what_cannot_overlap_is_refused(files, tmp_path):
    stored = tmp_path / "rollouts.jsonl"
    stored.write_text("{}\n")
    overrides = overlapping(1, "rl.rollout.source=file", f"rl.rollout.path={stored}")
    with pytest.raises(ConfigError, match=r"rl\.rollout\.source"):
        check_rl(config_of(files, tmp_path / "refused", overrides=overrides))
    overrides = overlapping(1, "engine.sleep=kv_cache")
    with pytest.raises(ConfigError, match=r"engine\.sleep"):
        check_rl(config_of(files, tmp_path / "refused", overrides=overrides))
    with pytest.raises(ConfigError, match=r"rl.async.overdue"):
        config_of(files, tmp_path / "refused", overrides=overlapping(1, "rl.async.overdue=never"))


def note_order(config, path):
    """Train; record the begin and end of evaluations, the training steps, and the weights that answered."""

    def note(*words):
        with path.open("a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    begin, measure, update = Evaluator.begin, Evaluator._measure, Updater.update

    def noted_begin(self, step, *, waits=False):
        note("begins", step)
        return begin(self, step, waits=waits)

    def noted_measure(self, step, report, answers, *rest):
        versions = {version for options in answers for answer in options for version in answer.versions}
        note("ends", step, *sorted(versions))
        return measure(self, step, report, answers, *rest)

    def noted_update(self, batch, step, **how):
        note("trains", step + 1)
        return update(self, batch, step, **how)

    Evaluator.begin, Evaluator._measure, Updater.update = noted_begin, noted_measure, noted_update
    reinforce(config)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("waits", [False, True])
def test_the_next_step_is_trained_while_held_out_prompts_are_answered(files, tmp_path, world_size, waits):
    more = ["evaluation.every=1", "train_parameters.checkpointing_enabled=false"]
    if waits:  # To find the best step, the evaluation ends before its weights change.
        more = [*more[:1], "train_parameters.keep_best=true", "rl.save_every=100"]
    config = config_of(files, tmp_path / "run", overrides=overlapping(2, *more, steps=4))
    forked(note_order, config, tmp_path / "order", world_size=world_size)
    events = (tmp_path / "order").read_text().splitlines()
    of_main = list(dict.fromkeys(events))  # With two ranks, take the first note of each event.
    for step in (1, 2, 3):
        is_over = of_main.index(f"ends {step} {step}") < of_main.index(f"trains {step + 1}")
        assert is_over == waits
    assert of_main.index("ends 4 4") > of_main.index("trains 4")
    metrics = lines(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(5))
    assert all("eval/accuracy" in line for line in metrics)
    samples = lines(tmp_path / "run/samples.jsonl")
    assert [line["train_step"] for line in samples] == [step for step in range(5) for _ in range(8)]
