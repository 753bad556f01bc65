"""A reward that another model gives, asked over HTTP."""

from __future__ import annotations

import os
import re
from typing import Any

from vectorlm.data.encoding import is_messages, split_unfinished, text_of_message, without_thoughts

NUMBER = r"(?<![\d.])(-?\d+(?:\.\d+)?)(?:\s*(?:/|out of)\s*\d+)?"
"""A number, of ``8/10`` the first."""
MARKED = rf"(?i)(?<!/)(?:score|rating|grade)[^\n:=>]{{0,30}}(?:[:=>]|\bis\b)[^\w\n-]*{NUMBER}"
"""A number that is called the score."""
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

    Thoughts (``<think>…</think>``) are cut off first. The score is the last number that the judge calls so, as in
    ``Score: 8``, ``The rating is 8/10`` or ``{"score": 8}``, and if there is none, the last number.

    The reward is also None if the server is not reached, late, busy or failing after all `retries`, or if it refuses
    the completion, which may be too long for it. If it refuses an empty one as well, for its key or model for
    example, that is an error. The completions of a step are asked about at once. The key comes from the environment
    variable ``OPENAI_API_KEY``.

    Args:
        completion: The text of the model; the judge is shown what the prompt has begun of it too.
        prompt: The prompt, as text or messages, each of several a line ``role: content``.
        url: The base URL of an OpenAI-compatible server, which ends in ``/v1``.
        model: The name that the server calls its model.
        template: The question to the judge, with ``{prompt}`` and ``{completion}``.
        pattern: A regular expression for the score, or with a group for the score in it; its last match counts.
        scale: The highest score, which gives a reward of 1.
        retries: How often a request that failed is sent again.
        timeout_s: Longest time of a request, in seconds.

    Raises:
        TypeError: The prompt is token ids.
        openai.OpenAIError: The server refuses the request.
    """
    import openai

    question, begun = prompt, ""
    if is_messages(prompt):
        before, begun = split_unfinished(prompt)
        lines = [f"{each['role']}: {text_of_message(each)}" for each in before]
        question = text_of_message(before[0]) if len(before) == 1 else "\n".join(lines)
    if not isinstance(question, str):
        raise TypeError("a judge cannot be shown token ids: give it prompts of text or messages")
    key = os.environ.get("OPENAI_API_KEY", "none")
    async with openai.AsyncOpenAI(
        base_url=url, api_key=key, max_retries=retries, timeout=timeout_s
    ) as client:

        async def ask(completion: str) -> str:
            texts = {"{prompt}": question, "{completion}": begun + completion}
            # Not str.format: a template may hold other braces.
            asked = re.sub("|".join(texts), lambda found: texts[found.group()], template)
            # Half a character cannot be sent.
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
    except (IndexError, ValueError):  # A pattern of the user's may match a word.
        return None
    return score / scale if 0.0 <= score <= scale else None
