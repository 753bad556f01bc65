"""A reward from a model that is asked over HTTP: on a server, or an adapter of the run's own engine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vectorlm.data.encoding import is_messages, split_unfinished, text_of_message, without_thoughts
from vectorlm.errors import ConfigError

NUMBER = r"(?<![\d.])(-?\d+(?:\.\d+)?)(?:\s*(?:/|out of)\s*\d+)?"
"""Pattern of a number; of ``8/10`` it finds 8."""
MARKED = rf"(?i)(?<!/)(?:score|rating|grade)[^\n:=>]{{0,30}}(?:[:=>]|\bis\b)[^\w\n-]*{NUMBER}"
"""Pattern of a number after a label such as ``Score:``."""
ASKED = (
    "Rate the answer to the question from 0 (useless) to 10 (perfect). Write nothing but the number.\n\n"
    "Question:\n{prompt}\n\nAnswer:\n{completion}"
)

OWN_MAX_TOKENS = 16
"""Default of `max_tokens` for a judge on the run's own engine."""


async def judge(
    completion: str,
    prompt: Any,
    *,
    model: str,
    url: str | None = None,
    adapter: str | None = None,
    template: str = ASKED,
    pattern: str | None = None,
    scale: float = 10.0,
    max_tokens: int | None = None,
    retries: int = 2,
    timeout_s: float = 60.0,
) -> float | None:
    """Return the score in the judge's answer divided by `scale`; None if there is no score from 0 to `scale`.

    Thoughts (``<think>…</think>``) are removed first. The score is the last number with a label, as in ``Score: 8``,
    ``The rating is 8/10`` or ``{"score": 8}``. Without a label it is the last number.

    The reward is also None if the server, after all `retries`, cannot be reached, times out, is busy or fails; and if
    it refuses the completion, for example because it is too long. If the server also refuses an
    empty completion, for example because of the key or the model, the function raises. The requests of a step run
    concurrently. The key comes from the environment variable ``OPENAI_API_KEY``.

    Args:
        completion: The text of the model; the judge also sees an answer that the prompt has begun.
        prompt: The prompt, as text or messages; several messages become lines ``role: content``.
        model: The name of the model on the server; ``self`` is the run's own engine, which needs LoRA.
        url: The base URL of an OpenAI-compatible server, which ends in ``/v1``; None with ``self``.
        adapter: With ``self``, the adapter that judges, such as ``reference``; None is the base model. The engine needs
            it in every step, so ``policy@100`` (see `rl.keep_adapters`) can judge only after a resume.
        template: The question to the judge, with ``{prompt}`` and ``{completion}``. A config may call it `prompt`.
        pattern: A regular expression whose last match, or the group in it, is the score.
        scale: The highest score, which gives a reward of 1.
        max_tokens: Maximum tokens of the judge's answer; None is the server's limit, or 16 with ``self``.
        retries: Number of times that a failed request is sent again.
        timeout_s: Seconds to wait for a request.

    Raises:
        ConfigError: `model` is ``self`` outside of a run, or another model without a `url`.
        TypeError: The prompt is token ids.
        openai.OpenAIError: The server refuses the request.
    """
    if url is None:
        raise ConfigError(
            f"judge(model={model!r}): it needs the url of a server, or model='self' in a run with LoRA. Add one."
        )
    key = os.environ.get("OPENAI_API_KEY", "none")
    server = Server(url, key, model, retries, timeout_s, max_tokens)
    return await server.score(completion, prompt, template, pattern, scale)


judge.also_written = {"prompt": "template"}  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Server:
    """A model behind an OpenAI-compatible API."""

    url: str
    key: str
    model: str
    retries: int
    timeout_s: float
    max_tokens: int | None
    is_chat: bool = True
    """Whether the question is sent as chat messages; otherwise the model continues its text."""
    uses_proxy: bool = True
    """Whether the variables of proxies apply."""

    async def score(
        self, completion: str, prompt: Any, template: str, pattern: str | None, scale: float
    ) -> float | None:
        """Return the score, or None, as `judge` does."""
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

        async def ask(completion: str) -> str:
            texts = {"{prompt}": question, "{completion}": begun + completion}
            # Not str.format, because a template may have other braces.
            asked = re.sub("|".join(texts), lambda found: texts[found.group()], template)
            # A lone surrogate cannot be sent.
            return await self._answer(client, asked.encode(errors="replace").decode())

        http = openai.DefaultAsyncHttpxClient(trust_env=self.uses_proxy)
        async with openai.AsyncOpenAI(
            base_url=self.url,
            api_key=self.key,
            max_retries=self.retries,
            timeout=self.timeout_s,
            http_client=http,
        ) as client:
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

    async def _answer(self, client: Any, asked: str) -> str:
        shared: dict[str, Any] = {"model": self.model, "temperature": 0.0}
        if self.max_tokens is not None:
            shared["max_tokens"] = self.max_tokens
        if self.is_chat:
            messages = [{"role": "user", "content": asked}]
            answer = await client.chat.completions.create(messages=messages, **shared)
            text = answer.choices[0].message.content if answer.choices else ""
        else:
            answer = await client.completions.create(prompt=asked, **shared)
            text = answer.choices[0].text if answer.choices else ""
        return without_thoughts(text or "")


@dataclass(frozen=True)
class OwnJudge:
    """The reward ``judge(model="self", …)`` in a run, whose gateway has this address and key."""

    given: Mapping[str, Any]
    """The arguments that the config gives to `judge`."""
    adapter: str
    url: str
    key: str
    is_chat: bool

    async def __call__(self, completion: str, prompt: Any) -> float | None:
        """Return the score, or None, as `judge` does."""
        given = {"retries": 2, "timeout_s": 60.0, "max_tokens": OWN_MAX_TOKENS, **self.given}
        limits = given["retries"], given["timeout_s"], given["max_tokens"]
        server = Server(self.url, self.key, self.adapter, *limits, self.is_chat, uses_proxy=False)
        template, pattern = given.get("template", ASKED), given.get("pattern")
        return await server.score(completion, prompt, template, pattern, given.get("scale", 10.0))
