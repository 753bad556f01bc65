"""An agent of the user's, which makes rollouts through the gateway."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from vectorlm.errors import RolloutError, WorkerLost
from vectorlm.ranks.workers.pool import WorkerPool
from vectorlm.rl.agents.gateway import Gateway
from vectorlm.rl.agents.session import Session
from vectorlm.rl.environments import hosted
from vectorlm.rl.rollout import Rollout
from vectorlm.rl.rollouts.sampler import Ask
from vectorlm.types import PromptRecord

POLL_S = 0.5


class AgentHost:
    """Runs an agent once for each rollout, in a worker that no other rollout has meanwhile.

    It is a function ``run(client_url, key, row)``, maybe a coroutine function, which returns a reward, a mapping with a
    ``reward`` and further numbers, or None.
    """

    def __init__(
        self,
        run: str,
        gateway: Gateway,
        workers: WorkerPool,
        *,
        sampling: Mapping[str, Any],
        timeout_s: float | None,
        is_trained_on: bool = True,
    ) -> None:
        """Take the agent's name; between two requests it may take `timeout_s`."""
        self._run, self._gateway, self._workers = run, gateway, workers
        self._sampling, self._timeout_s = sampling, math.inf if timeout_s is None else timeout_s
        self._is_trained_on = is_trained_on

    async def rollout(self, record: PromptRecord, ask: Ask, seed_of: Callable[[int], int]) -> Rollout:
        """Return what the agent made of a prompt.

        Raises:
            RolloutError: It raised, asked for nothing, or took too long.
        """
        gateway = self._gateway
        session = Session(
            ask,
            gateway.tokenizer,
            sampling=self._sampling,
            max_model_len=gateway.max_model_len,
            seed_of=seed_of,
            is_trained_on=self._is_trained_on,
        )
        gateway.open(session)
        work = asyncio.wrap_future(self._workers.submit(self._work(session, record)))
        try:
            while not (await asyncio.wait({work}, timeout=POLL_S))[0]:
                if session.idle_s > self._timeout_s:
                    raise RuntimeError(f"no request and no result within {self._timeout_s:g} s")
            reward, measured = work.result()
        except (WorkerLost, RuntimeError) as error:
            # Frameworks raise when there is no room for a further turn, which ends the rollout and not the run.
            if not session.is_full:
                # Clients that raise for a status may not say what the gateway answered.
                refusal = session.refusal and f", after its request was refused: {session.refusal}"
                raise RolloutError(
                    f"the agent {self._run!r} failed: {error}{refusal} (prompt {str(record.prompt)[:80]!r}). Catch the "
                    "error there, and return a reward or None instead."
                ) from error
            reward, measured = None, {}
        finally:
            work.cancel()
            gateway.end(session)
            session.close()
        return replace(session.rollout(record), measured=measured).rewarded(reward)

    async def _work(self, session: Session, record: PromptRecord) -> tuple[float | None, dict[str, float]]:
        row = {**record.columns, "prompt": record.prompt}
        async with self._workers.worker() as worker:
            session.begin()
            found: tuple[float | None, dict[str, float]] = await worker.ask(
                f"{hosted.__name__}:run_agent", self._run, self._gateway.url, session.key, row
            )
            return found
