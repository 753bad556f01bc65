"""A user's script that faults.py runs, with a reward, an environment and ranks that fail on demand.

Files in the folder $FAULTS trigger a fault in the part NAME. NAME.raise raises an error, NAME.loop never returns, and
NAME.fork forks a process that writes its pid and stays alive.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fault_kinds import COLLECTIVE_S, FORK, PAUSE, STEP_S

FOLDER = Path(os.environ["FAULTS"])
DIGITS = "0123456789"


def fail_if_told(name: str) -> None:
    if (FOLDER / f"{name}.raise").exists():
        raise ArithmeticError(f"a fault in {name}")
    while (FOLDER / f"{name}.loop").exists():
        pass
    with suppress(FileNotFoundError):
        (FOLDER / f"{name}.fork").unlink()
        if os.fork() == 0:
            (FOLDER / FORK).write_text(str(os.getpid()))
            while True:
                time.sleep(60)


def reward(text: str, **columns: Any) -> float:
    fail_if_told("reward")
    return sum(text.count(digit) for digit in DIGITS) / 12


class Environment:
    """An environment that replies once."""

    def __init__(self, **columns: Any) -> None:
        self._has_answered = False

    def respond(self, text: str) -> str | None:
        """Return a reply to the first turn, then None."""
        fail_if_told("environment")
        if self._has_answered:
            return None
        self._has_answered = True
        return " 7"


def train(checked: Any) -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    from transformers import PreTrainedModel

    from vectorlm import Topology
    from vectorlm.runs.fine_tuning import finetune
    from vectorlm.runs.reinforcement import reinforce

    name = f"rank {Topology.from_environment().rank}"
    (FOLDER / f"{name}.pid").write_text(str(os.getpid()))

    def before_a_step(*_: Any) -> None:
        time.sleep(STEP_S)
        while (FOLDER / PAUSE).exists():
            time.sleep(STEP_S)
        fail_if_told(name)

    def save_slowly(*args: Any, **options: Any) -> None:
        time.sleep(STEP_S)
        save_pretrained(*args, **options)
        time.sleep(STEP_S)

    save_pretrained = PreTrainedModel.save_pretrained
    PreTrainedModel.save_pretrained = save_slowly
    register_optimizer_step_pre_hook(before_a_step)
    (finetune if checked.config.rl is None else reinforce)(checked)


if __name__ == "__main__":
    import vectorlm
    from vectorlm.errors import VectorLMError
    from vectorlm.runs.config.load import load_config
    from vectorlm.runs.preflight.checked import preflight

    try:
        world_size = int(sys.argv[2])
        checked = preflight(load_config(sys.argv[1]), world_size)
        vectorlm.launch(train, checked, world_size=world_size, timeout_s=COLLECTIVE_S)
    except VectorLMError as error:
        sys.exit(f"{type(error).__name__}: {error}")
