"""Checks of an engine that wakes up: tensors that vLLM does not restore, and log-probabilities of a fixed text."""

import contextlib
import functools
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kit.families import FAMILIES, save_family
from kit.rank_processes import forked
from kit.sft_runs import make_config
from kit.tiny_engine import TINY_ENGINE
from sleep_cases import PLANT, Scales

from vectorlm import SamplingEngine, Topology
from vectorlm.errors import ChangedBySleep, EngineError, VectorLMError
from vectorlm.runs.fine_tuning import finetune
from vectorlm.sampling.backends.vllm.backend import SleepCheck
from vectorlm.sampling.backends.vllm.shim import CudaSleep
from vectorlm.sampling.weights import unlisted
from vectorlm.sampling.weights.unlisted import UnlistedTensors, held_tensors
from vectorlm.train.load import load_model

WEIGHTS, BOTH = frozenset({"weights"}), frozenset({"weights", "kv_cache"})
DISCARDING = f"{Path(__file__).parent}/sleep_cases.py:Discarding"
GREEDY = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, "logprobs": 0}


class Slotted:
    __slots__ = ("scale",)


def model_with_everything():
    """Return a model, and by name the tensors that neither vLLM nor an update restores."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    layer = model[1]
    layer.register_buffer("mask", torch.ones(3), persistent=False)
    layer.row, layer.part_of_mask = layer.weight.data[0], layer.mask[1:]
    layer.empty, layer.shape_only = torch.empty(0), torch.empty(3, device="meta")
    layer.kv_cache = torch.ones(5)
    layer.scale, layer.zero_dim = torch.ones(3), torch.tensor(2.0)
    layer.method = Scales({"k": [torch.ones(2, dtype=torch.bfloat16)]}, model)
    layer.slotted = Slotted()
    layer.slotted.scale = torch.ones(9, dtype=torch.uint8)
    table = torch.ones(1500)
    layer.look_up = lambda index: table[index]
    layer.bound = functools.partial(print, torch.ones(1).expand(6))
    layer.again = layer.scale
    model[0].weight.scale = torch.ones(2)
    return model, {
        "1.scale": layer.scale,
        "1.zero_dim": layer.zero_dim,
        "1.method.by_name['k'][0]": layer.method.by_name["k"][0],
        "1.slotted.scale": layer.slotted.scale,
        "1.look_up.table": table,
        "1.bound.args[0]": layer.bound.args[0],
        "0.weight.scale": model[0].weight.scale,
    }


def test_every_tensor_beside_parameters_and_buffers_comes_back_bit_for_bit():
    model, held = model_with_everything()
    listed = UnlistedTensors(model, [model[1].kv_cache])
    assert listed.restore() == []
    before = {name: tensor.clone() for name, tensor in held.items()}
    for tensor in (*held.values(), *model.parameters(), model[1].kv_cache):
        tensor.data.as_strided((1,), (1,)).zero_()
    assert set(listed.restore()) == set(held)
    assert all(torch.equal(tensor, before[name]) for name, tensor in held.items())
    assert not model[1].kv_cache[0]
    assert listed.restore() == []


def test_copies_go_to_the_smallest_and_the_rest_is_lost_by_name(monkeypatch):
    model, held = model_with_everything()
    monkeypatch.setattr(unlisted, "COPIED_BYTES", 1000)
    listed = UnlistedTensors(model, [model[1].kv_cache])
    held["1.scale"].zero_()
    assert listed.restore() == ["1.scale"]
    held["1.look_up.table"][1499] = 0
    with pytest.raises(ChangedBySleep, match=r"lost 1 tensors .*\['1.look_up.table'\]"):
        listed.restore()


def test_the_walk_ends_in_cycles_and_leaves_no_tensor_out():
    first, second = {"scale": torch.ones(1)}, []
    first["other"], second[:] = second, [first, second]
    assert [name for name, _ in held_tensors(second)] == ["[0]['scale']"]


class Weights:
    """A stand-in for the part of a receiver that a `SleepCheck` uses."""

    now = "checkpoint"

    def weight_sums(self):
        return [{"weight": self.now}]


def checked(*scores):
    """Return a check whose engine gives these scores, and its weights."""
    answers, weights = iter(scores), Weights()
    return SleepCheck(lambda salt: np.array([[5.0, next(answers)]]), weights), weights


def sleep_and_update(check, weights, now):
    check.before_sleep()
    weights.now = now
    check.after_update()
    check.compare()


def test_log_probabilities_are_compared_once_and_only_with_the_same_weights():
    check, weights = checked(-1.0, -1.0, -2.0, -2.0, -2.0)
    sleep_and_update(check, weights, "step 0")
    sleep_and_update(check, weights, "step 0")
    # A third score would raise, because the list has no more.
    sleep_and_update(check, weights, "step 0")


def test_other_weights_at_both_first_updates_leave_nothing_to_compare():
    check, weights = checked(-1.0, -1.0, -2.0, -2.0)
    for step in range(3):
        sleep_and_update(check, weights, f"step {step}")


@pytest.mark.parametrize("scores", [(-1.0, -1.0, -1.0 - 2**-52), (-1.0, -1.0, np.nan), (-1.0, -1.001, -1.1)])
def test_any_other_bit_is_an_error_and_noise_allows_as_much_as_itself(scores):
    check, weights = checked(*scores)
    with pytest.raises(ChangedBySleep, match="log-probabilities"):
        sleep_and_update(check, weights, "checkpoint")


@pytest.mark.parametrize("scores", [(-1.0, -1.001, -1.002), (np.nan, np.nan, np.nan)])
def test_noise_without_a_sleep_and_nan_in_the_weights_are_no_change(scores):
    check, weights = checked(*scores)
    sleep_and_update(check, weights, "checkpoint")


@pytest.mark.parametrize(("moved", "is_refused"), [(0.001, False), (0.5, True)])
def test_where_kernels_round_in_any_order_equal_tokens_may_change_places(moved, is_refused):
    answers = iter([[[5.0, -1.0]], [[5.0, -1.0]], [[9.0, -1.0 - moved]]])
    check = SleepCheck(lambda salt: np.array(next(answers)), Weights(), 0.02)
    with pytest.raises(ChangedBySleep) if is_refused else contextlib.nullcontext():
        sleep_and_update(check, check._receiver, "checkpoint")


class Pools:
    def __init__(self):
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))
        self.calls = []

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags):
        self.calls += tags


@pytest.mark.parametrize(("version", "is_refused"), [("0.28.1", True), ("0.29.0", False), ("0.32.0", False)])
def test_weights_sleep_alone_on_cuda_only_from_vllm_0_29_on(version, is_refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    refusal = pytest.raises(EngineError, match=r"0\.29") if is_refused else contextlib.nullcontext()
    engine = Pools()
    bed = CudaSleep(engine)
    with refusal:
        bed.sleep(WEIGHTS, frozenset())
    assert engine.calls == ([] if is_refused else ["sleep 2", "kv_cache"])
    bed = CudaSleep(engine := Pools())
    bed.sleep(BOTH, frozenset())
    with refusal:
        bed.wake_up(BOTH - WEIGHTS)
    bed.wake_up(WEIGHTS)
    bed.wake_up(BOTH - WEIGHTS)
    assert engine.calls == ["sleep 2", *([] if is_refused else ["kv_cache"]), "weights", "kv_cache"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("families")
    return lambda name: str(save_family(FAMILIES[name], path / name, tied=FAMILIES[name].always_tied))


def sleep_over(folder, receiver, planted="", moved=0.0, **engine_args):
    """Let an engine sleep and update it with the same weights plus `moved`.

    Returns:
        The warnings, the errors in order, and whether the answers are the same as before.
    """
    os.environ[PLANT] = planted
    model, errors, after = load_model(folder), [], None
    with (
        warnings.catch_warnings(record=True) as caught,
        SamplingEngine(
            folder, inference=DISCARDING, receiver=receiver, **{**TINY_ENGINE, **engine_args}
        ) as engine,
    ):
        warnings.simplefilter("always")

        def answers():
            return [completion for row in engine.sample([[2, 3, 4], [5]], GREEDY) for completion in row]

        before = [(answer.token_ids, answer.sampler_logprobs) for answer in answers()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += moved
        for call in (
            engine.sleep,
            engine.wake_up,
            lambda: engine.update(model, 0),
            lambda: engine.update(model, 1),
            engine.sleep,
            lambda: engine.update(model, 2),
            engine.wake_up,
            answers,
        ):
            try:
                after = call()
            except VectorLMError as error:
                errors.append(f"{type(error).__name__}: {error}")
        if after is not None:
            after = [(answer.token_ids, answer.sampler_logprobs) for answer in after]
    return (
        [str(warning.message) for warning in caught if "sleep" in str(warning.message)],
        errors,
        before == after,
    )


ONE_OR_TWO = [pytest.param(1, marks=pytest.mark.long), 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "receiver"),
    [
        pytest.param(name, ("live", "packed")[index % 2], marks=() if name == "Gemma 3" else pytest.mark.long)
        for index, name in enumerate(FAMILIES, 1)
    ],
)
def test_an_engine_that_loses_everything_in_its_sleep_answers_as_before(family, receiver, saved):
    said, errors, is_as_before = sleep_over(saved(family), receiver, "small", dtype=FAMILIES[family].dtype)
    assert not errors
    assert is_as_before
    assert len(said) == 2
    assert all("quant_method.scales.by_name['k'][0]" in one for one in said)
    assert not any("packed" in message for message in said)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", ONE_OR_TWO)
def test_rank_0_is_warned_and_no_other_rank(world_size, saved):
    results = forked(sleep_over, saved("Gemma 3"), "live", "small", world_size=world_size)
    assert [len(said) for said, _, _ in results] == [2, 0][:world_size]
    assert all(not errors and is_as_before for _, errors, is_as_before in results)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", ONE_OR_TWO)
def test_a_tensor_that_is_lost_is_named_on_all_ranks_and_nothing_is_sampled_any_more(world_size, saved):
    for said, errors, _ in forked(sleep_over, saved("Gemma 3"), "live", "large", world_size=world_size):
        assert not said
        # All calls after the first sleep fail.
        assert len(errors) == 7
        assert all(error.startswith("ChangedBySleep: ") for error in errors)
        assert all("'model.layers.1.mlp.down_proj.table'" in error for error in errors)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", ONE_OR_TWO)
def test_a_change_that_no_tensor_shows_is_found_by_log_probabilities(world_size, saved):
    for _, errors, _ in forked(sleep_over, saved("Gemma 3"), "live", "number", world_size=world_size):
        # The update and all calls after it fail.
        assert len(errors) == 6
        assert all("sleep changed what the engine computes" in error for error in errors)


@pytest.mark.slow
def test_an_update_with_other_weights_is_not_compared(saved):
    _, errors, is_as_before = sleep_over(saved("Gemma 3"), "live", moved=0.01)
    assert not errors
    assert not is_as_before


@pytest.mark.slow
def test_workers_of_a_parallel_engine_compare_their_own(saved, monkeypatch):
    # Workers import the class by its module's name.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    monkeypatch.setattr(sys.modules[__name__], "DISCARDING", "sleep_cases:Discarding")
    said, errors, is_as_before = sleep_over(saved("Llama"), "live", "small", tensor_parallel_size=2)
    assert not errors
    assert is_as_before
    assert len(said) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sleep", "planted"),
    [
        ("all", "number"),
        ("kv_cache", ""),
        pytest.param("all", "", marks=pytest.mark.long),
        pytest.param("kv_cache", "number", marks=pytest.mark.long),
    ],
)
def test_a_run_that_sleeps_compares_before_its_first_step(sleep, planted, inputs, tmp_path, monkeypatch):
    monkeypatch.setenv(PLANT, planted)
    path = tmp_path / "run"
    engine = {**TINY_ENGINE, "max_model_len": 32, "inference": DISCARDING}
    sampled = {"temperature": 0.0, "max_tokens": 4}
    sampler = {
        "prompts": ["abc"],
        "sample_frequency": 4,
        "sampling_params": sampled,
        "sleep": sleep,
        "engine": engine,
    }
    config = make_config(inputs, path, sampler=sampler)
    if planted:
        with pytest.raises(ChangedBySleep):
            finetune(config, Topology())
    else:
        finetune(config, Topology())
    assert (path / "metrics.jsonl").exists() != bool(planted)
