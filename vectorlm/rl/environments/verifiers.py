"""The agent for tasks of verifiers 0.4 (prompts `verifiers:TASKSET`)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from typing import Any

from vectorlm.data.tasks import environment_config

KEY = "VECTORLM_ROLLOUT_KEY"
"""Environment variable from which verifiers' client reads the key; set only in the worker."""


async def play(client_url: str, key: str, row: Mapping[str, Any]) -> dict[str, float]:
    """Play the episode of a row of `read_taskset`, and return the reward and metrics of its trace.

    The metrics include the trace's weighted rewards. A failed episode raises `RuntimeError`.
    """
    import verifiers.v1 as vf

    os.environ[KEY] = key
    environment = _loaded(row["taskset"], json.dumps(row["config"]))
    kind = type(environment.taskset).task_type()
    task = kind(kind.data_type().model_validate(row["task"]), environment.config.taskset.task)
    context = vf.ModelContext("policy", vf.EvalClientConfig(base_url=client_url, api_key_var=KEY))
    async with environment.serving():
        episode = await environment.run_episode(task, context)
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError(f"verifiers' episode failed: {errors}")
    (trace,) = episode.traces
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    found = {"turns": trace.num_turns, "truncated": trace.is_truncated, **rewards, **trace.metrics}
    return {**{name: float(value) for name, value in found.items()}, "reward": float(trace.reward)}


@cache
def _loaded(taskset: str, config_text: str) -> Any:
    from verifiers.v1.utils.loaders import load_environment

    return load_environment(environment_config(taskset, json.loads(config_text)))
