"""Order of sleeping, waking, updating and sampling, without an engine."""

import sys
from types import SimpleNamespace

import pytest

from vectorlm.errors import EngineError
from vectorlm.sampling.backends.vllm.shim import CudaSleep
from vectorlm.sampling.sampler.scheduler import SleepState

WEIGHTS, KV_CACHE, BOTH = frozenset({"weights"}), frozenset({"kv_cache"}), frozenset({"weights", "kv_cache"})


class Memory:
    """A device memory that tracks its mapped parts."""

    def __init__(self):
        self.mapped, self.calls, self.failure = set(BOTH), [], None

    def sleep(self, parts, asleep):
        if self.failure:
            raise self.failure
        assert not self.mapped & asleep
        assert parts <= self.mapped
        self.mapped -= parts
        self.calls.append(("sleep", sorted(parts)))

    def wake_up(self, parts):
        if self.failure:
            raise self.failure
        assert not self.mapped & parts
        self.mapped |= parts
        self.calls.append(("wake_up", sorted(parts)))


@pytest.fixture(autouse=True)
def _vllm_is_not_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))


@pytest.fixture
def memory():
    return Memory()


@pytest.fixture
def rest(memory):
    return SleepState(memory.sleep, memory.wake_up)


def refusal(rest):
    with pytest.raises(EngineError) as caught:
        rest.check_sampling()
    return str(caught.value)


def test_sampling_is_refused_until_everything_is_awake_and_filled(rest):
    rest.sleep(BOTH, 0)
    assert "call wake_up(weights=True, kv_cache=True) and update()" in refusal(rest)
    rest.wake_up(BOTH)
    assert "wake_up" not in refusal(rest)
    rest.wake_up(WEIGHTS)
    assert "update()" in refusal(rest)  # The unfinished update has not filled the weights.
    rest.finish_update()
    rest.check_sampling()


def test_weights_that_slept_hold_nothing_though_the_cache_slept_after_them(rest):
    for part in (WEIGHTS, KV_CACHE):
        rest.sleep(part, 0)
        rest.wake_up(part)
    assert "update()" in refusal(rest)


def test_sleeping_twice_and_waking_twice_touch_the_memory_once(rest, memory):
    rest.sleep(KV_CACHE, 0)
    rest.sleep(BOTH, 0)
    rest.sleep(BOTH, 0)
    rest.wake_up(BOTH)
    rest.wake_up(BOTH)
    slept = [("sleep", ["kv_cache"]), ("sleep", ["weights"])]
    assert memory.calls == [*slept, ("wake_up", ["kv_cache", "weights"])]


def test_a_refused_sleep_changes_nothing_and_a_failed_one_shuts_the_engine(rest, memory):
    memory.failure = EngineError("no")
    with pytest.raises(EngineError, match="no"):
        rest.sleep(BOTH, 0)
    rest.check_sampling()
    memory.failure = RuntimeError("half way")
    with pytest.raises(RuntimeError, match="half way"):
        rest.sleep(BOTH, 0)
    assert "weights and kv_cache" in refusal(rest)


def test_what_could_not_be_woken_sleeps_on_and_may_be_woken_again(rest, memory):
    rest.sleep(BOTH, 0)
    memory.failure = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        rest.wake_up(KV_CACHE)
    assert rest.asleep == BOTH
    memory.failure = None
    rest.wake_up(KV_CACHE)
    assert rest.asleep == WEIGHTS


class OlderVllmOnCuda:
    """An engine with vLLM 0.26's rules for its two memory pools."""

    def __init__(self, sleep_mode=True):
        self.asleep, self.scheduling, self.lost = set(), True, set()
        self.vllm_config = self.model_config = self
        self.enable_sleep_mode = sleep_mode

    def is_refused(self):
        return bool(self.asleep)

    def sleep(self, level):
        self.scheduling = False
        if level and not self.is_refused():
            self.asleep |= BOTH
            self.lost |= {"kv_cache"} if level == 1 else BOTH

    def wake_up(self, tags):
        if set(tags) <= self.asleep:
            self.asleep -= set(tags)
        self.scheduling = not self.asleep


class VllmOnCuda(OlderVllmOnCuda):
    """An engine with vLLM 0.32's rules for its two memory pools."""

    def is_refused(self):
        return "weights" in self.asleep

    def release_kv_cache_memory(self):
        if self.scheduling or self.asleep:
            raise RuntimeError("requires a completed pause and all executor memory to be resident")
        self.asleep.add("kv_cache")
        self.lost.add("kv_cache")


SLEEPS = [WEIGHTS, KV_CACHE, BOTH]


@pytest.mark.parametrize("vllm", [OlderVllmOnCuda, VllmOnCuda])
@pytest.mark.parametrize("second", SLEEPS)
@pytest.mark.parametrize("first", SLEEPS)
def test_on_cuda_vllm_is_led_to_just_the_parts_that_shall_sleep(first, second, vllm):
    engine = vllm()
    bed = CudaSleep(engine)
    rest = SleepState(bed.sleep, bed.wake_up)
    rest.sleep(first, 0)
    assert engine.asleep == first
    rest.sleep(second, 0)
    assert engine.asleep == first | second
    assert not engine.scheduling
    rest.wake_up(BOTH)
    assert engine.asleep == set()
    assert engine.scheduling
    assert ("weights" in engine.lost) == ("weights" in first | second)


def test_on_cuda_an_older_vllm_without_the_release_call_keeps_the_weights_too():
    engine = OlderVllmOnCuda()
    CudaSleep(engine).sleep(KV_CACHE, frozenset())
    assert engine.asleep == {"kv_cache"}
    assert engine.lost == {"kv_cache"}


def test_on_cuda_an_engine_outside_sleep_mode_says_how_to_build_it():
    engine = VllmOnCuda(sleep_mode=False)
    bed = CudaSleep(engine)
    rest = SleepState(bed.sleep, bed.wake_up)
    with pytest.raises(EngineError, match="enable_sleep_mode=True"):
        rest.sleep(BOTH, 0)
    rest.check_sampling()
