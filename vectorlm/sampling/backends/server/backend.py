"""The backend for a vLLM server that runs beside the trainer."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import ipaddress
import queue
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from vectorlm.errors import ConfigError, EngineDied, EngineError, EngineTimeout
from vectorlm.ranks.engine_ranks import CallResult
from vectorlm.sampling.backends.server.client import as_it_is, call_server, read_completions
from vectorlm.sampling.backends.server.extension import result_from_wire, to_wire
from vectorlm.sampling.backends.server.serve import require_token
from vectorlm.sampling.backends.vllm.shim import make_sampling_params
from vectorlm.sampling.contract import RequestOutput
from vectorlm.sampling.weights.plan import Layout, TensorSpec
from vectorlm.sampling.weights.receive import EngineReceiver

POLL_S = 0.02
"""Longest wait of one `poll`."""

KEEPALIVE_S = 1.0
"""Longest idle time of a reused connection. vLLM closes connections after 5 s, and a request sent just then is lost."""
PROBE_EVERY_S = 5.0
"""Interval of health checks while requests are in flight."""

RETRY_S = 0.5


class VLLMServer:
    """A client of ``vectorlm serve``, which is ``vllm serve`` with a token check and the weight channel.

    Requests use ``/inference/v1/generate``, with token ids in and out. Updates use ``/pause``, ``/collective_rpc`` and
    ``/resume``. Weights do not travel over HTTP: ranks and server map the same memory, so the server must run on this
    machine as the same user.
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

        Raises:
            ConfigError: `url` is not on this machine, the token is missing, or the server has other settings.
            EngineError: The server does not answer, refuses the token, or has no weight channel.
        """
        self._url = _require_loopback(url)
        self._token = require_token(token)
        # Imports vLLM, which takes seconds, before the first request.
        make_sampling_params(None)
        self._name = uuid.uuid4().hex
        self._finished: queue.SimpleQueue[RequestOutput | EngineError] = queue.SimpleQueue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._calls: set[asyncio.Task[Any]] = set()
        """Pending calls other than requests."""
        self._ended: EngineDied | None = None
        self._silence_s, self._max_model_len = silence_s, max_model_len
        self._num_steps: int | None = None
        self._moved_at = 0.0
        """Time of the server's last known progress."""
        self._note_answer()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="server-requests", daemon=True).start()
        self._session = self._wait_for(self._open_session())
        self.progress = 0
        self.version = -1
        self._num_loads = 0
        self._may_hold_nan = False
        try:
            self._await_health(start_timeout_s)
            settings = self._call_workers("vectorlm_settings", read=_read_settings)[0]
            self.max_num_seqs: int = settings["max_num_seqs"]
            if logprobs_mode != settings["logprobs_mode"]:
                raise ConfigError(
                    f"logprobs_mode={logprobs_mode!r}: the server at {self._url} reports {settings['logprobs_mode']}. "
                    f"Start it with `-- --logprobs-mode {logprobs_mode}`."
                )
            if max_model_len is not None and max_model_len > settings["max_model_len"]:
                raise ConfigError(
                    f"max_model_len={max_model_len}: the server at {self._url} takes only "
                    f"{settings['max_model_len']} tokens. Start it with `-- --max-model-len {max_model_len}`."
                )
            earlier = f"until the first update {self._url} samples with an earlier trainer's weights."
            self.warning = earlier if settings["has_loaded"] else ""
            self._receiver = EngineReceiver(self._collective_rpc, receiver)
            self.receiver = self._receiver.kind
            self._post("/update_weight_version", {"new_version": str(self.version)})
        except BaseException:
            self.close()
            raise

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

    def connect(self, manifest: Sequence[TensorSpec], arena_path: str | None, weight_set: str) -> Layout:
        """Match the trainer's tensors with the server's."""
        if weight_set != "base":
            raise EngineError("lora_mode='adapter' does not work with a vLLM server. Use lora_mode='merged'.")
        return self._receiver.connect(manifest, arena_path, weight_set)

    def pause(self) -> None:
        """Freeze the server's scheduler, with its requests and their KV blocks."""
        self._post("/pause?mode=keep&clear_cache=false")

    def load(
        self, version: int, checksums: Sequence[int] | None, weight_sets: Sequence[str], recompute: bool
    ) -> float:
        """Load the new weights and make the server mark tokens with their version."""
        load_s = self._receiver.load(version, checksums, weight_sets)
        self._num_loads += 1
        if recompute or self._may_hold_nan or not self._tasks:
            self._forget_cache()
        self._post("/reset_encoder_cache", read=lambda answer: None)
        if self._may_hold_nan:
            self._receiver.empty_kv_cache()
            self._may_hold_nan = False
        self._post("/update_weight_version", {"new_version": str(version)})
        self.version = version
        return load_s

    def expect_nan(self) -> None:
        """Overwrite the whole KV cache at the next update, for the server's other clients too."""
        self._may_hold_nan = True

    def resume(self) -> None:
        """Resume the scheduler, unless the server has stopped answering."""
        self._moved_at = time.monotonic()
        if not self._is_silent:
            self._post("/resume")

    def sleep(self, parts: frozenset[str], asleep: frozenset[str]) -> None:
        """Empty the prefix cache; the server keeps its memory."""
        self._forget_cache()

    def wake_up(self, parts: frozenset[str]) -> None:
        """Do nothing: the server kept its memory."""

    def close(self) -> None:
        """Close all connections; the server keeps running."""
        with contextlib.suppress(Exception):
            self._wait_for(self._close_session())
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _open_session(self) -> aiohttp.ClientSession:
        self._probing = asyncio.get_running_loop().create_task(self._probe())
        return aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._token}"},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def _close_session(self) -> None:
        self._probing.cancel()
        await self._disconnect(list(self._tasks))
        await self._session.close()

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
                    body = {"method": "vectorlm_settings"}
                    num_steps = await self._call(
                        "/collective_rpc",
                        body,
                        lambda answer: answer["results"][0].get("num_steps"),
                        timeout_s=self._silence_s,
                    )
                    # None: the server is too old or has several engines, and cannot report its steps.
                    if num_steps is None or num_steps != self._num_steps:
                        self._num_steps, self._moved_at = num_steps, time.monotonic()
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
                "/inference/v1/generate", body, partial(read_completions, body["token_ids"]), timeout_s=None
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
    ) -> Any:
        """Return `read(answer)`; raises like `call_server`."""
        try:
            return await call_server(
                self._session,
                self._url,
                path,
                body,
                read,
                method=method,
                timeout_s=timeout_s,
                on_answer=self._note_answer,
            )
        except EngineTimeout:
            self._is_silent = True
            raise

    def _note_answer(self) -> None:
        self._heard_at = time.monotonic()
        self._is_silent = False

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

    def _call_workers(
        self, method: str, args: Sequence[Any] = (), *, read: Callable[[Any], Any] = as_it_is
    ) -> list[Any]:
        """Call a method in every worker; return `read(answer)` of each."""
        body = {"method": method, "args": list(args)}
        return self._post("/collective_rpc", body, lambda answer: [read(part) for part in answer["results"]])

    def _collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[CallResult]:
        """Stand in for an engine's ``collective_rpc``, for `EngineReceiver`."""
        wire = [self._name, method, [to_wire(value) for value in args]]
        return self._call_workers("vectorlm_ask", wire, read=partial(result_from_wire, method))

    def _forget_cache(self) -> None:
        """Drop every block of the KV cache; all requests in flight, of other clients too, recompute theirs."""
        path = "/reset_prefix_cache?reset_running_requests=true"
        if not self._post(path, read=lambda answer: answer["success"]):
            raise EngineError("the server's prefix cache still holds blocks of the old weights.")


def _read_settings(answer: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {name: int(answer[name]) for name in ("max_num_seqs", "max_model_len")}
    return {**numbers, "logprobs_mode": answer["logprobs_mode"], "has_loaded": answer.get("has_loaded")}


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
