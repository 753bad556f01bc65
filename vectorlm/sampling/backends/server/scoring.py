"""A vLLM server that scores tokens: the teacher of on-policy distillation, which takes no weights."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp

from vectorlm.errors import ConfigError, EngineDied, EngineError, EngineTimeout
from vectorlm.ranks.engine_ranks import CallResult, results_or_first_error
from vectorlm.sampling.backends.server.client import as_it_is, call_server
from vectorlm.sampling.backends.server.extension import result_from_wire, to_wire
from vectorlm.sampling.weights.held import Held
from vectorlm.sampling.weights.plan import TensorSpec

TOKEN_VARIABLE = "VECTORLM_TEACHER_TOKEN"
"""The environment variable with the server's token or API key, where it wants one."""

ROWS_PER_REQUEST = 32
NUM_CONNECTIONS = 16


class ScoringServer:
    """Asks any vLLM server, on this machine or another, through vLLM's own paths; nothing stays open between calls."""

    def __init__(self, url: str, timeout_s: float = 300.0, token_variable: str = TOKEN_VARIABLE) -> None:
        """Take the address, for example ``http://127.0.0.1:8000``, and the longest that an answer may take.

        The environment variable `token_variable` holds the server's token or API key, where it wants one.
        """
        self._url, self._timeout_s, self._token_variable = url.rstrip("/"), timeout_s, token_variable

    def logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probability of each token after those before it, at temperature 1; 0 for the first of a row.

        Raises:
            EngineError: The server does not answer in time, refuses, or answers with something else.
        """
        parts = [rows[start : start + ROWS_PER_REQUEST] for start in range(0, len(rows), ROWS_PER_REQUEST)]
        calls = [_scoring_call(part) for part in parts]
        return [row for answer in self._together(calls) for row in answer]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of these tokens, as the server's tokenizer writes it."""
        body = {"tokens": list(token_ids)}
        return self._together([("/detokenize", body, lambda answer: str(answer["prompt"]))])[0]

    def max_model_len(self) -> int:
        """Return the number of tokens that the server has room for, of prompt and completion together."""
        return self._together([("/v1/models", None, lambda answer: int(answer["data"][0]["max_model_len"]))])[
            0
        ]

    def held(self, manifest: Sequence[TensorSpec]) -> list[Held] | None:
        """Return what each worker of the server holds; None where the server has no such call.

        It has with ``VLLM_SERVER_DEV_MODE=1`` and `ServerExtension` as its ``--worker-extension-cls``, as ``vectorlm
        serve`` starts it.

        Raises:
            WeightMismatch: It serves another model.
        """
        body = {"method": "vectorlm_ask", "args": ["", "vectorlm_held", [to_wire(tuple(manifest))]]}

        def read(answer: Mapping[str, Any]) -> list[CallResult]:
            return [result_from_wire("vectorlm_held", each) for each in answer["results"]]

        try:
            results = self._together([("/collective_rpc", body, read)])[0]
        except (EngineDied, EngineTimeout):
            raise
        except EngineError:
            return None
        return results_or_first_error(results)

    def _together(self, calls: Sequence[tuple[str, Any, Callable[[Any], Any]]]) -> list[Any]:
        """Make calls at the same time; in a thread, because a notebook's own has a running loop."""

        async def make() -> list[Any]:
            token = os.environ.get(self._token_variable)
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            connector = aiohttp.TCPConnector(limit=NUM_CONNECTIONS)
            async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
                return await asyncio.gather(*(self._call(session, *call) for call in calls))

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, make()).result()

    async def _call(
        self, session: aiohttp.ClientSession, path: str, body: Any, read: Callable[[Any], Any] = as_it_is
    ) -> Any:
        method = "GET" if body is None else "POST"
        return await call_server(
            session, self._url, path, body, read, method=method, timeout_s=self._timeout_s
        )


def _scoring_call(rows: Sequence[Sequence[int]]) -> tuple[str, Any, Callable[[Any], Any]]:
    """Return a request that scores some rows. vLLM wants to generate one token; nobody reads it."""
    body = {
        "prompt": [list(row) for row in rows],
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": 0,
    }
    return "/v1/completions", body, lambda answer: _prompt_logprobs(rows, answer)


def _prompt_logprobs(rows: Sequence[Sequence[int]], answer: Mapping[str, Any]) -> list[list[float]]:
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    found = []
    for row, choice in zip(rows, choices, strict=True):
        _, *entries = choice["prompt_logprobs"]
        values = [float(entry[str(token)]["logprob"]) for token, entry in zip(row[1:], entries, strict=True)]
        if max(values, default=0.0) > 1e-3:
            raise ConfigError(
                f"the server gives the token {row[1:][values.index(max(values))]} a log-probability of "
                f"{max(values):.3g}, and none is above 0: start it without --logprobs-mode, which makes them logits."
            )
        found.append([0.0, *values])
    return found
