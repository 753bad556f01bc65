"""The tasks of a taskset of verifiers as prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vectorlm.errors import DatasetError
from vectorlm.packages import is_installed
from vectorlm.settings import PromptSettings
from vectorlm.types import PromptRecord


def read_taskset(settings: PromptSettings, setting: str) -> list[PromptRecord]:
    """Load the tasks that the settings select, each with what its episode is played from.

    Raises:
        DatasetError: There is no such taskset, its config is wrong, it has no end, or verifiers is not installed.
    """
    if not is_installed("verifiers"):
        fix = "Run `pip install --no-deps -r requirements/verifiers.txt`, beside the pinned packages."
        raise DatasetError(f"{setting} needs the package verifiers. {fix}")
    from verifiers.v1.configs.select import SelectConfig
    from verifiers.v1.utils.loaders import load_taskset

    named = f"{setting}.verifiers={settings.verifiers!r}"
    config = dict(settings.config)
    try:
        select = SelectConfig.model_validate(config.pop("select", {}))
        taskset = load_taskset(environment_config(str(settings.verifiers), config).taskset).select(select)
        if not taskset.bounded:
            raise DatasetError("it has no end. Set `config: {select: {limit: 1000}}`.")
        tasks = [task.data for task in taskset]
    # Of the taskset's code too.
    except Exception as error:
        text = str(error) if isinstance(error, DatasetError) else f"{type(error).__name__}: {error}"
        raise DatasetError(f"{named} cannot be loaded: {text}") from error
    row = {"taskset": settings.verifiers, "config": config}
    return [PromptRecord(data.prompt_text, {**row, "task": data.model_dump(mode="json")}) for data in tasks]


def environment_config(taskset: str, config: Mapping[str, Any]) -> Any:
    """Return verifiers' own config of an environment; agents run as processes of this machine, without a tunnel."""
    from verifiers.v1.utils.loaders import resolve_env_config

    agent = {"runtime": {"type": "subprocess"}, **config.get("agent", {})}
    return resolve_env_config(
        {**config, "taskset": {**config.get("taskset", {}), "id": taskset}, "agent": agent}
    )
