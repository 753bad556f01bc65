"""The backend for a vLLM server on the trainer's machine."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import ipaddress
import os
import queue
import re
import resource
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from vectorlm.errors import ConfigError, EngineDied, EngineError, EngineTimeout
from vectorlm.sampling.backends.served import ServedWeights
from vectorlm.sampling.backends.server.client import as_it_is, call_server, read_completions
from vectorlm.sampling.backends.server.serve import TOKEN_VARIABLE, require_token
from vectorlm.sampling.backends.vllm.shim import make_sampling_params
from vectorlm.sampling.contract import RequestOutput
from vectorlm.sampling.weights.wire import to_wire

POLL_S = 0.02
"""Longest wait of one `poll`."""

KEEPALIVE_S = 1.0
"""Longest idle time of a reused connection. vLLM closes connections after 5 s, and a request sent just then is lost."""
MOST_FILES = 1 << 15
"""Limit of open files that the client asks for. Linux has about 28,000 ports for connections to one address."""
PROBE_EVERY_S = 5.0
"""Interval of health checks while requests are in flight."""

RETRY_S = 0.5
CLOSE_WITHIN_S = 5.0
STEPS = re.compile(r"^vllm:iteration_tokens_total_count\S* (\S+)$", re.MULTILINE)
"""The line of ``/metrics`` with the number of an engine's steps."""
QUERIES = {"pause": "?mode=keep&clear_cache=false", "reset_prefix_cache": "?reset_running_requests=true"}
"""Options of the routes. During a pause the server keeps requests and their KV blocks."""


class VLLMServer:
    """A client of a vLLM server with the weight-transfer backend ``vectorlm``, such as ``vectorlm serve``.

    Requests use ``/inference/v1/generate``, with token ids in and out. Updates use vLLM's routes for weight transfer.
    Weights do not travel over HTTP: ranks and server map the same memory, so the server must run on this machine as the
    same user.
    """

    def __init__(
        self,
        model: str,
        *,
        receiver: str,
        url: str,
        token: str | None = None,
        start_timeout_s: float = 600.0,
        silence_s: float = 300.0,
        logprobs_mode: str = "processed_logprobs",
        max_model_len: int | None = None,
        samples: bool = True,
    ) -> None:
        """Wait for the server and create the receivers in its workers.

        Args:
            model: The trainer's model folder; the server must serve the same architecture.
            receiver: How the server keeps weights on CPU: `live`, `packed` or `auto`.
            url: The server's address, for example ``http://127.0.0.1:8000``.
            token: The server's token; ``VECTORLM_SERVER_TOKEN`` if omitted.
            start_timeout_s: Seconds to wait for the server at the start.
            silence_s: Seconds that the server may be silent while requests are in flight. `SamplingEngine` passes nine
                tenths of its `timeout_s`.
            logprobs_mode: The server's log-probabilities must be of the sampling distribution (`processed_logprobs`) or
                of the model (`raw_logprobs`).
            max_model_len: Longest sequence, prompt and completion together, in tokens; the server's limit if omitted.
            samples: Whether this client sends requests too. If not, the server needs no token.

        Raises:
            ConfigError: `url` is not on this machine, the token is missing, or the server has other settings.
            EngineError: The server does not answer, refuses the token, or has no weight channel.
        """
        self._url = _require_loopback(url)
        self._token = require_token(token) if samples else token or os.environ.get(TOKEN_VARIABLE, "")
        if samples:
            # Imports vLLM, which takes seconds, before the first request.
            make_sampling_params(None)
        self._name = uuid.uuid4().hex
        self._finished: queue.SimpleQueue[RequestOutput | EngineError] = queue.SimpleQueue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._calls: set[asyncio.Task[Any]] = set()
        """Pending calls other than requests."""
        self._ended: EngineDied | None = None
        self._silence_s, self._max_model_len = silence_s, max_model_len
        self._steps: list[str] = []
        self._moved_at = 0.0
        """Time of the server's last known progress."""
        self._note_answer()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="server-requests", daemon=True).start()
        self._session, self._control_session = self._wait_for(self._open_sessions())
        self.progress = 0
        self.version = -1
        self._num_loads = 0
        try:
            self._await_health(start_timeout_s)
            self._weights = ServedWeights(self._route, receiver)
            self.receiver, self.transports = self._weights.receiver, self._weights.transports
            self.connect, self.pause = self._weights.connect, self._weights.pause
            self.copy_round, self.open_handles = self._weights.copy_round, self._weights.open_handles
            self.expect_nan, self.sleep = self._weights.expect_nan, self._weights.sleep
            self.wake_up, self.max_num_seqs = self._weights.wake_up, self._weights.max_num_seqs
            if samples:
                self._prepare_to_sample(logprobs_mode)
        except BaseException:
            self.close()
            raise

    def _prepare_to_sample(self, logprobs_mode: str) -> None:
        """Raise ConfigError for other settings of the server; make it mark tokens with this trainer's versions."""
        settings = self._weights.settings
        if logprobs_mode != settings["logprobs_mode"]:
            raise ConfigError(
                f"logprobs_mode={logprobs_mode!r}: the server at {self._url} reports {settings['logprobs_mode']}. "
                f"Start it with `-- --logprobs-mode {logprobs_mode}`."
            )
        if (longest := self._max_model_len) is not None and longest > settings["max_model_len"]:
            raise ConfigError(
                f"max_model_len={longest}: the server at {self._url} takes only {settings['max_model_len']} tokens. "
                f"Start it with `-- --max-model-len {longest}`."
            )
        earlier = f"until the first update {self._url} samples with an earlier trainer's weights."
        self.warning = earlier if settings["has_loaded"] else ""
        self._weights.claim()
        self._post("/update_weight_version", {"new_version": str(self.version)})

    def submit(self, name: str, prompt: Sequence[int], sampling_params: Any) -> None:
        """Send one request; `poll` raises or returns the server's refusal."""
        params = _params_to_wire(sampling_params)
        if self._max_model_len is not None:
            # The server's own limit may be larger than the trainer's.
            if (num_left := self._max_model_len - len(prompt)) < 1:
                raise EngineError(
                    f"a prompt has {len(prompt)} tokens: the engine holds {self._max_model_len}, the "
                    "completion included."
                )
            params["max_tokens"] = min(params["max_tokens"] or num_left, num_left)
        body = {
            "token_ids": list(prompt),
            "sampling_params": params,
            # Keeps requests from the cached blocks of earlier weights and of earlier trainers.
            "cache_salt": f"{self._name} {self._num_loads}",
            "output_mode": "text",
        }
        self._wait_for(self._start_request(name, body))

    def poll(self) -> list[RequestOutput]:
        """Wait briefly and return the answers that have arrived."""
        if self._tasks and time.monotonic() - self._heard_at > self._silence_s:
            raise EngineTimeout(
                f"the server at {self._url} was silent for {self._silence_s:g} s while generating."
            )
        if self._tasks and time.monotonic() - self._moved_at > self._silence_s:
            raise EngineTimeout(
                f"the server at {self._url} runs, but computed nothing for {self._silence_s:g} s while requests wait."
            )
        self.progress += bool(self._tasks)
        outputs: list[RequestOutput] = []
        with contextlib.suppress(queue.Empty):
            output = self._finished.get(timeout=POLL_S)
            while True:
                if isinstance(output, EngineError):
                    raise output
                outputs.append(output)
                output = self._finished.get_nowait()
        return outputs

    def cancel(self, names: Iterable[str]) -> None:
        """Close the connections of requests, which aborts them on the server."""
        self._wait_for(self._disconnect(list(names)))

    def load(
        self, version: int, checksums: Sequence[int] | None, weight_sets: Sequence[str], recompute: bool
    ) -> float:
        """Load the new weights and make the server mark tokens with their version."""
        load_s = self._weights.load(version, checksums, weight_sets, recompute or not self._tasks)
        self._num_loads += 1
        self.version = version
        return load_s

    def resume(self) -> None:
        """Resume the scheduler, unless the server has stopped answering."""
        self._moved_at = time.monotonic()
        if not self._is_silent:
            self._weights.resume()

    def close(self) -> None:
        """Close all connections; the server keeps running."""
        with contextlib.suppress(Exception):
            if self._ended is None and not self._is_silent:
                self._silence_s = min(self._silence_s, CLOSE_WITHIN_S)
                self._weights.close()
        with contextlib.suppress(Exception):
            self._wait_for(self._close_session())
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _open_sessions(self) -> tuple[aiohttp.ClientSession, aiohttp.ClientSession]:
        """Open a session for requests, and one for other calls, which must not wait for a connection.

        The server closes the connection of a call that fails.
        """
        self._probing = asyncio.get_running_loop().create_task(self._probe())
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        connectors = (
            aiohttp.TCPConnector(limit=_num_connections(), keepalive_timeout=KEEPALIVE_S),
            aiohttp.TCPConnector(force_close=True),
        )
        no_limit = aiohttp.ClientTimeout(total=None)
        requests, calls = (
            aiohttp.ClientSession(headers=headers, connector=connector, timeout=no_limit)
            for connector in connectors
        )
        return requests, calls

    async def _close_session(self) -> None:
        self._probing.cancel()
        await self._disconnect(list(self._tasks))
        await self._session.close()
        await self._control_session.close()

    async def _probe(self) -> None:
        """Send health checks while calls are pending, and fail them as soon as the server is gone.

        A server that shuts down accepts no new connection but may keep the old ones open without an answer. With
        requests in flight the check goes to the engine behind the server, which answers between steps.
        """
        num_refused = 0
        while True:
            await asyncio.sleep(min(PROBE_EVERY_S, self._silence_s / 4))
            try:
                if self._tasks:
                    # The engine behind the server answers between two steps.
                    await self._call("/weight_info", method="GET", timeout_s=self._silence_s)
                    read = partial(re.findall, STEPS)
                    steps = await self._call("/metrics", read=read, method="GET", timeout_s=self._silence_s)
                    # Without statistics the server cannot report its steps.
                    if not steps or steps != self._steps:
                        self._steps, self._moved_at = steps, time.monotonic()
                elif self._calls:
                    await self._call("/health", method="GET", timeout_s=self._silence_s)
                num_refused = 0
            except EngineDied as error:
                # A single refusal may be a connection that both sides closed at the same time.
                num_refused += 1
                if num_refused > 1:
                    self._ended = error
                    self._finished.put(error)
                    for call in self._calls:
                        call.cancel()
                    return
            except EngineError:
                # The requests in flight report any other error.
                num_refused = 0

    async def _start_request(self, name: str, body: Mapping[str, Any]) -> None:
        if not self._tasks:
            self._heard_at = self._moved_at = time.monotonic()
        self._tasks[name] = asyncio.get_running_loop().create_task(self._generate(name, body))

    async def _generate(self, name: str, body: Mapping[str, Any]) -> None:
        try:
            completions = await self._call(
                "/inference/v1/generate",
                body,
                partial(read_completions, body["token_ids"]),
                timeout_s=None,
                is_request=True,
            )
            self._moved_at = time.monotonic()
            self._finished.put(RequestOutput(name, completions))
        except EngineDied as error:
            self._finished.put(error)
        except EngineError as error:
            self._finished.put(RequestOutput(name, (), error=error))
        finally:
            self._tasks.pop(name, None)

    async def _disconnect(self, names: Sequence[str]) -> None:
        tasks = [task for name in names if (task := self._tasks.get(name)) is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _call(
        self,
        path: str,
        body: Any = None,
        read: Callable[[Any], Any] = as_it_is,
        *,
        method: str = "POST",
        timeout_s: float | None,
        is_request: bool = False,
    ) -> Any:
        """Return `read(answer)`; raises like `call_server`."""
        try:
            return await call_server(
                self._session if is_request else self._control_session,
                self._url,
                path,
                body,
                read,
                method=method,
                timeout_s=timeout_s,
                token_variable=TOKEN_VARIABLE,
                on_answer=self._note_answer,
            )
        except EngineTimeout:
            self._is_silent = True
            raise

    def _note_answer(self) -> None:
        self._heard_at = time.monotonic()
        self._is_silent = False

    def _route(self, name: str, body: Mapping[str, Any] | None) -> Any:
        read = _is_success if name == "reset_prefix_cache" else as_it_is
        return self._post(f"/{name}{QUERIES.get(name, '')}", body, read)

    def _post(self, path: str, body: Any = None, read: Callable[[Any], Any] = as_it_is) -> Any:
        return self._wait_for(self._ask(path, body, read))

    async def _ask(self, path: str, body: Any, read: Callable[[Any], Any]) -> Any:
        """Return the result of `_call`, or raise the error that `_probe` finds meanwhile."""
        call = asyncio.get_running_loop().create_task(self._call(path, body, read, timeout_s=self._silence_s))
        self._calls.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            if self._ended is None:
                raise
            raise self._ended from None
        finally:
            self._calls.discard(call)

    def _wait_for(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _await_health(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                left_s = max(deadline - time.monotonic(), RETRY_S)
                self._wait_for(self._call("/health", method="GET", timeout_s=left_s))
                return
            except (EngineDied, EngineTimeout):
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_S)


def _num_connections() -> int:
    """Raise this process's limit of open files, and return how many of them requests may use; the others wait."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < (most := min(hard, MOST_FILES)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most * 3 // 4


def _is_success(answer: Mapping[str, Any]) -> bool:
    return bool(answer["success"])


def _params_to_wire(given: Any) -> dict[str, Any]:
    """Return the values that differ from vLLM's defaults, and always `max_tokens`: the server's default differs."""
    params = make_sampling_params(given)
    known = set(inspect.signature(type(params)).parameters) - {"output_kind"}
    wire = {name: value for name, value in to_wire(params).items() if name in known}
    return {**wire, "max_tokens": params.max_tokens}


def _require_loopback(url: str) -> str:
    host = urlsplit(url).hostname
    with contextlib.suppress(ValueError):
        if host == "localhost" or (host is not None and ipaddress.ip_address(host).is_loopback):
            return url.rstrip("/")
    raise ConfigError(
        f"url={url!r}: the server must run on this machine, because ranks and server share memory. Use an address such "
        "as http://127.0.0.1:8000."
    )
