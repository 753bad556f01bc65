"""New weights while sequences are being written: what each token was sampled with, and from which cache."""

import math
import time

import pytest
import torch
from rank_processes import save_tiny_llama
from transformers import AutoModelForCausalLM

from vectorlm import SamplingEngine
from vectorlm.errors import ChecksumMismatch, EngineError
from vectorlm.weights.publish import Publisher

LONG = {"temperature": 1.0, "max_tokens": 400, "ignore_eos": True, "logprobs": 0, "n": 2}
# Longer than two of the engine's blocks, so that prompts have blocks to share.
PROMPT = [2 + index % 40 for index in range(300)]
OTHER = [2 + (7 * index) % 40 for index in range(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("engine") / "model", hidden_size=64, max_length=1024)


@pytest.fixture(scope="module")
def engine(folder):
    with SamplingEngine(
        str(folder), dtype="float32", max_model_len=1024, kv_cache_memory_bytes=64 << 20, timeout_s=120
    ) as engine:
        yield engine


def another(folder, seed):
    """Return the model with noise in its weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def logprobs_of(logits, tokens):
    rows = logits.double().log_softmax(-1)
    return rows.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


@torch.no_grad()
def with_both_caches(old, new, completion, num_old):
    """Return the new weights' log-probabilities of what follows the old weights' tokens, on the old weights' cache."""
    tokens = list(completion.token_ids)
    # The last token of the old weights was sampled, and not yet read, when the weights went.
    read = [*completion.prompt_token_ids, *tokens[: num_old - 1]]
    cache = old(torch.tensor([read]), use_cache=True).past_key_values
    logits = new(torch.tensor([tokens[num_old - 1 :]]), past_key_values=cache).logits[0, :-1]
    return logprobs_of(logits, tokens[num_old:])


@torch.no_grad()
def alone(model, completion, first=0):
    ids = [*completion.prompt_token_ids, *completion.token_ids]
    start = len(completion.prompt_token_ids) + first
    return logprobs_of(model(torch.tensor([ids])).logits[0, start - 1 : -1], ids[start:])


def update_on_the_way(engine, old, new, in_flight, prompts=([2, 3, 4], PROMPT)):
    """Swap weights in the midst of some completions; return those, and the report."""
    delay_s = 0.2
    for _ in range(8):
        step = engine.version + 1
        engine.update(old, step)
        handle = engine.submit(list(prompts), [{**LONG, "seed": seed} for seed in range(len(prompts))])
        time.sleep(delay_s)
        report = engine.update(new, step + 1, in_flight=in_flight)
        completions = [each for options in handle.result() for each in options]
        counts = [completion.versions.count(step) for completion in completions]
        assert all(
            completion.versions == (step,) * count + (step + 1,) * (400 - count)
            for completion, count in zip(completions, counts, strict=True)
        )
        if all(0 < count < 400 for count in counts):
            return completions, counts, report
        # Too early or too late: this machine has its own pace.
        delay_s *= 2 if min(counts) == 0 else 0.5
    raise AssertionError("no update met the requests on their way")


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_tokens_are_of_the_weights_and_the_cache_that_their_version_says(engine, folder, in_flight):
    old, new = another(folder, 1), another(folder, 2)
    completions, counts, report = update_on_the_way(engine, old, new, in_flight)
    assert 0 < report.load_s <= report.stall_s <= report.total_s
    for completion, count in zip(completions, counts, strict=True):
        found = torch.tensor(completion.sampler_logprobs, dtype=torch.float64)
        torch.testing.assert_close(found[:count], alone(old, completion)[:count], rtol=0, atol=1e-5)
        kept, anew = with_both_caches(old, new, completion, count), alone(new, completion, count)
        right, wrong = (kept, anew) if in_flight == "keep" else (anew, kept)
        torch.testing.assert_close(found[count:], right, rtol=0, atol=1e-5)
        assert (found[count:] - wrong).abs().max() > 1e-3, "both caches say the same: nothing is shown"


def test_a_new_request_finds_no_blocks_of_old_weights(engine, folder):
    """Its prompt is that of a request which still runs on them."""
    old, new = another(folder, 3), another(folder, 4)
    step = engine.version + 1
    engine.update(old, step)
    handle = engine.submit([PROMPT], {**LONG, "n": 1, "seed": 0})
    time.sleep(0.2)
    engine.update(new, step + 1, in_flight="keep")
    ((late,),) = engine.sample([PROMPT], {**LONG, "n": 1, "seed": 1, "max_tokens": 8})
    assert not handle.done()
    torch.testing.assert_close(
        torch.tensor(late.sampler_logprobs, dtype=torch.float64), alone(new, late), rtol=0, atol=1e-5
    )
    handle.result()
    ((again,),) = engine.sample([PROMPT], {**LONG, "n": 1, "seed": 2, "max_tokens": 8})
    torch.testing.assert_close(
        torch.tensor(again.sampler_logprobs, dtype=torch.float64), alone(new, again), rtol=0, atol=1e-5
    )


def test_several_updates_leave_their_versions_in_order(engine, folder):
    models = [another(folder, seed) for seed in range(3)]
    first = engine.version + 1
    engine.update(models[0], first)
    handle = engine.submit([PROMPT, OTHER], {**LONG, "seed": 5})
    for step, model in enumerate(models[1:] * 3, start=first + 1):
        time.sleep(0.05)
        engine.update(model, step, in_flight="keep")
    for options in handle.result():
        for completion in options:
            assert len(completion.versions) == 400
            assert list(completion.versions) == sorted(completion.versions)
            assert len(set(completion.versions)) > 2
            assert all(math.isfinite(each) for each in completion.sampler_logprobs)


def test_an_update_drains_or_is_refused(engine, folder):
    step = engine.version + 1
    engine.update(another(folder, 1), step)
    handle = engine.submit([PROMPT], {**LONG, "seed": 3})
    with pytest.raises(EngineError, match="1 requests are under way: wait for them, or say what becomes"):
        engine.update(another(folder, 2), step + 1)
    report = engine.update(another(folder, 2), step + 1, in_flight="drain")
    assert report.stall_s == 0.0
    assert handle.done()
    assert {version for each in handle.result()[0] for version in each.versions} == {step}


def test_an_update_that_fails_takes_requests_under_way_with_it(engine, folder, monkeypatch):
    step = engine.version + 1
    engine.update(another(folder, 1), step)
    handle = engine.submit([PROMPT], {**LONG, "seed": 3})
    write = Publisher.write

    def wrongly(self, shares, verify):
        return [each + 1 for each in write(self, shares, verify)]

    monkeypatch.setattr(Publisher, "write", wrongly)
    with pytest.raises(ChecksumMismatch):
        engine.update(another(folder, 2), step + 1, in_flight="keep")
    with pytest.raises(EngineError, match="a weight update failed"):
        handle.result()
    with pytest.raises(ChecksumMismatch):
        engine.sample([[2, 3]])
    monkeypatch.undo()
    engine.update(another(folder, 2), step + 1)
    assert len(engine.sample([[2, 3]], {**LONG, "max_tokens": 3})[0]) == 2
