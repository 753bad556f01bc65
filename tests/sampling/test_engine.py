"""A single engine without a launcher: `SamplingEngine` in a script or a notebook."""

import os
import re
from pathlib import Path

import pytest
import torch
from interrupt import interrupt
from kit.tiny_engine import TINY_ENGINE
from swap_cases import GREEDY, PROMPTS, compare, perturb, reference_greedy
from transformers import AutoModelForCausalLM

from vectorlm import SamplingEngine, Topology, exact
from vectorlm.errors import EngineError
from vectorlm.sampling.arguments import require_folder

LONG_PROMPT = list(range(2, 46)) * 4


TINY_LLAMA = {"tied": True, "hidden_size": 64, "max_length": 256}
ENGINE_ARGS = {
    "receiver": "packed",
    "max_model_len": 256,
    "sampling_params": GREEDY,
    "enable_sleep_mode": True,  # CUDA needs it, and CPU must ignore it.
}


@pytest.fixture
def models(folder):
    return [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2)]


@pytest.fixture
def next_step(engine):
    return engine.version + 1


@pytest.mark.slow
def test_before_any_update_it_samples_from_the_checkpoint_and_seeds_mean_the_same_in_several_steps(
    folder, models
):
    # Use another engine: the shared one may have any weights now, and its steps have more tokens.
    with SamplingEngine(str(folder), max_num_batched_tokens=64, **TINY_ENGINE) as fresh:
        assert fresh.version == -1
        equal, gap, _ = compare(fresh, models[0])
        assert all(equal)
        assert gap < 1e-4
        assert fresh.receiver == "live"  # `auto` chooses this for a tiny model.
        assert re.fullmatch(r"vLLM [\d.]+, model runner V[12] \(CPUModelRunner\)", fresh.runner)
        prompts = [[2 + index] * 30 for index in range(8)]
        params = [{"seed": seed, "max_tokens": 6, "ignore_eos": True, "n": 2} for seed in range(8)]
        first, again = fresh.sample(prompts, params), fresh.sample(prompts, params)
        assert first == again
        assert first[0][0].token_ids != first[0][1].token_ids


def test_the_same_step_moves_nothing_unless_the_weights_have_changed(engine, models, next_step):
    first = engine.update(models[0], next_step)
    again = engine.update(models[0], next_step)
    assert not first.skipped
    assert again.skipped
    assert first.num_bytes == sum(parameter.numel() * 4 for parameter in models[0].parameters())
    assert again.num_bytes == 0
    perturb(*models, seed=1)
    with pytest.warns(UserWarning, match=f"train_step={next_step}"):
        assert not engine.update(models[0], next_step).skipped
    assert all(compare(engine, models[1])[0])


def test_several_models_take_turns_in_one_engine_under_one_step(engine, models, next_step, folder):
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    perturb(other, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), seed=9)
    for model in (models[0], other, models[0], other):
        assert not engine.update(model, next_step).skipped
        assert compare(engine, model)[1] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("receiver", ["live", "packed"])
def test_an_engine_that_has_held_nan_is_right_after_the_next_good_update(folder, models, receiver):
    """This includes prompts that reuse KV cache blocks with NaN."""
    # The cache has few blocks, and every prompt reuses some that had NaN.
    few = {**TINY_ENGINE, "kv_cache_memory_bytes": 256 << 10, "receiver": receiver}
    if receiver == "live":
        few["exact"] = True
        exact(models[1])
    limit = 0.0 if receiver == "live" else 1e-4
    with SamplingEngine(str(folder), **few, check_finite=False) as engine:
        spoilt = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for place in ("model.layers.0.self_attn.v_proj", "model.norm"):
            spoilt.get_submodule(place).weight.data.fill_(float("nan"))
            engine.update(spoilt, 2 * engine.version + 2)
            engine.sample(PROMPTS, {"max_tokens": 20})
            running = engine.submit([[3, 4]], {"max_tokens": 60, "ignore_eos": True})
            engine.update(models[0], engine.version + 1, in_flight="keep")
            assert compare(engine, models[1])[1] <= limit
            running.cancel()
            # An engine that wakes up overwrites its cache.
            engine.update(spoilt, engine.version + 1)
            engine.sample(PROMPTS, {"max_tokens": 20})
            engine.sleep()
            engine.update(models[0], engine.version + 1)
            engine.wake_up()
            assert compare(engine, models[1])[1] <= limit


def test_the_prefix_cache_never_serves_old_blocks(engine, models, next_step):
    engine.update(models[0], next_step)
    cold, warm = (engine.generate([LONG_PROMPT], GREEDY)[0] for _ in range(2))
    assert warm.num_cached_tokens > 0, "the prompt was not cached, so this test would prove nothing"
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    perturb(*models, seed=2)
    engine.update(models[0], next_step + 1)
    fresh = engine.generate([LONG_PROMPT], GREEDY)[0]
    assert fresh.num_cached_tokens == 0
    assert list(fresh.outputs[0].token_ids) == reference_greedy(models[1], LONG_PROMPT)


def test_a_kv_cache_that_slept_serves_no_old_blocks_and_the_weights_stay(engine, models, next_step):
    engine.update(models[0], next_step)
    for _ in range(2):
        warm = engine.generate([LONG_PROMPT], GREEDY)[0]
    assert warm.num_cached_tokens > 0, "the prompt was not cached, so this test would prove nothing"
    engine.sleep(weights=False)
    engine.wake_up()
    assert engine.generate([LONG_PROMPT], GREEDY)[0].num_cached_tokens == 0
    assert engine.update(models[0], next_step).skipped


@pytest.mark.parametrize(
    "prompts", [5, [[2, 3], 5], [None], [[1.5]], [b"abc"], [[{"rol": "user", "content": "hi"}]]]
)
def test_what_is_no_prompt_is_refused(engine, prompts):
    with pytest.raises(TypeError, match="prompt"):
        engine.sample(prompts)


def test_a_prompt_that_is_too_long_is_named_among_others(engine):
    with pytest.raises(EngineError, match=r"^prompt 1 "):
        engine.sample([[2, 3], [2] * 5000], {"max_tokens": 2})
    assert len(engine.sample([[2, 3]], {"max_tokens": 2})) == 1


def test_generate_returns_vllms_own_objects(engine):
    outputs = engine.generate(["abc", "d"], {"n": 3, "temperature": 1.0, "max_tokens": 4, "logprobs": 2})
    assert type(outputs[0]).__module__ == "vllm.outputs"
    assert [len(output.outputs) for output in outputs] == [3, 3]
    assert outputs[0].prompt == "abc"
    assert outputs[1].request_id == "1"
    assert len(outputs[0].outputs[2].logprobs) == len(outputs[0].outputs[2].token_ids)
    assert outputs[0].finished
    assert engine.generate([]) == []


@pytest.mark.parametrize("stop", [None, ["a", "e", "t"]])
def test_what_is_streamed_is_the_beginning_of_the_same_completion(engine, stop):
    params = {"max_tokens": 30, "temperature": 1.0, "seed": 5, "logprobs": 0, "n": 1, "ignore_eos": True}
    params["stop"], parts, futures = stop, [], []
    for hear in (None, parts.append):
        futures.append(engine.local.ask([5, 6, 7], params, hear))
        engine.local.flush()
        futures[-1].result(timeout=60)
    (whole,), (streamed,) = (future.result() for future in futures)
    assert streamed == whole
    num_told = sum(len(part.token_ids) for part in parts)
    assert len(parts) == num_told == len(whole.token_ids) - 1 > 3
    for name in ("token_ids", "sampler_logprobs", "versions"):
        told = tuple(value for part in parts for value in getattr(part, name))
        assert told == getattr(whole, name)[:num_told]
    assert whole.text.startswith("".join(part.text for part in parts))


@pytest.mark.slow
def test_a_step_that_raises_arrives_with_its_traceback(folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    failing = {"logits_processors": ["failing_processor:FailsAfterWarmUp"]}
    with SamplingEngine(str(folder), **TINY_ENGINE, **failing) as broken:
        with pytest.raises(EngineError, match=r"(?s)this step fails.*In the sampler process:.*Traceback"):
            broken.sample([[2, 3]])
        with pytest.raises(EngineError, match="earlier step"):
            broken.sample([[2, 3]])


@pytest.mark.slow
def test_float16_samples_where_onednn_cannot_pack_it(folder, models):
    with SamplingEngine(str(folder), receiver="packed", **{**TINY_ENGINE, "dtype": "float16"}) as half:
        perturb(*models, seed=5)
        half.update(models[0], 0)
        assert compare(half, models[1])[1] < 0.15


def test_an_interrupted_generate_leaves_the_engine_usable(engine, models, next_step):
    engine.update(models[0], next_step)
    endless = {"max_tokens": 250, "ignore_eos": True, "n": 64}
    interrupt(lambda: engine.sample([[2, 3]] * 4, endless), after_s=0.3)
    assert all(compare(engine, models[0])[0])
    perturb(*models, seed=3)
    engine.update(models[0], next_step + 1)
    assert all(compare(engine, models[1])[0])


def test_a_refusal_names_what_to_change(engine):
    with pytest.raises(EngineError, match=r"prompt 1 .* has 300 tokens.*max_model_len"):
        engine.sample([[2], [2] * 300])
    with pytest.raises(EngineError, match=r"'num_return_sequences'\. Use 'n'"):
        engine.sample([[2]], {"num_return_sequences": 2})


@pytest.mark.parametrize(
    ("prompt", "params"),
    [([2, 10**6], None), ([-1], None), ([2], {"seed": 2**80}), ([2], {"seed": -(2**64)})],
)
def test_what_would_end_the_engine_is_refused(engine, prompt, params):
    with pytest.raises(EngineError, match="seed" if params else "token"):
        engine.sample([prompt], params)
    assert engine.sample([[2]], {"max_tokens": 1, "seed": 2**63 - 1})


def test_wrong_arguments_of_the_constructor_are_refused_at_once(folder, tmp_path):
    with pytest.raises(ValueError, match="receiver='frozen'"):
        SamplingEngine(str(folder), receiver="frozen")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        SamplingEngine(str(folder), log_path=tmp_path / "nowhere" / "log")
    with pytest.raises(FileNotFoundError, match="absent does not exist"):
        SamplingEngine(str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="channel='thread' is not known"):
        SamplingEngine(tmp_path, channel="thread")
    for name, value in (("devices", [0]), ("log_path", "log")):
        with pytest.raises(ValueError, match=name):
            SamplingEngine(tmp_path, inference="transformers", channel="inline", **{name: value})


@pytest.mark.parametrize("inference", ["vllm", "vectorlm.sampling.backends.vllm.backend:VLLM"])
def test_vllm_in_the_process_of_a_rank_is_refused_by_name(folder, inference):
    with (
        SamplingEngine(folder, inference=inference, channel="inline") as engine,
        pytest.raises(EngineError, match="channel='inline'"),
    ):
        engine.sample([[2, 3]])


@pytest.mark.parametrize(
    ("step", "error"),
    [(-1, ValueError), (2**31, ValueError), *((wrong, TypeError) for wrong in (1.0, True, "1", None))],
)
def test_an_update_takes_a_model_and_a_small_natural_number(engine, models, step, error):
    with pytest.raises(error, match=f"train_step={step!r}"):
        engine.update(models[0], step)
    with pytest.raises(TypeError, match="OrderedDict"):
        engine.update(models[0].state_dict(), 1)


def test_on_cuda_the_engine_is_loaded_once_it_is_made(tmp_path):
    arguments = {"inference": "transformers", "channel": "inline"}
    SamplingEngine(tmp_path, **arguments).close()
    with pytest.raises(EngineError, match=r"config\.json"):
        SamplingEngine(tmp_path, **arguments, topology=Topology(device="cuda:0"))


def test_a_folder_that_is_missing_but_may_be_a_models_name_is_pointed_out_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="data/nowhere"):
        require_folder("data/nowhere")
    for path in ("data/nowhere/model", "./nowhere", "../nowhere", "~/nowhere"):
        with pytest.raises(FileNotFoundError, match=f"{path} does not exist"):
            require_folder(path)
