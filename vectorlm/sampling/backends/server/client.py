"""One call of a vLLM server over HTTP, and what its failures are called."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import aiohttp

from vectorlm.errors import EngineDied, EngineError, EngineTimeout, VectorLMError

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
