import json
import os
import random
import signal

import pytest
import torch
from kit.rank_processes import on_ranks
from kit.tiny_runs import NUM_STEPS, build_loop, whole_weights

# Dropout makes the result depend on every rank's random generator.
TINY_LLAMA = {"dropout": 0.3}


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def train(topology, folder, output, death):
    """Train from the state in `output`; `death` is (what, rank, step) or None."""
    import vectorlm.train.checkpoint.state as state

    training = build_loop(topology, folder, output=output, num_micro_batches=2)
    what, rank, step = death or (None, None, None)
    store = training.recorder.checkpoints
    optimize, save = training.optimize, store.save

    def optimize_or_die(micro_batches):
        if training.step == step - 1:
            die()
        return optimize(micro_batches)

    def save_or_die(at, *args):
        # Rank 0 dies after writing everything but the final name; another rank dies before it writes its part.
        if at == step and rank == 0:
            state.folder.finish = die
        elif at == step:
            state.capture_rng = die
        save(at, *args)

    if rank == topology.rank:
        training.optimize = optimize_or_die if what == "step" else optimize
        store.save = save_or_die if what == "save" else save
    training.run()
    return training.recorder.resume_step, whole_weights(training.optimizer_step.model)


def curve(output):
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    exact = ("step", "train/loss", "train/grad_norm", "train/learning_rate", "eval/loss")
    return [{name: line[name] for name in exact if name in line} for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("straight")
    return on_ranks(2, train, folder, output, None)[0][1], curve(output)


@pytest.mark.slow
@pytest.mark.parametrize(
    "death",
    [
        pytest.param(("step", 0, random.Random("20").randint(2, NUM_STEPS)), marks=pytest.mark.slow),
        pytest.param(("step", 1, random.Random("21").randint(2, NUM_STEPS)), marks=pytest.mark.slow),
        pytest.param(("save", 0, 4), marks=pytest.mark.slow),
        ("save", 1, 2),
    ],
)
def test_a_killed_run_started_again_ends_bit_for_bit_where_the_uninterrupted_one_ends(
    death, folder, uninterrupted, tmp_path
):
    expected, expected_curve = uninterrupted
    _, rank, step = death
    assert on_ranks(2, train, folder, tmp_path, death, check=False)[rank] is None
    last_saved = (step - 1) // 2 * 2 or None
    for resume_step, weights in on_ranks(2, train, folder, tmp_path, None):
        assert resume_step == last_saved
        for name in expected:
            assert torch.equal(weights[name], expected[name]), name
    assert curve(tmp_path) == expected_curve
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000006",
    ]


@pytest.mark.slow
def test_dropout_makes_ranks_and_restarts_differ_unless_generators_are_restored(
    uninterrupted, folder, tmp_path
):
    ((_, alone),) = on_ranks(1, train, folder, tmp_path, None)
    assert not torch.equal(alone["lm_head.weight"], uninterrupted[0]["lm_head.weight"])
