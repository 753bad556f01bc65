"""What shows that an engine's answers are its model's. A scripted engine cannot pass these checks."""

from __future__ import annotations

import torch

from vectorlm.testing.subject import GREEDY, NUM_TOKENS, PROMPTS, SAMPLED, EngineUnderTest
from vectorlm.types import Completion

SCORED = {**SAMPLED, "logprobs": 0, "n": 2}


def greedy_tokens_are_the_models_likeliest(subject: EngineUnderTest) -> None:
    """By a plain forward pass over prompt and completion; near ties may go either way."""
    plain = _load(subject, 10)
    for (completion,) in subject.engine.sample(PROMPTS, GREEDY):
        logprobs = subject.logprobs(plain, completion)
        taken = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert (logprobs.amax(-1) - taken).max() <= subject.logprob_tolerance


def logprobs_are_the_models_own(subject: EngineUnderTest) -> None:
    """Before temperature, cuts and penalties; after an update they are of the new weights."""
    shaped = {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.3}
    for seed, more in ((11, {}), (12, shaped)):
        plain = _load(subject, seed)
        for completions in subject.engine.sample(PROMPTS, {**SCORED, **more}):
            for completion in completions:
                assert _gap(subject, plain, completion) <= subject.logprob_tolerance


def a_prompt_is_answered_as_if_it_were_alone(subject: EngineUnderTest) -> None:
    """Neighbours and padding change nothing but round-off."""
    plain = _load(subject, 13)
    for prompt, completions in zip(PROMPTS, subject.engine.sample(PROMPTS, SCORED), strict=True):
        alone = subject.engine.sample([prompt], SCORED)[0]
        for one, other in zip(completions, alone, strict=True):
            assert one.token_ids == other.token_ids
            assert _gap(subject, plain, other) <= subject.logprob_tolerance


def seeds_and_completions_differ(subject: EngineUnderTest) -> None:
    """Different seeds draw differently, and so do the completions of one seed."""
    many = {**SAMPLED, "n": 4, "temperature": 2.0}
    one, other = (subject.engine.sample([[2]], {**many, "seed": seed})[0] for seed in (1, 2))
    assert len({completion.token_ids for completion in one + other}) > 4


def the_token_limit_is_kept(subject: EngineUnderTest) -> None:
    """Exactly `max_tokens`, because nothing else ends these completions."""
    for max_tokens in (1, NUM_TOKENS, 40):
        (completion,) = subject.engine.sample([[2, 3]], {**GREEDY, "max_tokens": max_tokens})[0]
        assert len(completion.token_ids) == max_tokens
        assert completion.finish_reason == "length"


def a_stop_token_ends_the_completion(subject: EngineUnderTest) -> None:
    """It is the last token, it is not in the text, and `min_tokens` delays it."""
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
    """The text ends before it, or after it if it is included; the tokens end with it."""
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
    """Text with the tokenizer's special tokens; chat by its template, if the folder has one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(subject.model_path)
    (completion,) = subject.engine.sample("abc", GREEDY)[0]
    assert completion.prompt_token_ids == tuple(tokenizer.encode("abc"))
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": "abc"}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        (answer,) = subject.engine.sample([messages], GREEDY)[0]
        assert answer.prompt_token_ids == tuple(tokenizer.encode(text, add_special_tokens=False))


def _load(subject: EngineUnderTest, seed: int) -> torch.nn.Module:
    trained, plain = subject.models(seed)
    subject.engine.update(trained, subject.next_step)
    return plain


def _gap(subject: EngineUnderTest, plain: torch.nn.Module, completion: Completion) -> float:
    theirs = subject.logprobs(plain, completion).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    ours = torch.tensor(completion.sampler_logprobs, dtype=torch.float64)
    return float((ours - theirs).abs().max())
