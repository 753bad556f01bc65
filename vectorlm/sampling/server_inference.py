"""A vLLM server that runs beside the trainer, as an `Inference`."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import ipaddress
import queue
import threading
import time
import uuid
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from vectorlm.contracts import Finished, Written
from vectorlm.errors import ConfigError, EngineDied, EngineError, EngineTimeout
from vectorlm.sampling.parts import SwappedParts
from vectorlm.sampling.rest import Parts
from vectorlm.sampling.server_guard import require_token
from vectorlm.sampling.server_wire import outcome_from_wire, to_wire
from vectorlm.sampling.vllm_shim import make_sampling_params
from vectorlm.types import Prompt
from vectorlm.weights.plan import Layout, TensorSpec

POLL_S = 0.02
"""The longest that `poll` waits for something to finish."""

PROBE_EVERY_S = 5.0
"""After so long a silence the server is asked for a sign of life."""

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
        logprobs_mode: str | None = None,
        max_model_len: int | None = None,
    ) -> None:
        """Wait for the server and make the receivers in its workers.

        Args:
            model: The trainer's model folder; the server must serve the same architecture.
            receiver: How the server shall hold weights on CPU: `live`, `packed` or `auto`.
            url: Where the server listens, for example ``http://127.0.0.1:8000``.
            token: Its token; that of ``VECTORLM_SERVER_TOKEN`` when omitted.
            start_timeout_s: The longest to wait for it, in seconds.
            silence_s: The longest that it may say nothing while requests are under way, in seconds.
            logprobs_mode: What the server's log-probabilities must be, as vLLM calls it; whatever they are, if omitted.
            max_model_len: Tokens of prompt and completion that the server must have room for.

        Raises:
            ConfigError: `url` is no address of this machine, there is no token, or the server was started with other
                settings.
            EngineError: The server does not answer, refuses the token, or lacks the weight channel.
        """
        self._url = _require_loopback(url)
        self._token = require_token(token)
        self._name = uuid.uuid4().hex
        self._finished: queue.SimpleQueue[Finished | EngineError] = queue.SimpleQueue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="server-requests", daemon=True).start()
        self._session = self._wait_for(self._open_session())
        self._version = -1
        self._num_loads = 0
        self._silence_s = silence_s
        self._heard_at = time.monotonic()
        self._probe: asyncio.Task[None] | None = None
        try:
            self._await_health(start_timeout_s)
            self._parts = SwappedParts(self._collective_rpc, with_adapter=False)
            settings = self._workers("vectorlm_settings")[0]
            self._max_num_seqs = int(settings["max_num_seqs"])
            self._require_settings(settings, logprobs_mode, max_model_len)
            self._receiver = self._parts.prepare(receiver)
            self._post("/update_weight_version", {"new_version": str(self._version)})
        except BaseException:
            self.close()
            raise

    @property
    def receiver(self) -> str:
        """How the server holds weights: `live` or `packed`."""
        return self._receiver

    @property
    def max_num_seqs(self) -> int:
        """Sequences that the server samples from at a time."""
        return self._max_num_seqs

    @property
    def version(self) -> int:
        """The training step of the weights; -1 for those that the server was started with."""
        return self._version

    def submit(self, name: str, prompt: Prompt, sampling_params: Any) -> None:
        """Send one request; whether the server takes it, `poll` says."""
        body = {
            "token_ids": self._token_ids(prompt),
            "sampling_params": _params_to_wire(sampling_params),
            # Neither earlier weights' blocks nor an earlier trainer's are ever found.
            "cache_salt": f"{self._name} {self._num_loads}",
            "output_mode": "text",
        }
        self._wait_for(self._begin(name, body))

    def poll(self) -> list[Finished]:
        """Wait a moment, and return the answers that have come.

        Raises:
            EngineDied: The server is gone.
            EngineTimeout: It says nothing any more.
        """
        self._require_signs_of_life()
        found: list[Finished] = []
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

    def connect(self, manifest: Sequence[TensorSpec], arena_path: str | None, part: str) -> Layout:
        """Match the trainer's tensors with the server's.

        Raises:
            EngineError: Adapters were asked for: a server takes merged weights.
        """
        if part != "base":
            raise EngineError("a vLLM server takes no adapters over: use lora_mode='merged'.")
        return self._parts.connect(manifest, arena_path, part)

    def pause(self) -> None:
        """Freeze the server's scheduler, with its requests and their KV blocks."""
        self._post("/pause?mode=keep&clear_cache=false")

    def load(
        self, version: int, checksums: Sequence[int] | None, swapped: Sequence[str], recompute: bool
    ) -> float:
        """Take the new weights over, and have the server mark tokens with their version."""
        load_s = self._parts.load(version, checksums, swapped)
        self._num_loads += 1
        if recompute or not self._tasks:
            self._forget_cache()
        self._post("/update_weight_version", {"new_version": str(version)})
        self._version = version
        return load_s

    def resume(self) -> None:
        """Let the scheduler go on."""
        self._post("/resume")

    def drop(self, parts: Parts, asleep: Parts) -> None:
        """Empty the prefix cache; the server's memory is its own, and stays."""
        self._forget_cache()

    def restore(self, parts: Parts) -> None:
        """Do nothing: the memory never went."""

    def close(self) -> None:
        """Hang up; the server runs on."""
        with contextlib.suppress(Exception):
            self._wait_for(self._close_session())
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _open_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._token}"},
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def _close_session(self) -> None:
        await self._hang_up(list(self._tasks))
        if self._probe is not None:
            self._probe.cancel()
        await self._session.close()

    def _require_signs_of_life(self) -> None:
        """Ask the engine behind the server something that it answers between two steps, and wait only so long."""
        silence_s = time.monotonic() - self._heard_at
        if self._tasks and self._probe is None and silence_s > PROBE_EVERY_S:
            self._wait_for(self._begin_probe())
        elif self._probe is not None and silence_s > self._silence_s:
            raise EngineTimeout(
                f"the server at {self._url} said nothing for {self._silence_s:g} s while generating."
            )

    async def _begin_probe(self) -> None:
        self._probe = asyncio.get_running_loop().create_task(self._ask_for_life())

    async def _ask_for_life(self) -> None:
        # Whatever is wrong, the requests under way will say so too.
        with contextlib.suppress(EngineError):
            await self._call("/collective_rpc", {"method": "vectorlm_settings"})
        self._probe = None

    async def _begin(self, name: str, body: Mapping[str, Any]) -> None:
        if not self._tasks:
            self._heard_at = time.monotonic()
        self._tasks[name] = asyncio.get_running_loop().create_task(self._generate(name, body))

    async def _generate(self, name: str, body: Mapping[str, Any]) -> None:
        try:
            answer = await self._call("/inference/v1/generate", body)
            self._finished.put(_finished(name, body["token_ids"], answer))
        except EngineDied as error:
            self._finished.put(error)
        except EngineError as error:
            self._finished.put(Finished(name, body["token_ids"], (), error=error))
        finally:
            self._tasks.pop(name, None)

    async def _hang_up(self, names: Sequence[str]) -> None:
        tasks = [task for name in names if (task := self._tasks.get(name)) is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _call(self, path: str, body: Any = None, method: str = "POST") -> Any:
        """Return the server's answer; a status that means failure raises `EngineError` with the server's own words."""
        try:
            async with self._session.request(method, self._url + path, json=body) as response:
                text = await response.text()
                self._heard_at = time.monotonic()
                if response.status == 401:
                    raise EngineError(f"the server at {self._url} refuses the token.")
                if response.status >= 400:
                    raise EngineError(f"the server refused {path.partition('?')[0]}: {text}")
                return await response.json() if response.content_type == "application/json" else text
        except aiohttp.ClientError as error:
            raise EngineDied(f"the server at {self._url} does not answer: {error}") from error

    def _post(self, path: str, body: Any = None) -> Any:
        return self._wait_for(self._call(path, body))

    def _wait_for(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _await_health(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._wait_for(self._call("/health", method="GET"))
                return
            except EngineDied:
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_S)

    def _require_settings(
        self, settings: Mapping[str, Any], logprobs_mode: str | None, max_model_len: int | None
    ) -> None:
        if logprobs_mode not in (None, settings["logprobs_mode"]):
            raise ConfigError(
                f"the server at {self._url} reports {settings['logprobs_mode']}, and this run needs {logprobs_mode}: "
                f"start it with `-- --logprobs-mode {logprobs_mode}`."
            )
        if max_model_len is not None and max_model_len > settings["max_model_len"]:
            raise ConfigError(
                f"the server at {self._url} has room for {settings['max_model_len']} tokens, and this run needs "
                f"{max_model_len}: start it with `-- --max-model-len {max_model_len}`."
            )

    def _workers(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        answer = self._post("/collective_rpc", {"method": method, "args": list(args)})
        results: list[Any] = answer["results"]
        return results

    def _collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        """Stand for the engine's own ``collective_rpc``, as `Receivers` calls it."""
        answers = self._workers("vectorlm_ask", [self._name, method, [to_wire(each) for each in args]])
        return [outcome_from_wire(method, each) for each in answers]

    def _forget_cache(self) -> None:
        """Drop every block; requests under way, other clients' among them, compute theirs anew."""
        if not self._post("/reset_prefix_cache?reset_running_requests=true")["success"]:
            raise EngineError("the server's prefix cache still holds blocks of the old weights.")

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            asked: dict[str, Any] = {"prompt": prompt}
        elif len(prompt) and isinstance(prompt[0], Mapping):
            asked = {"messages": list(prompt)}
        else:
            return [int(token) for token in prompt]  # type: ignore[arg-type]
        token_ids: list[int] = self._post("/tokenize", asked)["tokens"]
        return token_ids


def _finished(name: str, prompt: Sequence[int], answer: Mapping[str, Any]) -> Finished:
    """Read the server's answer to one request."""
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return Finished(name, prompt, [_written(choice) for choice in choices])


def _written(choice: Mapping[str, Any]) -> Written:
    tokens: list[int] = choice["token_ids"]
    versions: list[int] = []
    if tokens and choice.get("weight_versions") is None:
        raise EngineError(
            "the server does not say which weights sampled a token: it must run vLLM 0.32 or later."
        )
    for span in choice["weight_versions"] or ():
        versions += [int(span["version"])] * (span["end"] - span["start"])
    content = (choice["logprobs"] or {}).get("content")
    logprobs = None if content is None else [each["logprob"] for each in content]
    return Written(tokens, logprobs, versions, choice["text"], choice["finish_reason"])


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
        f"url={url!r} is no address of this machine: ranks and server share the weights' memory, so the server must "
        "run here, for example at http://127.0.0.1:8000."
    )
