"""Several adapters in one vLLM engine: names, slots, versions, cached blocks, updates in flight and two ranks."""

import pytest
from kit.rank_processes import forked
from kit.tiny_engine import TINY_ENGINE
from lora_cases import WITH_LORA, adapted, move
from swap_cases import FP32_GAP, GREEDY, PROMPTS, largest_gap

from vectorlm import HFEngine, SamplingEngine
from vectorlm.errors import ChecksumMismatch, EngineError, UnknownAdapter

TINY_LLAMA = {"tied": True, "hidden_size": 64, "max_length": 256}
SEVERAL = {**WITH_LORA, "max_loras": 3, "scheduling_policy": "priority"}
ENGINE_ARGS = {**SEVERAL, "receiver": "live", "max_model_len": 256, "sampling_params": GREEDY}
LONG_PROMPT = list(range(2, 46)) * 4
EXACT_GAP = 1e-5


def moved(folder, seed):
    model = adapted(folder)
    move([model], seed)
    return model


def gap_of(engine, model, adapter):
    """Return the largest gap between an adapter's answers and the model with these adapters."""
    answers = engine.sample(PROMPTS, GREEDY, adapter=adapter)
    return largest_gap([completion for options in answers for completion in options], model)


@pytest.fixture(autouse=True)
def policy_alone(request):
    """Remove the adapters that a test added to this module's engine."""
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        for name in engine.adapters.keys() - {"policy", "base"}:
            engine.remove_adapter(name)


def test_each_adapter_answers_as_the_trainer_with_that_adapter(engine, folder):
    policy, judge = moved(folder, 0), moved(folder, 1)
    whole = engine.update(policy, 3).num_bytes
    assert engine.update(judge, 40, name="judge").num_bytes == whole, "another model's base crosses"
    engine.update(policy, 4)
    move([policy], 2)
    assert engine.update(policy, 5).num_bytes < whole / 5, "the base crossed again"
    with policy.disable_adapter():
        assert engine.update(policy, 7, name="reference").num_bytes == 0
        for name in ("base", "reference"):
            assert gap_of(engine, policy, name) < EXACT_GAP
    assert gap_of(engine, policy, "policy") < EXACT_GAP
    assert gap_of(engine, judge, "judge") < EXACT_GAP
    assert gap_of(engine, judge, "policy") > 0.01
    assert engine.version == 5
    assert engine.adapters == {"policy": 5, "judge": 40, "reference": 7, "base": 4}
    for name, version in engine.adapters.items():
        (answer,), *_ = engine.sample(PROMPTS, GREEDY, adapter=name)
        assert {*answer.versions} == {version}
    (generated,) = engine.generate([PROMPTS[0]], GREEDY, adapter="judge")
    assert generated.outputs[0].token_ids == list(engine.sample(PROMPTS[:1], adapter="judge")[0][0].token_ids)


def test_one_batch_may_ask_all_adapters_and_the_base(engine, folder):
    models = {name: moved(folder, seed) for seed, name in enumerate(("policy", "one", "two"))}
    for name, model in models.items():
        engine.update(model, 1, name=name)
    batches = {name: engine.submit(PROMPTS, GREEDY, adapter=name) for name in (*models, "base")}
    found = {name: [completion for (completion,) in batch.result()] for name, batch in batches.items()}
    for name, model in models.items():
        assert largest_gap(found[name], model) < EXACT_GAP
    with model.disable_adapter():
        assert largest_gap(found["base"], model) < EXACT_GAP


def test_a_full_engine_and_unknown_names_raise_with_a_list_and_remove_frees_a_slot(engine, folder):
    policy = moved(folder, 0)
    engine.update(policy, 1)
    for name in ("one", "two"):
        move([policy], 1)
        engine.update(policy, 1, name=name)
    with pytest.raises(EngineError, match=r"max_loras=3.*'three'.*policy, one, two"):
        engine.update(policy, 1, name="three")
    assert "three" not in engine.adapters
    with pytest.raises(UnknownAdapter, match=r"'three'.*base, one, policy, two"):
        engine.sample(PROMPTS, adapter="three")
    with pytest.raises(UnknownAdapter, match="'three'"):
        engine.submit(PROMPTS, adapter="three").result()
    for name in ("policy", "base"):
        with pytest.raises(EngineError, match=name):
            engine.remove_adapter(name)
    with pytest.raises(UnknownAdapter, match="'three'"):
        engine.remove_adapter("three")
    engine.remove_adapter("one")
    with pytest.raises(UnknownAdapter, match="'one'"):
        engine.sample(PROMPTS, adapter="one")
    engine.update(policy, 1, name="three")
    assert gap_of(engine, policy, "three") < EXACT_GAP


def test_names_that_no_update_may_have_are_refused(engine, folder):
    model = adapted(folder)
    for name, error in (("base", ValueError), ("", ValueError), (3, TypeError)):
        with pytest.raises(error, match="name="):
            engine.update(model, 1, name=name)
    with HFEngine(folder) as plain:
        with pytest.raises(ValueError, match="enable_lora"):
            plain.update(model, 1, name="judge")
        with pytest.raises(UnknownAdapter, match="only policy"):
            plain.sample([[2, 3]], adapter="base")


def test_cached_blocks_are_an_adapters_own_and_survive_updates_of_others(engine, folder):
    policy = moved(folder, 0)
    engine.update(policy, 1)
    engine.update(policy, 1, name="judge")
    engine.sample([LONG_PROMPT], GREEDY, adapter="judge")
    assert engine.generate([LONG_PROMPT], GREEDY)[0].num_cached_tokens == 0
    move([policy], 1)
    engine.update(policy, 2)
    for name, is_cached in (("judge", True), ("base", False), ("policy", False), ("policy", True)):
        (found,) = engine.generate([LONG_PROMPT], GREEDY, adapter=name)
        assert (found.num_cached_tokens > 0) == is_cached, name
    engine.update(policy, 3, name="judge")
    (found,) = engine.generate([LONG_PROMPT], GREEDY, adapter="judge")
    assert found.num_cached_tokens == 0
    assert gap_of(engine, policy, "judge") < EXACT_GAP


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "drain"])
def test_an_update_in_flight_marks_the_tokens_of_its_own_adapter(engine, folder, in_flight):
    policy, judge = moved(folder, 0), moved(folder, 1)
    engine.update(judge, 1, name="judge")
    engine.update(policy, 1)
    engine.update(judge, 1, name="judge")
    long = {**GREEDY, "max_tokens": 200}
    batches = {name: engine.submit([[2, 3, 4]], long, adapter=name) for name in ("policy", "judge")}
    move([policy], 2)
    engine.update(policy, 2, in_flight=in_flight)
    engine.remove_adapter("judge")
    found = {name: batch.result()[0][0] for name, batch in batches.items()}
    assert {*found["judge"].versions} == {1}
    assert len(found["judge"].token_ids) == 200
    assert largest_gap([found["judge"]], judge) < FP32_GAP
    assert found["policy"].versions[-1] == (1 if in_flight == "drain" else 2)


def test_an_adapter_that_did_not_arrive_is_gone_and_the_policy_goes_on(engine, folder, monkeypatch):
    policy = moved(folder, 0)
    engine.update(policy, 1)
    channel = engine._channel
    call = channel.call

    def corrupt(command, silence_s):
        if type(command).__name__ == "FinishUpdate":
            object.__setattr__(command, "checksums", [total + 1 for total in command.checksums])
        return call(command, silence_s)

    monkeypatch.setattr(channel, "call", corrupt)
    with pytest.raises(ChecksumMismatch, match="differ"):
        engine.update(policy, 1, name="judge")
    monkeypatch.undo()
    with pytest.raises(ChecksumMismatch):
        engine.sample(PROMPTS)
    engine.update(policy, 2)
    assert gap_of(engine, policy, "policy") < EXACT_GAP
    assert "judge" not in engine.adapters
    with pytest.raises(UnknownAdapter):
        engine.sample(PROMPTS, adapter="judge")


def two_ranks(folder):
    """Update three adapters of a sharded model on every rank; return the gaps, and the adapters that a sleep keeps."""
    from torch.distributed.fsdp import fully_shard

    model, references = adapted(folder), {}
    for block in model.base_model.model.model.layers:
        fully_shard(block)
    fully_shard(model)
    with SamplingEngine(
        folder, **{**ENGINE_ARGS, "dtype": "float32", "kv_cache_memory_bytes": 16 << 20}
    ) as engine:
        for step, name in enumerate(("one", "two", "policy")):
            references[name] = adapted(folder)
            for seed in range(step + 1):
                move([references[name]], seed)
            move([model], step)
            engine.update(model, step, name=name)
        gaps = [gap_of(engine, reference, name) for name, reference in references.items()]
        engine.sleep()
        left = dict(engine.adapters)
        engine.wake_up()
        engine.update(model, 2)
        with pytest.raises(UnknownAdapter, match="only base, policy"):
            engine.sample(PROMPTS, adapter="one")
        return gaps, left, gap_of(engine, references["policy"], "policy")


@pytest.mark.slow
def test_two_ranks_send_adapters_by_name_and_a_sleep_loses_all_but_the_policy(folder):
    for gaps, left, after in forked(two_ranks, str(folder), world_size=2):
        assert max(gaps) < EXACT_GAP
        assert left.keys() == {"base", "policy"}
        assert after < EXACT_GAP


def remove_while_prompts_wait(folder):
    """Remove the adapter of a batch whose prompts two engines draw one after the other; return the batch's size."""
    options = {**TINY_ENGINE, **WITH_LORA, "max_loras": 2, "max_num_seqs": 1, "data_parallel_size": 2}
    with SamplingEngine(folder, **options) as engine:
        model = adapted(folder)
        for step, name in enumerate(("policy", "judge")):
            engine.update(model, step, name=name)
        empty, handle = (
            engine.submit([]),
            engine.submit([[3, 4, place] for place in range(6)], GREEDY, "judge"),
        )
        engine.remove_adapter("judge")
        assert "judge" not in engine.adapters
        num_answers = len(handle.result())
        assert engine.poll() == [empty]
        return num_answers


@pytest.mark.slow
def test_an_adapter_leaves_after_the_prompts_that_no_engine_has_drawn_yet(folder):
    assert forked(remove_while_prompts_wait, str(folder), world_size=2) == [6, 6]
