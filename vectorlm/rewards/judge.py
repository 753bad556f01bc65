"""A reward that another model gives, asked over HTTP."""

from __future__ import annotations

import os
import re
from typing import Any

from vectorlm.encoding import is_messages, split_begun, text_of_message

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
    pattern: str = r"-?\d+(?:\.\d+)?",
    scale: float = 10.0,
    retries: int = 2,
    timeout_s: float = 60.0,
) -> float | None:
    """Return the first number in the judge's answer divided by `scale`; None if there is none or no answer.

    There is no answer if the server is not reached, late, busy or failing after all `retries`; a request that it
    refuses, for its key or model for example, raises. The completions of a step are asked about at once. The key comes
    from the environment variable ``OPENAI_API_KEY``.

    Args:
        completion: The text of the model; the judge is shown what the prompt has begun of it too.
        prompt: The prompt, as text or messages, each of several a line ``role: content``.
        url: The base URL of an OpenAI-compatible server, which ends in ``/v1``.
        model: The name that the server calls its model.
        template: The question to the judge, with ``{prompt}`` and ``{completion}``.
        pattern: A regular expression for the number.
        scale: What the number is divided by.
        retries: How often a request that failed is sent again.
        timeout_s: Longest time of a request, in seconds.

    Raises:
        TypeError: The prompt is token ids.
        openai.OpenAIError: The server refuses the request.
    """
    import openai

    question, begun = prompt, ""
    if is_messages(prompt):
        before, begun = split_begun(prompt)
        lines = [f"{each['role']}: {text_of_message(each)}" for each in before]
        question = text_of_message(before[0]) if len(before) == 1 else "\n".join(lines)
    if not isinstance(question, str):
        raise TypeError("a judge cannot be shown token ids: give it prompts of text or messages")
    texts = {"{prompt}": question, "{completion}": begun + completion}
    # Not str.format: a template may hold other braces.
    asked = re.sub("|".join(texts), lambda found: texts[found.group()], template)
    key = os.environ.get("OPENAI_API_KEY", "none")
    async with openai.AsyncOpenAI(
        base_url=url, api_key=key, max_retries=retries, timeout=timeout_s
    ) as client:
        try:
            answer = await client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": asked}], temperature=0.0
            )
        except (openai.APIConnectionError, openai.RateLimitError, openai.InternalServerError):
            return None
    found = re.search(pattern, answer.choices[0].message.content or "") if answer.choices else None
    return float(found.group()) / scale if found else None
