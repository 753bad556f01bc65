"""Checks that an engine's answers are its model's. A scripted engine cannot pass them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from vectorlm.data.encoding import render_chat
from vectorlm.errors import EngineError
from vectorlm.sampling.testing.subject import GREEDY, NUM_TOKENS, PROMPTS, SAMPLED, EngineUnderTest
from vectorlm.types import Completion

SCORED = {**SAMPLED, "logprobs": 0, "n": 2}
SHAPES: tuple[Mapping[str, float], ...] = (
    {},
    {"temperature": 0.7},
    {"top_p": 0.8},
    {"top_k": 5},
    {"min_p": 0.3},
    {"repetition_penalty": 1.3},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 12, "min_p": 0.05, "repetition_penalty": 1.3},
    {"temperature": 0.0, "repetition_penalty": 1.3, "n": 1},
)
"""Sampling parameters, each of which changes the sampling distribution."""
FILLS_A_BLOCK = [2 + place % 9 for place in range(40)]
"""A prompt long enough for a prefix cache."""


def greedy_tokens_are_the_models_likeliest(subject: EngineUnderTest) -> None:
    """A plain forward pass over prompt and completion agrees, except for near ties."""
    plain = _load(subject, 10)
    for (completion,) in subject.engine.sample(PROMPTS, GREEDY):
        logprobs = subject.logits(plain, completion).log_softmax(-1)
        taken = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert (logprobs.amax(-1) - taken).max() <= subject.logprob_tolerance


def logprobs_are_the_models_own(subject: EngineUnderTest) -> None:
    """Logprobs are of the sampling distribution after penalties, temperature and cuts, of current weights."""
    for seed, shapes in ((11, SHAPES[:1]), (12, SHAPES)):
        plain = _load(subject, seed)
        for shape in shapes:
            for completions in subject.engine.sample([*PROMPTS, FILLS_A_BLOCK], {**SCORED, **shape}):
                for completion in completions:
                    assert max(_gaps(subject, plain, completion, shape)) <= subject.logprob_tolerance


def tokens_are_of_the_weights_that_they_name(subject: EngineUnderTest) -> None:
    """This includes requests in flight: after `recompute`, tokens and cache are of the new weights only."""
    old, step = _load(subject, 14), subject.engine.version
    trained, new = subject.models(15)
    handle = subject.engine.submit(PROMPTS, {**SCORED, "max_tokens": 40})
    handle.done()
    try:
        subject.engine.update(trained, step + 1, in_flight="recompute")
    except EngineError:
        assert subject.engine.version == step
    for completions in handle.result():
        for completion in completions:
            for plain, version in ((old, step), (new, step + 1)):
                gaps = _gaps(subject, plain, completion)
                own = [gap for gap, its in zip(gaps, completion.versions, strict=True) if its == version]
                assert max(own, default=0.0) <= subject.logprob_tolerance
    subject.engine.poll()


def a_prompt_is_answered_as_if_it_were_alone(subject: EngineUnderTest) -> None:
    """Other prompts and padding change only round-off."""
    plain = _load(subject, 13)
    for prompt, completions in zip(PROMPTS, subject.engine.sample(PROMPTS, SCORED), strict=True):
        alone = subject.engine.sample([prompt], SCORED)[0]
        for one, other in zip(completions, alone, strict=True):
            assert one.token_ids == other.token_ids
            assert max(_gaps(subject, plain, other)) <= subject.logprob_tolerance


def seeds_and_completions_differ(subject: EngineUnderTest) -> None:
    """Different seeds give different completions, and so does one seed within a prompt."""
    many = {**SAMPLED, "n": 4, "temperature": 2.0}
    one, other = (subject.engine.sample([[2]], {**many, "seed": seed})[0] for seed in (1, 2))
    assert len({completion.token_ids for completion in one + other}) > 4


def the_token_limit_is_kept(subject: EngineUnderTest) -> None:
    """A completion has exactly `max_tokens`, because nothing else ends it."""
    for max_tokens in (1, NUM_TOKENS, 40):
        (completion,) = subject.engine.sample([[2, 3]], {**GREEDY, "max_tokens": max_tokens})[0]
        assert len(completion.token_ids) == max_tokens
        assert completion.finish_reason == "length"


def a_stop_token_ends_the_completion(subject: EngineUnderTest) -> None:
    """The stop token is the last token, it is not in the text, and `min_tokens` delays it."""
    free = subject.engine.sample([[2, 3]], {**GREEDY, "max_tokens": 20})[0][0]
    stop = free.token_ids[2]
    first = free.token_ids.index(stop)
    (ended,) = subject.engine.sample([[2, 3]], {**GREEDY, "stop_token_ids": [stop]})[0]
    assert ended.token_ids == free.token_ids[: first + 1]
    assert ended.finish_reason == "stop"
    assert free.text.startswith(ended.text)
    later = {**GREEDY, "stop_token_ids": [stop], "min_tokens": 6}
    (put_off,) = subject.engine.sample([[2, 3]], later)[0]
    assert stop not in put_off.token_ids[:6]
    assert len(put_off.token_ids) >= 6


def a_stop_string_ends_the_text(subject: EngineUnderTest) -> None:
    """The text ends before the string, or after it if it is included; the tokens end with it."""
    free = subject.engine.sample([[2, 3]], {**GREEDY, "max_tokens": 20})[0][0]
    stop = free.text[len(free.text) // 2 :][:2]
    place = free.text.index(stop)
    (ended,) = subject.engine.sample([[2, 3]], {**GREEDY, "max_tokens": 20, "stop": [stop]})[0]
    assert ended.text == free.text[:place]
    assert ended.finish_reason == "stop"
    assert ended.token_ids == free.token_ids[: len(ended.token_ids)]
    assert len(ended.token_ids) < len(free.token_ids)
    with_it = {**GREEDY, "max_tokens": 20, "stop": stop, "include_stop_str_in_output": True}
    assert subject.engine.generate_text([[2, 3]], with_it) == [free.text[: place + len(stop)]]


def text_and_chat_become_the_tokenizers_tokens(subject: EngineUnderTest) -> None:
    """Text gets the tokenizer's special tokens, chat its template, if the folder has one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(subject.model_path)
    (completion,) = subject.engine.sample("abc", GREEDY)[0]
    assert completion.prompt_token_ids == tuple(tokenizer.encode("abc"))
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": "abc"}]
        text = render_chat(tokenizer, messages, tokenize=False, add_generation_prompt=True)
        (answer,) = subject.engine.sample([messages], GREEDY)[0]
        assert answer.prompt_token_ids == tuple(tokenizer.encode(text, add_special_tokens=False))


def _load(subject: EngineUnderTest, seed: int) -> torch.nn.Module:
    trained, plain = subject.models(seed)
    subject.engine.update(trained, subject.next_step)
    return plain


def _gaps(
    subject: EngineUnderTest,
    plain: torch.nn.Module,
    completion: Completion,
    shape: Mapping[str, float] = SHAPES[0],
) -> list[float]:
    """Return the distance of each log-probability from the model's; a token at the edge of a cut may be kept or not."""
    gaps = []
    rows = zip(
        subject.logits(plain, completion), completion.token_ids, completion.sampler_logprobs, strict=True
    )
    for place, (logits, token, found) in enumerate(rows):
        scores = _scores(logits, {*completion.prompt_token_ids, *completion.token_ids[:place]}, shape)
        wide, narrow = (_kept(scores, shape, slack * subject.logprob_tolerance) for slack in (1, -1))
        narrow[token] = True
        lowest, highest = (float(scores[token] - scores[kept].logsumexp(0)) for kept in (wide, narrow))
        gaps.append(max(lowest - found, found - highest) if wide[token] else math.inf)
    return gaps


def _scores(logits: torch.Tensor, seen: set[int], shape: Mapping[str, float]) -> torch.Tensor:
    """Return the log-probabilities [V] before the cuts; temperature 0 divides nothing."""
    penalty, scores = shape.get("repetition_penalty", 1.0), logits.clone()
    for token in seen:
        scores[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    return (scores / (shape.get("temperature", 1.0) or 1.0)).log_softmax(0)


def _kept(scores: torch.Tensor, shape: Mapping[str, float], slack: float) -> torch.Tensor:
    """Return which tokens can be drawn, bool [V], after the cuts min_p, top_k and top_p, in this order."""
    kept = torch.ones_like(scores, dtype=torch.bool)
    if "min_p" in shape:
        kept &= scores >= scores.max() + math.log(shape["min_p"]) - slack
    if "top_k" in shape:
        kept &= scores >= scores.sort(descending=True).values[int(shape["top_k"]) - 1] - slack
    if "top_p" in shape:
        probabilities, order = scores.masked_fill(~kept, -math.inf).softmax(0).sort(descending=True)
        kept[order] &= probabilities.cumsum(0) - probabilities < shape["top_p"] + slack
    return kept
