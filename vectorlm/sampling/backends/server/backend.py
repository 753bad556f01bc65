"""A vLLM server that runs beside the trainer, as an `Backend`."""

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
from vectorlm.sampling.backends.server.client import as_it_is, call_server
from vectorlm.sampling.backends.server.extension import result_from_wire, to_wire
from vectorlm.sampling.backends.server.serve import require_token
from vectorlm.sampling.backends.vllm.shim import make_sampling_params
from vectorlm.sampling.contract import FINISH_REASONS, RequestOutput
from vectorlm.sampling.weights.plan import Layout, TensorSpec
from vectorlm.sampling.weights.receive import EngineReceiver
from vectorlm.types import Completion

POLL_S = 0.02
"""The longest that `poll` waits for something to finish."""

KEEPALIVE_S = 1.0
"""How long a connection may rest and be used again. A server hangs up after a time of its own (vLLM's 5 s), and what is
sent at that moment is lost."""
PROBE_EVERY_S = 5.0
"""While requests are in flight, the server is asked this often for a sign of life."""

RETRY_S = 0.5


class VLLMServer:
    """Speaks to ``vectorlm serve``, which is ``vllm serve`` with a lock and the weight channel.

    Requests go through ``/inference/v1/generate``, tokens in and tokens out; updates through ``/pause``,
    ``/collective_rpc`` and ``/resume``. The weights themselves do not travel over HTTP: ranks and server map the same
    memory, so the server must run on this machine, as the same user.
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
        """Wait for the server and make the receivers in its workers.

        Args:
            model: The trainer's model folder; the server must serve the same architecture.
            receiver: How the server shall hold weights on CPU: `live`, `packed` or `auto`.
            url: Where the server listens, for example ``http://127.0.0.1:8000``.
            token: Its token; from ``VECTORLM_SERVER_TOKEN`` when omitted.
            start_timeout_s: The longest to wait for it, in seconds.
            silence_s: The longest that it may say nothing while requests are in flight, in seconds; `SamplingEngine`
                passes nine tenths of its own `timeout_s`.
            logprobs_mode: What the server's log-probabilities must be, as vLLM calls it: `processed_logprobs` are of
                what was drawn from, `raw_logprobs` of the model.
            max_model_len: Longest prompt and completion together, in tokens, for which the server must have room; the
                server's own limit when omitted.

        Raises:
            ConfigError: `url` is not on this machine, there is no token, or the server was started with other settings.
            EngineError: The server does not answer, refuses the token, or lacks the weight channel.
        """
        self._url = _require_loopback(url)
        self._token = require_token(token)
        # It imports vLLM, which takes seconds; the first request would be silent for them.
        make_sampling_params(None)
        self._name = uuid.uuid4().hex
        self._finished: queue.SimpleQueue[RequestOutput | EngineError] = queue.SimpleQueue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._asked: set[asyncio.Task[Any]] = set()
        """Calls other than requests that are waited for."""
        self._ended: EngineDied | None = None
        self._silence_s, self._max_model_len = silence_s, max_model_len
        self._num_steps: int | None = None
        self._moved_at = 0.0
        """When the server was last seen to compute or answer."""
        self._hear()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="server-requests", daemon=True).start()
        self._session = self._wait_for(self._open_session())
        self.progress = 0
        self.version = -1
        self._num_loads = 0
        self._may_hold_nan = False
        try:
            self._await_health(start_timeout_s)
            settings = self._workers("vectorlm_settings", read=_read_settings)[0]
            self.max_num_seqs: int = settings["max_num_seqs"]
            self._require_settings(settings, logprobs_mode, max_model_len)
            earlier = f"until the first update {self._url} samples from an earlier trainer's weights."
            self.warning = earlier if settings["has_loaded"] else ""
            self._receiver = EngineReceiver(self._collective_rpc, receiver)
            self.receiver = self._receiver.kind
            self._post("/update_weight_version", {"new_version": str(self.version)})
        except BaseException:
            self.close()
            raise

    def submit(self, name: str, prompt: Sequence[int], sampling_params: Any) -> None:
        """Send one request; `poll` says whether the server takes it."""
        params = _params_to_wire(sampling_params)
        if self._max_model_len is not None:
            # The server's own limit may be a larger one, beyond which the trainer has no room.
            if (room := self._max_model_len - len(prompt)) < 1:
                limit = f"the engine holds {self._max_model_len}, the completion included"
                raise EngineError(f"a prompt has {len(prompt)} tokens: {limit}.")
            params["max_tokens"] = min(params["max_tokens"] or room, room)
        body = {
            "token_ids": list(prompt),
            "sampling_params": params,
            # Neither earlier weights' blocks nor an earlier trainer's are ever found.
            "cache_salt": f"{self._name} {self._num_loads}",
            "output_mode": "text",
        }
        self._wait_for(self._begin(name, body))

    def poll(self) -> list[RequestOutput]:
        """Wait a moment, and return the answers that have come."""
        if self._tasks and time.monotonic() - self._heard_at > self._silence_s:
            raise EngineTimeout(
                f"the server at {self._url} said nothing for {self._silence_s:g} s while generating."
            )
        if self._tasks and time.monotonic() - self._moved_at > self._silence_s:
            raise EngineTimeout(
                f"the server at {self._url} runs, but has computed nothing for {self._silence_s:g} s: requests wait."
            )
        self.progress += bool(self._tasks)
        found: list[RequestOutput] = []
        with contextlib.suppress(queue.Empty):
            each = self._finished.get(timeout=POLL_S)
            while True:
                if isinstance(each, EngineError):
                    raise each
                found.append(each)
                each = self._finished.get_nowait()
        return found

    def cancel(self, names: Iterable[str]) -> None:
        """Hang up on requests, which aborts them on the server."""
        self._wait_for(self._hang_up(list(names)))

    def connect(self, manifest: Sequence[TensorSpec], arena_path: str | None, weight_set: str) -> Layout:
        """Match the trainer's tensors with the server's."""
        if weight_set != "base":
            raise EngineError("a vLLM server takes merged weights only: use lora_mode='merged'.")
        return self._receiver.connect(manifest, arena_path, weight_set)

    def pause(self) -> None:
        """Freeze the server's scheduler, with its requests and their KV blocks."""
        self._post("/pause?mode=keep&clear_cache=false")

    def load(
        self, version: int, checksums: Sequence[int] | None, weight_sets: Sequence[str], recompute: bool
    ) -> float:
        """Take the new weights over, and have the server mark tokens with their version."""
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
        """Overwrite the whole KV cache at the next update; the server's other clients lose theirs too."""
        self._may_hold_nan = True

    def resume(self) -> None:
        """Let the scheduler go on; after a call without an answer there is nobody to tell."""
        self._moved_at = time.monotonic()
        if not self._is_silent:
            self._post("/resume")

    def sleep(self, parts: frozenset[str], asleep: frozenset[str]) -> None:
        """Empty the prefix cache; the server's memory is its own, and stays."""
        self._forget_cache()

    def wake_up(self, parts: frozenset[str]) -> None:
        """Do nothing: the memory never went."""

    def close(self) -> None:
        """Hang up; the server runs on."""
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
        await self._hang_up(list(self._tasks))
        await self._session.close()

    async def _probe(self) -> None:
        """While anything is waited for, ask the server something else; what ends it then is said at once.

        A server that was told to end takes no further connection, and may keep those that it has without a word. With
        requests in flight the question goes to the engine behind the server, which answers between steps.
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
                    # One of an earlier version, or of several engines, does not say whether it computes.
                    if num_steps is None or num_steps != self._num_steps:
                        self._num_steps, self._moved_at = num_steps, time.monotonic()
                elif self._asked:
                    await self._call("/health", method="GET", timeout_s=self._silence_s)
                num_refused = 0
            except EngineDied as error:
                # Once may be a connection that both ends let go of at the same time.
                num_refused += 1
                if num_refused > 1:
                    self._ended = error
                    self._finished.put(error)
                    for each in self._asked:
                        each.cancel()
                    return
            except EngineError:
                # Whatever else is wrong, the requests in flight will say so too.
                num_refused = 0

    async def _begin(self, name: str, body: Mapping[str, Any]) -> None:
        if not self._tasks:
            self._heard_at = self._moved_at = time.monotonic()
        self._tasks[name] = asyncio.get_running_loop().create_task(self._generate(name, body))

    async def _generate(self, name: str, body: Mapping[str, Any]) -> None:
        try:
            completions = await self._call(
                "/inference/v1/generate", body, partial(_completions, body["token_ids"]), timeout_s=None
            )
            self._moved_at = time.monotonic()
            self._finished.put(RequestOutput(name, completions))
        except EngineDied as error:
            self._finished.put(error)
        except EngineError as error:
            self._finished.put(RequestOutput(name, (), error=error))
        finally:
            self._tasks.pop(name, None)

    async def _hang_up(self, names: Sequence[str]) -> None:
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
        """Return what `read` makes of the server's answer; errors as of `call_server`."""
        try:
            return await call_server(
                self._session,
                self._url,
                path,
                body,
                read,
                method=method,
                timeout_s=timeout_s,
                heard=self._hear,
            )
        except EngineTimeout:
            self._is_silent = True
            raise

    def _hear(self) -> None:
        self._heard_at = time.monotonic()
        self._is_silent = False

    def _post(self, path: str, body: Any = None, read: Callable[[Any], Any] = as_it_is) -> Any:
        return self._wait_for(self._ask(path, body, read))

    async def _ask(self, path: str, body: Any, read: Callable[[Any], Any]) -> Any:
        """Return what `_call` does, or raise what `_probe` finds meanwhile."""
        asked = asyncio.get_running_loop().create_task(
            self._call(path, body, read, timeout_s=self._silence_s)
        )
        self._asked.add(asked)
        try:
            return await asked
        except asyncio.CancelledError:
            if self._ended is None:
                raise
            raise self._ended from None
        finally:
            self._asked.discard(asked)

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

    def _require_settings(
        self, settings: Mapping[str, Any], logprobs_mode: str, max_model_len: int | None
    ) -> None:
        if logprobs_mode != settings["logprobs_mode"]:
            raise ConfigError(
                f"the server at {self._url} reports {settings['logprobs_mode']}, and this run needs {logprobs_mode}: "
                f"start it with `-- --logprobs-mode {logprobs_mode}`."
            )
        if max_model_len is not None and max_model_len > settings["max_model_len"]:
            raise ConfigError(
                f"the server at {self._url} has room for {settings['max_model_len']} tokens, and this run needs "
                f"{max_model_len}: start it with `-- --max-model-len {max_model_len}`."
            )

    def _workers(
        self, method: str, args: Sequence[Any] = (), *, read: Callable[[Any], Any] = as_it_is
    ) -> list[Any]:
        """Call a method in every worker, and return what `read` makes of each one's answer."""
        body = {"method": method, "args": list(args)}
        return self._post("/collective_rpc", body, lambda answer: [read(each) for each in answer["results"]])

    def _collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[CallResult]:
        """Do for `EngineReceiver` what an engine's own ``collective_rpc`` does."""
        wire = [self._name, method, [to_wire(each) for each in args]]
        return self._workers("vectorlm_ask", wire, read=lambda each: result_from_wire(method, each))

    def _forget_cache(self) -> None:
        """Drop every block; requests in flight, other clients' too, compute theirs again."""
        path = "/reset_prefix_cache?reset_running_requests=true"
        if not self._post(path, read=lambda answer: answer["success"]):
            raise EngineError("the server's prefix cache still holds blocks of the old weights.")


def _read_settings(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of ``vectorlm_settings``; raises where one is missing."""
    numbers = {name: int(answer[name]) for name in ("max_num_seqs", "max_model_len")}
    return {**numbers, "logprobs_mode": answer["logprobs_mode"], "has_loaded": answer.get("has_loaded")}


def _completions(prompt: Sequence[int], answer: Mapping[str, Any]) -> list[Completion]:
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return [_completion(prompt, choice) for choice in choices]


def _completion(prompt: Sequence[int], choice: Mapping[str, Any]) -> Completion:
    tokens: list[int] = choice["token_ids"]
    versions: list[int] = []
    if tokens and choice.get("weight_versions") is None:
        raise EngineError(
            "the server does not say which weights sampled a token: it must run vLLM 0.32 or later."
        )
    for span in choice["weight_versions"] or ():
        versions += [int(span["version"])] * (span["end"] - span["start"])
    if len(versions) != len(tokens):
        raise ValueError(f"{len(versions)} versions for {len(tokens)} tokens")
    content = (choice["logprobs"] or {}).get("content")
    logprobs = tuple(float(each["logprob"]) for each in content or ())
    reason = choice["finish_reason"]
    if reason not in FINISH_REASONS:
        raise ValueError(f"finish_reason {reason!r}")
    return Completion(
        tuple(prompt), tuple(map(int, tokens)), logprobs, tuple(versions), str(choice["text"]), reason
    )


def _params_to_wire(given: Any) -> dict[str, Any]:
    """Return what differs from vLLM's defaults, and the limit, for which a server has a default of its own."""
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
        f"url={url!r} is not an address of this machine: ranks and server share the weights' memory, so the server "
        "must run here, for example at http://127.0.0.1:8000."
    )
