"""A reward from another model, requested over HTTP."""

from __future__ import annotations

import os
import re
from typing import Any

from vectorlm.data.encoding import is_messages, split_unfinished, text_of_message, without_thoughts

NUMBER = r"(?<![\d.])(-?\d+(?:\.\d+)?)(?:\s*(?:/|out of)\s*\d+)?"
"""A number; the first one of ``8/10``."""
MARKED = rf"(?i)(?<!/)(?:score|rating|grade)[^\n:=>]{{0,30}}(?:[:=>]|\bis\b)[^\w\n-]*{NUMBER}"
"""A number after a word such as ``Score:``."""
ASKED = (
    "Rate the answer to the question from 0 (useless) to 10 (perfect). Write nothing but the number.\n\n"
    "Question:\n{prompt}\n\nAnswer:\n{completion}"
)


async def judge(
    completion: str,
    prompt: Any,
    *,
    url: str,
    model: str,
    template: str = ASKED,
    pattern: str | None = None,
    scale: float = 10.0,
    retries: int = 2,
    timeout_s: float = 60.0,
) -> float | None:
    """Return the score in the judge's answer divided by `scale`; None if there is no score from 0 to `scale`.

    Thoughts (``<think>…</think>``) are removed first. The score is the last number with a label, as in ``Score: 8``,
    ``The rating is 8/10`` or ``{"score": 8}``. Without a label it is the last number.

    The reward is also None if the server cannot be reached, times out, is busy or fails after all `retries`, or if it
    refuses the completion, for example because it is too long. If the server refuses an empty completion too, for
    example because of the key or the model, the function raises. The requests of a step run concurrently. The key
    comes from the environment variable ``OPENAI_API_KEY``.

    Args:
        completion: The text of the model; the judge also sees an answer that the prompt has begun.
        prompt: The prompt, as text or messages; several messages become lines ``role: content``.
        url: The base URL of an OpenAI-compatible server, which ends in ``/v1``.
        model: The name of the model on the server.
        template: The question to the judge, with ``{prompt}`` and ``{completion}``.
        pattern: A regular expression whose last match, or group in it, is the score.
        scale: The highest score, which gives a reward of 1.
        retries: Number of times that a failed request is sent again.
        timeout_s: Seconds to wait for a request.

    Raises:
        TypeError: The prompt is token ids.
        openai.OpenAIError: The server refuses the request.
    """
    import openai

    question, begun = prompt, ""
    if is_messages(prompt):
        before, begun = split_unfinished(prompt)
        lines = [f"{message['role']}: {text_of_message(message)}" for message in before]
        question = text_of_message(before[0]) if len(before) == 1 else "\n".join(lines)
    if not isinstance(question, str):
        raise TypeError(
            "the reward judge needs prompts of text or messages, not token ids. Change the prompts"
        )
    key = os.environ.get("OPENAI_API_KEY", "none")
    async with openai.AsyncOpenAI(
        base_url=url, api_key=key, max_retries=retries, timeout=timeout_s
    ) as client:

        async def ask(completion: str) -> str:
            texts = {"{prompt}": question, "{completion}": begun + completion}
            # Not str.format: a template may hold other braces.
            asked = re.sub("|".join(texts), lambda found: texts[found.group()], template)
            # A lone surrogate cannot be sent.
            asked = asked.encode(errors="replace").decode()
            answer = await client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": asked}], temperature=0.0
            )
            return without_thoughts(answer.choices[0].message.content or "") if answer.choices else ""

        try:
            said = await ask(completion)
        except (openai.APIConnectionError, openai.RateLimitError, openai.InternalServerError):
            return None
        except openai.APIStatusError as refusal:
            try:
                await ask("")
            except openai.OpenAIError:
                raise refusal from None
            return None
    found = re.findall(pattern or MARKED, said) or ([] if pattern else re.findall(NUMBER, said))
    try:
        score = float(found[-1])
    except (IndexError, ValueError):  # The user's pattern may match a word.
        return None
    return score / scale if 0.0 <= score <= scale else None
