"""Environments on a server of OpenEnv 0.10: ``rl.environment: vectorlm.rollouts.openenv:OpenEnv``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from websockets.asyncio.client import connect

from vectorlm.rollouts.environment import Reply

MAX_MESSAGE_BYTES = 100 * 2**20
"""As OpenEnv's own client."""


class OpenEnv:
    """One session with the server that the column `openenv_url` names, by OpenEnv's messages over a WebSocket.

    What the policy writes is the action where it is a JSON object, and else the field `openenv_action` of one, which is
    ``message`` where the column is missing. `openenv_reset` holds the arguments of the reset.
    """

    async def reset(self, row: Mapping[str, Any]) -> Any:
        """Open the session; return the first observation as a message, or None where it is empty."""
        url = row["openenv_url"].rstrip("/").replace("http", "ws", 1) + "/ws"
        self._action = row.get("openenv_action", "message")
        self._socket = await connect(url, max_size=MAX_MESSAGE_BYTES, proxy=None)
        found = await self._ask("reset", row.get("openenv_reset") or {})
        return self._messages(found) or None

    async def step(self, message: Mapping[str, Any]) -> Reply:
        """Take what the policy wrote as the action."""
        try:
            action = json.loads(message["content"])
        except ValueError:
            action = None
        found = await self._ask(
            "step", action if isinstance(action, dict) else {self._action: message["content"]}
        )
        return Reply(self._messages(found), reward=found.get("reward"), done=bool(found.get("done")))

    async def close(self) -> None:
        """End the session."""
        if hasattr(self, "_socket"):
            await self._socket.send(json.dumps({"type": "close"}))
            await self._socket.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        await self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(await self._socket.recv())
        found: dict[str, Any] = answer.get("data") or {}
        if answer.get("type") == "error":
            raise RuntimeError(
                f"OpenEnv's server refused {kind!r}: {found.get('message')} ({found.get('code')})"
            )
        return found

    def _messages(self, found: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return an observation as the policy reads it: a text alone as it is, several fields as JSON."""
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
