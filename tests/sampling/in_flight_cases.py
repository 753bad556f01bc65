"""Cases of a hot swap during completions, and the log-probabilities that they must have."""

import time

import torch
from swap_cases import reference_logprobs
from transformers import AutoModelForCausalLM

LONG = {"temperature": 1.0, "max_tokens": 400, "ignore_eos": True, "logprobs": 0, "n": 2}
# The prompt is longer than two of the engine's blocks, which gives prompts shared blocks.
PROMPT = [2 + index % 40 for index in range(300)]
OTHER = [2 + (7 * index) % 40 for index in range(300)]


def another(folder, seed):
    """Return the model with noise in its weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


@torch.no_grad()
def with_both_caches(old, new, completion, num_old):
    """Return the new weights' log-probabilities of the tokens after the swap, on the old weights' cache."""
    tokens = list(completion.token_ids)
    # The old weights sampled the last token of their part but did not read it.
    read = [*completion.prompt_token_ids, *tokens[: num_old - 1]]
    cache = old(torch.tensor([read]), use_cache=True).past_key_values
    logits = new(torch.tensor([tokens[num_old - 1 :]]), past_key_values=cache).logits[0, :-1]
    rows = logits.double().log_softmax(-1)
    return rows.gather(-1, torch.tensor(tokens[num_old:])[:, None])[:, 0]


def update_on_the_way(engine, old, new, in_flight, prompts=([2, 3, 4], PROMPT)):
    """Swap weights during some completions; return these, the number of their old tokens, and the report."""
    duration_s, seen = 0.4, []
    for share in (0.5, 0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8, 0.5, 0.5, 0.4, 0.6):
        step = engine.version + 1
        engine.update(old, step)
        began = time.monotonic()
        handle = engine.submit(list(prompts), [{**LONG, "seed": seed} for seed in range(len(prompts))])
        time.sleep(share * duration_s)
        report = engine.update(new, step + 1, in_flight=in_flight)
        completions = [completion for options in handle.result() for completion in options]
        # The duration depends on this machine and its other work.
        duration_s = time.monotonic() - began - report.total_s
        counts = [completion.versions.count(step) for completion in completions]
        assert all(
            completion.versions == (step,) * count + (step + 1,) * (400 - count)
            for completion, count in zip(completions, counts, strict=True)
        )
        seen.append((round(share * duration_s, 3), counts))
        if all(0 < count < 400 for count in counts):
            return completions, counts, report
    raise AssertionError(f"no update met the requests on their way: {seen}")


def check_tokens_against_their_caches(engine, folder, in_flight):
    """Check that tokens belong to the weights and the cache of their version; return the update's report."""
    old, new = another(folder, 1), another(folder, 2)
    completions, counts, report = update_on_the_way(engine, old, new, in_flight)
    for completion, count in zip(completions, counts, strict=True):
        found = torch.tensor(completion.sampler_logprobs, dtype=torch.float64)
        torch.testing.assert_close(
            found[:count], reference_logprobs(old, completion)[:count], rtol=0, atol=1e-5
        )
        kept = with_both_caches(old, new, completion, count)
        recomputed = reference_logprobs(new, completion)[count:]
        right, wrong = (kept, recomputed) if in_flight == "keep" else (recomputed, kept)
        torch.testing.assert_close(found[count:], right, rtol=0, atol=1e-5)
        assert (found[count:] - wrong).abs().max() > 1e-3, "both caches say the same: nothing is shown"
    return report
