"""The lock on a vLLM server's door: no request without the token, on any path."""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from vectorlm.errors import ConfigError

TOKEN_VARIABLE = "VECTORLM_SERVER_TOKEN"
"""The environment variable that holds the token, for server and trainer alike."""

MIN_TOKEN_CHARACTERS = 16

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def require_token(given: str | None = None) -> str:
    """Return the token: `given`, or the environment's.

    Raises:
        ConfigError: There is none, or it can be guessed.
    """
    token = given or os.environ.get(TOKEN_VARIABLE, "")
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise ConfigError(
            f"{TOKEN_VARIABLE} holds {len(token)} characters, but whoever knows the token can replace the model's "
            f"weights: it needs at least {MIN_TOKEN_CHARACTERS}. Set it for server and trainer, for example with\n"
            f"  export {TOKEN_VARIABLE}=$(python -c 'import secrets; print(secrets.token_urlsafe(32))')"
        )
    return token


class Guard:
    """ASGI middleware for ``vllm serve --middleware``.

    vllm 0.32: ``--api-key`` guards the paths of the OpenAI API and leaves those open that replace weights, pause the
    engine or call its workers.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        """Stand before `app`; raises `ConfigError` where the environment has no token."""
        self._app = app
        self._expected = f"Bearer {require_token()}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request with the token through; answer 401 to any other but a question after the server's health."""
        if scope["type"] == "lifespan" or self._is_welcome(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})

    def _is_welcome(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"] == "/health":
            return True
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)
