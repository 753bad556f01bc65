"""``vectorlm serve``: a vLLM server with weights that a trainer on the same machine can replace, behind a token."""

from __future__ import annotations

import argparse
import hmac
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

from vectorlm.errors import ConfigError
from vectorlm.ranks.placement import LOOPBACK
from vectorlm.sampling.backends.vllm import CPU_KV_CACHE_BYTES
from vectorlm.sampling.environment import vllm_variables

PORT = 8000

TOKEN_VARIABLE = "VECTORLM_SERVER_TOKEN"
"""The environment variable that holds the token, for server and trainer alike."""

MIN_TOKEN_CHARACTERS = 16

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm serve``."""
    parser.add_argument("--model", required=True, metavar="DIR", help="a folder written by save_pretrained")
    parser.add_argument("--host", default=LOOPBACK, help=f"the address to listen at; default {LOOPBACK}")
    parser.add_argument("--port", type=int, default=PORT, metavar="N", help=f"default {PORT}")
    parser.add_argument(
        "vllm_args", nargs="*", metavar="ARG", help="arguments of `vllm serve` itself, after a --"
    )


def serve_command(args: argparse.Namespace) -> int:
    """Become the server that `add_serve_arguments` describes; does not return unless something is wrong."""
    require_token()
    if not {"--host", "--port"} & {each.partition("=")[0] for each in args.vllm_args}:
        _require_port(args.host, args.port)
    os.execvpe(
        sys.executable,
        server_command(args.model, args.host, args.port, args.vllm_args),
        server_environment(os.environ),
    )


def _require_port(host: str, port: int) -> None:
    """Raise `ConfigError` where nobody could listen: vLLM says so after seconds, with a traceback."""
    try:
        # As uvicorn does: a server that has just ended does not hold its port.
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"the server cannot listen at port {port} of {host} ({error}). Choose another by --port or --host."
        ) from None


def server_command(model: str, host: str, port: int, further: Sequence[str]) -> list[str]:
    """Return the command line of ``vllm serve``, with the lock, the weight channel and what starts fast."""
    command = [sys.executable, "-m", "vectorlm.sampling.backends.server.client", "--model", model]
    command += ["--host", host, "--port", str(port)]
    command += ["--middleware", "vectorlm.sampling.backends.server.serve.Guard"]
    command += ["--worker-extension-cls", "vectorlm.sampling.backends.server.extension.ServerExtension"]
    # Tokens in and tokens out, which vLLM keeps closed otherwise.
    command += ["--enable-scale-out"]
    # One batch may otherwise be in flight on the device when the weights change.
    command += ["--no-async-scheduling", "--disable-uvicorn-access-log"]
    # Of what was drawn from, as a trainer needs them; the last of several values counts.
    command += ["--logprobs-mode", "processed_logprobs"]
    command += ["--structured-outputs-config", '{"backend": "xgrammar"}']
    import torch

    if not torch.cuda.is_available():
        command += ["--enforce-eager"]
        if not any(each.startswith("--kv-cache-memory-bytes") for each in further):
            command += ["--kv-cache-memory-bytes", str(CPU_KV_CACHE_BYTES)]
    return [*command, *further]


def server_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the server's variables; what the user has set wins, but for the endpoints that updates need."""
    import torch

    defaults = vllm_variables(given, on_cpu=not torch.cuda.is_available())
    return {**defaults, **given, "VLLM_SERVER_DEV_MODE": "1"}


def require_token(given: str | None = None) -> str:
    """Return the token, `given` or the environment's; raise `ConfigError` where there is none or it can be guessed."""
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
