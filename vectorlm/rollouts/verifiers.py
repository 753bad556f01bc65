"""An agent that runs an environment of verifiers 0.4: ``rl.environment: openai:vectorlm.rollouts.verifiers:play``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Any

KEY = "VECTORLM_ROLLOUT_KEY"
"""The variable from which verifiers' client reads the key, in the worker alone."""


async def play(client_url: str, key: str, row: Mapping[str, Any]) -> dict[str, float]:
    """Run one episode of the taskset that the column `taskset` names, for its task number `index`.

    Agents run as processes of this machine, so that no tunnel is opened. The reward and the metrics are the trace's;
    an episode that verifiers calls failed raises.
    """
    import verifiers.v1 as vf

    os.environ[KEY] = key
    environment, tasks = _loaded(row["taskset"])
    context = vf.ModelContext("policy", vf.EvalClientConfig(base_url=client_url, api_key_var=KEY))
    async with environment.serving():
        episode = await environment.run_episode(tasks[row["index"]], context)
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError(f"verifiers' episode failed: {errors}")
    (trace,) = episode.traces
    found = {"turns": trace.num_turns, "truncated": trace.is_truncated, **trace.metrics}
    return {**{name: float(value) for name, value in found.items()}, "reward": float(trace.reward)}


@cache
def _loaded(taskset: str) -> tuple[Any, list[Any]]:
    from verifiers.v1.envs.single_agent.env import SingleAgentEnvConfig
    from verifiers.v1.utils.loaders import load_environment, load_taskset

    agent = {"runtime": {"type": "subprocess"}}
    config = SingleAgentEnvConfig.model_validate({"taskset": {"id": taskset}, "agent": agent})
    return load_environment(config), list(load_taskset(config.taskset))
