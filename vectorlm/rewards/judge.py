"""A reward that another model gives, asked over HTTP."""

from __future__ import annotations

import os
import re
from typing import Any

from vectorlm.encoding import shown_prompt

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

    The completions of a step are asked about at once. The key comes from the environment variable ``OPENAI_API_KEY``.

    Args:
        completion: The text of the model.
        prompt: The prompt, as text or messages.
        url: The base URL of an OpenAI-compatible server, which ends in ``/v1``.
        model: The name that the server calls its model.
        template: The question to the judge, with ``{prompt}`` and ``{completion}``.
        pattern: A regular expression for the number.
        scale: What the number is divided by.
        retries: How often a request that failed is sent again.
        timeout_s: Longest time of a request, in seconds.
    """
    import openai

    texts = {"{prompt}": shown_prompt(prompt), "{completion}": completion}
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
        except openai.OpenAIError:
            return None
    found = re.search(pattern, answer.choices[0].message.content or "") if answer.choices else None
    return float(found.group()) / scale if found else None
