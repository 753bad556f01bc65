"""Environments on a server of OpenEnv 0.10: ``rl.environment: vectorlm.rl.environments.openenv:OpenEnv``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from vectorlm.data.encoding import without_thoughts
from vectorlm.rl.environments.environment import Reply
from vectorlm.rl.environments.tools import require_plain

MAX_MESSAGE_BYTES = 100 * 2**20
"""Maximum size of a message, as in OpenEnv's own client."""


class OpenEnv:
    """A session with the OpenEnv server at the URL in the column `openenv_url`, over a WebSocket.

    The action is the policy's text without its thoughts, if this text is a JSON object. Any other text becomes the
    field that the column `openenv_action` names (default ``message``). The column `openenv_reset` has the arguments of
    the reset. If the server refuses an action, the policy reads the error, and the metric `refused_actions` counts it.
    """

    async def reset(self, row: Mapping[str, Any]) -> Any:
        """Open the session; return the first observation as a message, or None if it is empty."""
        url = row["openenv_url"].rstrip("/").replace("http", "ws", 1) + "/ws"
        self._action = row.get("openenv_action", "message")
        self._socket = await connect(url, max_size=MAX_MESSAGE_BYTES, proxy=None)
        self._num_refused = 0
        kind, found = await self._ask("reset", row.get("openenv_reset") or {})
        if kind == "error":
            raise RuntimeError(f"OpenEnv's server refused 'reset': {_refusal(found)}")
        return self._messages(found) or None

    async def step(self, message: Mapping[str, Any]) -> Reply:
        """Send the policy's text as the action."""
        said = without_thoughts(message["content"])
        try:
            action = require_plain(json.loads(said))
        except (ValueError, RecursionError):
            action = None
        kind, found = await self._ask("step", action if isinstance(action, dict) else {self._action: said})
        self._num_refused += kind == "error"
        measured = {"refused_actions": float(self._num_refused)}
        if kind == "error":
            return Reply([{"role": "user", "content": f"error: {_refusal(found)}"}], metrics=measured)
        return Reply(self._messages(found), found.get("reward"), bool(found.get("done")), measured)

    async def close(self) -> None:
        """End the session."""
        if hasattr(self, "_socket"):
            # The server may have ended the session with the episode.
            with suppress(ConnectionClosed):
                await self._socket.send(json.dumps({"type": "close"}))
            await self._socket.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        await self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await self._socket.recv())
        return str(answer.get("type")), answer.get("data") or {}

    def _messages(self, found: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return an observation as messages: a single text field as it is, several fields as JSON."""
        fields = {
            name: value
            for name, value in (found.get("observation") or {}).items()
            if name != "metadata" and value not in (None, "")
        }
        if not fields:
            return []
        only = next(iter(fields.values()))
        text = only if len(fields) == 1 and isinstance(only, str) else json.dumps(fields, ensure_ascii=False)
        return [{"role": "user", "content": text}]


def _refusal(found: Mapping[str, Any]) -> str:
    return f"{found.get('message')} ({found.get('code')})"
