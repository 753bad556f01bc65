"""A local HTTP server in front of the engine: any agent that takes a ``base_url`` can make rollouts."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn import Config, Server
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from vectorlm.data.encoding import encode
from vectorlm.errors import UnknownAdapter, VectorLMError
from vectorlm.ranks.topology import LOOPBACK
from vectorlm.rl.agents.forms import ChatRequest, Form, TextRequest, TokenRequest, explained
from vectorlm.rl.agents.messages import MessagesRequest
from vectorlm.rl.agents.session import RequestError, Session, Turn
from vectorlm.rl.environments.environment import ACCESS
from vectorlm.sampling.engine import SamplingEngine
from vectorlm.sampling.handle import Hear
from vectorlm.types import POLICY, Completion, Prompt

NOT_FOUND = "model_not_found"
MAX_BODY_BYTES = 16 * 2**20
ARRIVES_WITHIN_S = 30.0
"""Seconds within which a whole request must arrive, and within which the client must read its answer."""
KEPT_ALIVE_S = 300.0
"""Seconds that a connection may be idle between two requests."""
CLOSE_S = 5.0

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Streamable = ChatRequest | TextRequest | MessagesRequest
Asked = Streamable | TokenRequest
Result = TypeVar("Result")


class Gateway:
    """Serves sessions from a background thread; a context manager.

    Every session has a key. ``/v1/chat/completions``, ``/v1/completions``, ``/v1/messages``, ``/inference/v1/generate``
    and ``/v1/models`` need ``Authorization: Bearer KEY`` or ``x-api-key: KEY``; ``/health`` does not. Requests name a
    model: the policy, whose answers are part of the session's rollout, or another adapter of the engine.
    """

    def __init__(self, tokenizer: Any, max_model_len: int, engine: SamplingEngine | None = None) -> None:
        """Listen on a free port of 127.0.0.1; other models than the policy are adapters of this rank's `engine`."""
        self.tokenizer, self.max_model_len, self._engine = tokenizer, max_model_len, engine
        self.key = secrets.token_urlsafe(32)
        """A key for requests that belong to no rollout, such as a judge's."""
        self._sessions: dict[bytes, Session] = {}
        self._socket = socket.create_server((LOOPBACK, 0), backlog=1024)
        self.url = f"http://{LOOPBACK}:{self._socket.getsockname()[1]}/v1"
        """The `base_url` for agents."""
        routes = [
            Route("/health", _health),
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", _Endpoint(self, ChatRequest), methods=["POST"]),
            Route("/v1/completions", _Endpoint(self, TextRequest), methods=["POST"]),
            Route("/v1/messages", _Endpoint(self, MessagesRequest), methods=["POST"]),
            # Anthropic's client appends /v1 to its base_url.
            Route("/v1/v1/messages", _Endpoint(self, MessagesRequest), methods=["POST"]),
            # Not below /v1, as in vLLM.
            Route("/inference/v1/generate", _Endpoint(self, TokenRequest), methods=["POST"]),
        ]
        config = Config(
            Starlette(routes=routes, exception_handlers={404: _unknown_path}),
            http=_Connection,
            ws="none",
            proxy_headers=False,
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=int(KEPT_ALIVE_S),
            timeout_graceful_shutdown=1,
        )
        # uvicorn logs broken and closed connections; the agent gets the errors of its requests.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._server = Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="gateway", daemon=True
        )
        self._thread.start()

    def open(self, session: Session) -> None:
        """Start to answer a session's requests."""
        self._sessions[_digest(session.key)] = session

    def end(self, session: Session) -> None:
        """Stop answering a session's requests."""
        self._sessions.pop(_digest(session.key), None)

    def close(self) -> None:
        """Stop listening; safe to call twice."""
        self._server.should_exit = True
        self._thread.join(CLOSE_S)
        self._socket.close()

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def session_of(self, request: Request) -> Session:
        """Return the session of a request's key; raise `RequestError` if there is none."""
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        key = _digest(request.headers.get("x-api-key", bearer))
        session = self._sessions.get(key)
        if session is None and key == _digest(self.key):
            return self._free_session()
        if session is None:
            raise RequestError("the key must belong to an open session.", status=401, code="invalid_api_key")
        return session

    def _free_session(
        self, seed_of: Callable[[int], int] | None = None, sampling: Mapping[str, Any] | None = None
    ) -> Session:
        """Return a session whose answers are part of no rollout."""
        return Session(
            partial(self._ask, POLICY),
            self.tokenizer,
            sampling=sampling or {},
            max_model_len=self.max_model_len,
            seed_of=seed_of,
            is_free=True,
        )

    @contextmanager
    def access(
        self, seed_of: Callable[[int], int], *, sampling: Mapping[str, Any]
    ) -> Iterator[dict[str, str]]:
        """Answer an environment's requests for a block; yield address and key under the names in `ACCESS`.

        `sampling` are the defaults of the requests' sampling parameters.
        """
        session = self._free_session(seed_of, sampling)
        self.open(session)
        try:
            yield dict(zip(ACCESS, (self.url, session.key), strict=True))
        finally:
            self.end(session)
            session.close()

    @property
    def models(self) -> list[str]:
        """The names of the models that requests may name, the policy first."""
        others = () if self._engine is None else self._engine.adapters
        return [POLICY, *(name for name in others if name != POLICY)]

    async def _ask(
        self, adapter: str, prompt: Prompt, params: dict[str, Any], hear: Hear | None = None
    ) -> Sequence[Completion]:
        """Request completions of an adapter from this rank's engine."""
        assert self._engine is not None
        assert self._engine.local is not None
        requests = self._engine.local
        future = requests.ask(encode(prompt, lambda: self.tokenizer), params, hear, adapter)
        requests.flush()
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            requests.take_back(future)
            raise

    async def respond(
        self, request: Request, form: type[Asked]
    ) -> tuple[Response | _EventStream, list[Turn]]:
        """Return the answer to a request, and the turns in it."""
        session = self.session_of(request)
        asked = form.model_validate_json(await _body(request))
        name = asked.model or POLICY
        if name not in self.models:
            rule = f"the model must be {' or '.join(map(repr, self.models))}."
            raise RequestError(f"model={name!r}: {rule}", "model", 404, NOT_FOUND)
        if session.is_free or name != POLICY:
            session = session.beside(partial(self._ask, name), name)
        answer_form = Form(name, self.tokenizer)
        if not isinstance(asked, TokenRequest) and asked.is_streamed:
            return await self._streamed(request, session, asked, answer_form)
        turns = await _unless_gone(request, asked.answer(session))
        if not isinstance(asked, TokenRequest) and asked.stream:
            text = "".join(asked.events(answer_form).rest(turns))
            return Response(text, media_type="text/event-stream"), turns
        return JSONResponse(asked.shown(turns, answer_form)), turns

    async def _streamed(
        self, request: Request, session: Session, asked: Streamable, form: Form
    ) -> tuple[_EventStream, list[Turn]]:
        """Return a stream that sends an answer while it is sampled, and a list that receives its turn at the end."""
        loop, parts, turns = asyncio.get_running_loop(), asyncio.Queue[Completion | None](), list[Turn]()

        def hear(part: Completion) -> None:
            with contextlib.suppress(RuntimeError):  # The gateway is closed.
                loop.call_soon_threadsafe(parts.put_nowait, part)

        work = asyncio.ensure_future(asked.answer(session, hear))
        work.add_done_callback(lambda _: parts.put_nowait(None))
        try:
            first = await _unless_gone(request, parts.get())
            if first is None:
                # A refused request has its own status.
                work.result()
        except BaseException:
            work.cancel()
            raise

        async def events() -> AsyncIterator[str]:
            found, part = asked.events(form), first
            try:
                while part is not None:
                    yield found.part(part)
                    part = await _unless_gone(request, parts.get())
                if work.cancelled():
                    raise ClientDisconnect  # The session has ended.
                turns.extend(work.result())
            except (RequestError, VectorLMError) as error:
                yield asked.refusal_event(error)
                return
            for event in found.rest(turns):
                yield event

        return _EventStream(events(), work), turns

    async def _models(self, request: Request) -> Response:
        try:
            self.session_of(request)
        except RequestError as error:
            return _refusal(error, ChatRequest)
        shared = {"object": "model", "owned_by": "vectorlm", "max_model_len": self.max_model_len}
        return JSONResponse({"object": "list", "data": [{"id": name, **shared} for name in self.models]})


class _Endpoint:
    """An ASGI application for one path; it marks turns as read once the answer has been sent."""

    def __init__(self, gateway: Gateway, form: type[Asked]) -> None:
        self._gateway, self._form = gateway, form

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        turns: list[Turn] = []
        response: Response | _EventStream
        request = Request(scope, receive)
        try:
            response, turns = await self._gateway.respond(request, self._form)
        except (ClientDisconnect, asyncio.CancelledError):
            return
        except Exception as error:
            refused = _refused(error)
            with contextlib.suppress(RequestError):
                self._gateway.session_of(request).refusal = str(refused)
            response = _refusal(refused, self._form)

        async def send_in_time(message: MutableMapping[str, Any]) -> None:
            async with asyncio.timeout(ARRIVES_WITHIN_S):
                await send(message)

        with contextlib.suppress(TimeoutError, ClientDisconnect):
            await response(scope, receive, send_in_time)
        for turn in turns:
            turn.is_read = True


class _EventStream:
    """An ASGI application that sends events as they arrive, and cancels the work behind them when it ends."""

    def __init__(self, events: AsyncIterator[str], work: asyncio.Future[Any]) -> None:
        self._events, self._work = events, work

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._work.cancel()


class _Connection(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """Closes a connection whose first request does not start in time; uvicorn has no limit for it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(ARRIVES_WITHIN_S, self._close_unless_begun)

    def _close_unless_begun(self) -> None:
        if self.cycle is None:
            self.transport.close()


def _digest(key: str) -> bytes:
    """Return the digest of a key: the time of a look-up must reveal nothing about the key."""
    return hashlib.sha256(key.encode()).digest()


async def _health(request: Request) -> Response:
    return JSONResponse({})


async def _unknown_path(request: Request, _: Exception) -> Response:
    rule = "the path must be /v1/chat/completions, /v1/completions or /v1/messages."
    return _refusal(RequestError(f"path={request.url.path!r}: {rule}", "path", 404, NOT_FOUND), ChatRequest)


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(ARRIVES_WITHIN_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise RequestError(f"the body is larger than {MAX_BODY_BYTES} bytes.", status=413)
    except TimeoutError:
        raise RequestError(f"the body must arrive within {ARRIVES_WITHIN_S:g} s.", status=408) from None
    return bytes(body)


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """Return the result of `work`; cancel it if the client disconnects first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


def _refused(error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ValidationError):
        return explained(error)
    if isinstance(error, UnknownAdapter):
        # The adapter was removed between two steps.
        return RequestError(str(error), "model", 404, NOT_FOUND)
    if isinstance(error, VectorLMError):
        # The engine refused the request. A broken engine also fails elsewhere.
        return RequestError(str(error))
    return RequestError(f"{type(error).__name__}: {error}", status=500)


def _refusal(error: RequestError, form: type[Asked]) -> Response:
    # Clients read the answer after they have sent their body. A large body is read and dropped, a late one is not.
    headers = {"connection": "close"} if error.status == 408 else None
    return JSONResponse(form.refusal(error), error.status, headers=headers)
