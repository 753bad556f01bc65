"""HTTP calls to a vLLM server, and the client that scores tokens with it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp

from vectorlm.errors import ConfigError, EngineDied, EngineError, EngineTimeout, TokenRefused, VectorLMError
from vectorlm.ranks.engine_ranks import results_or_first_error
from vectorlm.sampling.contract import FINISH_REASONS
from vectorlm.sampling.weights.plan import TensorSpec
from vectorlm.sampling.weights.receive import WorkerSums
from vectorlm.sampling.weights.wire import result_from_wire, to_wire
from vectorlm.types import Completion

TOKEN_VARIABLE = "VECTORLM_TEACHER_TOKEN"
"""The environment variable with the token or API key of a teacher's server, if the server needs one."""

SHOWN_CHARACTERS = 300
"""Length of an unreadable answer in an error message."""
ROWS_PER_REQUEST = 32
NUM_CONNECTIONS = 16

Entry = Mapping[str, Mapping[str, float]]
"""vLLM's answer for the place of a token: ``{"logprob", "rank", "decoded_token"}`` by token id."""
Call = tuple[str, Any, Callable[[Any], Any]]
"""Path, body (None for a GET) and the function that reads the answer."""


def as_it_is(answer: Any) -> Any:
    """Return an answer unread."""
    return answer


async def call_server(
    session: aiohttp.ClientSession,
    url: str,
    path: str,
    body: Any = None,
    read: Callable[[Any], Any] = as_it_is,
    *,
    method: str = "POST",
    timeout_s: float | None,
    token_variable: str,
    on_answer: Callable[[], None] = lambda: None,
) -> Any:
    """Send one request, call `on_answer` when the server answers, and return `read(answer)`.

    Raises:
        EngineTimeout: The server is silent for `timeout_s`.
        EngineDied: There is no server.
        TokenRefused: The token is not the server's; the text names the environment variable `token_variable`.
        EngineError: The server refuses, with its own words in the text, or `read` fails on its answer.
    """
    limit, text = aiohttp.ClientTimeout(total=timeout_s), ""
    endpoint = path.partition("?")[0]
    try:
        async with session.request(method, url + path, json=body, timeout=limit) as response:
            text = await response.text()
            on_answer()
            if response.status == 401:
                raise TokenRefused(
                    f"the server at {url} needs another token. Set {token_variable} to the server's token."
                )
            if response.status >= 400:
                raise EngineError(f"the server refused {endpoint}: {text}")
            return read(json.loads(text) if response.content_type == "application/json" else text)
    except VectorLMError:
        raise
    except aiohttp.ClientError as error:
        raise EngineDied(f"the server at {url} does not answer: {error}") from error
    except TimeoutError as error:
        raise EngineTimeout(
            f"the server at {url} did not answer {endpoint} within {timeout_s:g} s."
        ) from error
    except Exception as error:
        raise EngineError(
            f"the server at {url} answered {endpoint} with {text[:SHOWN_CHARACTERS]!r}, which no vLLM server answers "
            f"({type(error).__name__}: {error})."
        ) from error


def read_completions(prompt: Sequence[int], answer: Mapping[str, Any]) -> list[Completion]:
    """Read the answer of ``/inference/v1/generate``; raise for anything that no vLLM server answers."""
    completions = []
    for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
        tokens: list[int] = choice["token_ids"]
        if tokens and choice.get("weight_versions") is None:
            raise EngineError("the server does not report weight versions. It must run vLLM 0.32 or later.")
        versions: list[int] = []
        for span in choice["weight_versions"] or ():
            versions += [int(span["version"])] * (span["end"] - span["start"])
        if len(versions) != len(tokens):
            raise ValueError(f"{len(versions)} versions for {len(tokens)} tokens")
        if (reason := choice["finish_reason"]) not in FINISH_REASONS:
            raise ValueError(f"finish_reason {reason!r}")
        entries = (choice["logprobs"] or {}).get("content") or ()
        logprobs = tuple(float(entry["logprob"]) for entry in entries)
        token_ids, text = tuple(map(int, tokens)), str(choice["text"])
        completions.append(Completion(tuple(prompt), token_ids, logprobs, tuple(versions), text, reason))
    return completions


class ScoringServer:
    """A client of any vLLM server, local or remote, that scores tokens; it keeps no connection between calls."""

    def __init__(self, url: str, timeout_s: float = 300.0, token_variable: str = TOKEN_VARIABLE) -> None:
        """Set the address, for example ``http://127.0.0.1:8000``, and the time limit of one answer.

        The environment variable `token_variable` holds the server's token or API key, if the server needs one.
        """
        self._url, self._timeout_s, self._token_variable = url.rstrip("/"), timeout_s, token_variable

    def logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return each token's log-probability given the tokens before it, at temperature 1; 0 for the first of a row.

        Raises:
            EngineError: The server does not answer in time, refuses, or returns something else.
        """
        return [[0.0, *row] for row in self._scored(rows, 0, _logprob_of)]

    def top_logprobs(self, rows: Sequence[Sequence[int]], k: int) -> list[list[list[tuple[int, float]]]]:
        """Return the `k` most probable tokens at the place of each token but the first of a row, at temperature 1.

        Returns:
            By row and token: ids and log-probabilities, the most probable first.

        Raises:
            EngineError: As for `logprobs`; or the server returns fewer tokens, because of its ``--max-logprobs``.
        """

        def highest(token: int, entry: Entry) -> list[tuple[int, float]]:
            # The server adds the row's own token.
            found = sorted((-float(value["logprob"]), int(name)) for name, value in entry.items())[:k]
            if len(found) < k:
                raise EngineError(
                    f"the server returned {len(found)} of the {k} most probable tokens at a position. Start it with "
                    f"`--max-logprobs {k}` or more."
                )
            return [(name, -value) for value, name in found]

        return self._scored(rows, k, highest)

    def _scored(
        self, rows: Sequence[Sequence[int]], k: int, read_place: Callable[[int, Entry], Any]
    ) -> list[list[Any]]:
        """Return the result of `read_place` for each token but the first of a row."""
        calls = [
            _scoring_call(rows[start : start + ROWS_PER_REQUEST], k, read_place)
            for start in range(0, len(rows), ROWS_PER_REQUEST)
        ]
        return [row for answer in self._gather(calls) for row in answer]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of these tokens, decoded by the server's tokenizer."""
        body = {"tokens": list(token_ids)}
        return self._gather([("/detokenize", body, lambda answer: str(answer["prompt"]))])[0]

    def max_model_len(self) -> int:
        """Return the server's longest sequence, prompt and completion together, in tokens."""
        return self._gather([("/v1/models", None, lambda answer: int(answer["data"][0]["max_model_len"]))])[0]

    def parameter_sums(self, manifest: Sequence[TensorSpec]) -> list[WorkerSums] | None:
        """Return the checksums of every worker's parameters; None if the server lacks this call.

        The server needs ``VLLM_SERVER_DEV_MODE=1`` and `ServerExtension` as its ``--worker-extension-cls``; ``vectorlm
        serve`` sets both.

        Raises:
            WeightMismatch: The server runs another model.
        """
        body = {"method": "vectorlm_sums", "args": [to_wire(tuple(manifest))]}

        def read(answer: Mapping[str, Any]) -> list[Any]:
            return [result_from_wire("vectorlm_parameter_sums", result) for result in answer["results"]]

        try:
            results = self._gather([("/collective_rpc", body, read)])[0]
        except (EngineDied, EngineTimeout, TokenRefused):
            raise
        except EngineError:
            return None
        return results_or_first_error(results)

    def _gather(self, calls: Sequence[Call]) -> list[Any]:
        """Make calls concurrently, in a separate thread: a notebook's thread already runs an event loop."""

        async def make_calls() -> list[Any]:
            token = os.environ.get(self._token_variable)
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            # aiohttp's limit of connections would be inside the time limit of a call.
            free = asyncio.Semaphore(NUM_CONNECTIONS)
            async with aiohttp.ClientSession(headers=headers) as session:

                async def make_call(path: str, body: Any, read: Callable[[Any], Any]) -> Any:
                    method = "GET" if body is None else "POST"
                    async with free:
                        return await call_server(
                            session,
                            self._url,
                            path,
                            body,
                            read,
                            method=method,
                            timeout_s=self._timeout_s,
                            token_variable=self._token_variable,
                        )

                return await asyncio.gather(*(make_call(*call) for call in calls))

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, make_calls()).result()


def _scoring_call(rows: Sequence[Sequence[int]], k: int, read_place: Callable[[int, Entry], Any]) -> Call:
    def read(answer: Mapping[str, Any]) -> list[list[Any]]:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        scores = []
        for row, choice in zip(rows, choices, strict=True):
            _, *entries = choice["prompt_logprobs"]
            pairs = list(zip(row[1:], entries, strict=True))
            values = {token: _logprob_of(token, entry) for token, entry in pairs}
            token = max(values, key=lambda token: values[token], default=0)
            if values.get(token, 0.0) > 1e-3:
                raise ConfigError(
                    f"the server gives token {token} a log-probability of {values[token]:.3g}, which cannot be "
                    "above 0. Start it without --logprobs-mode, which makes it return logits."
                )
            scores.append([read_place(token, entry) for token, entry in pairs])
        return scores

    # vLLM must generate at least one token; we ignore it.
    body = {"prompt": [list(row) for row in rows], "max_tokens": 1, "temperature": 0, "prompt_logprobs": k}
    return "/v1/completions", body, read


def _logprob_of(token: int, entry: Entry) -> float:
    return float(entry[str(token)]["logprob"])
