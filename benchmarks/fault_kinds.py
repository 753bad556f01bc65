"""The faults that faults.py injects, with their expected errors and time limits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

SIGNALS = ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGHUP")
PATIENCE = float(os.environ.get("VECTORLM_FAULTS_PATIENCE", "1"))
"""Factor on all deadlines; use more than 1 on a shared machine."""
DEADLINE_S, COLLECTIVE_S, LOAD_S = 12 * PATIENCE, 15 * PATIENCE, 60 * PATIENCE
"""Time limits in seconds: the silence of an engine, reward or environment; a collective; the start of an engine."""
LASTING = ("second run", "a day forward", "a day back", "taken", "stranger")
"""Faults that must not end a run."""
NOBODY = 65534
AGENT_S = 30.0
"""Seconds allowed for ending a stopped rank, which ignores SIGTERM."""
STEP_S = 0.2
"""Least seconds of a step, and of a pause before and after writing a model, to let faults hit the intended moment."""
PAUSE = "pause"
"""Name of the trigger file that makes every rank wait before its next step."""
FINAL = "final model"
"""Name of the moment after the last step, when rank 0 writes the model."""
FORK = "fork.pid"
"""Name of the trigger file to which a fork writes its pid."""
MARGIN_S = 15 * PATIENCE
"""Seconds beyond the deadlines, for a run to notice the fault and to end its last process."""


@dataclass(frozen=True)
class Mode:
    """A kind of run, and its number of ranks."""

    kind: str
    world_size: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.world_size} rank{'s' * (self.world_size > 1)}"

    @property
    def ranks(self) -> list[str]:
        """The names of the ranks as targets of faults."""
        return [f"rank {rank}" for rank in range(self.world_size)]

    @property
    def has_server(self) -> bool:
        """Whether the run samples on a server."""
        return self.kind == "RL on a server"

    @property
    def is_deterministic(self) -> bool:
        """Whether two runs end with the same weights; with requests in flight, the timing of updates changes them."""
        return self.kind != "asynchronous RL"


MODES = (
    (Mode("fine-tuning", 1), Mode("RL", 2), Mode("asynchronous RL", 1), Mode("RL on a server", 2)),
    (Mode("fine-tuning", 2), Mode("RL", 1), Mode("asynchronous RL", 2), Mode("RL on a server", 1)),
)
"""Runs of each part of the campaign; the parts run concurrently, with one thread per process."""


@dataclass(frozen=True)
class Fault:
    """A fault, and the part of the run that it hits."""

    what: str
    target: str = ""
    moment: str = ""
    """When the fault happens; empty for any time between the start and the step before the last."""

    @property
    def kind(self) -> str:
        """The name of the fault in the table of results."""
        return ", ".join(filter(None, (self.what, self.moment)))

    @property
    def killed(self) -> str:
        """The part that gets SIGKILL after user code has forked; rank 0 for a reward, because ranks own workers."""
        return "rank 0" if self.target == "reward" else self.target

    def __str__(self) -> str:
        return f"{self.kind} {self.target}".strip()


def faults_of(mode: Mode) -> list[Fault]:
    """Return all faults that can be injected into a run."""
    has_rewards = mode.kind != "fine-tuning"
    processes = ["launcher", "sampler", *mode.ranks, *["server"] * mode.has_server]
    code = [*mode.ranks, *["reward", "environment"] * has_rewards]
    return [
        *(Fault(what, target) for what in SIGNALS for target in processes),
        *(Fault(what, target) for what in ("raise", "loop") for target in code),
        *(Fault("out of memory", target) for target in ("sampler", "rank 0")),
        *(Fault(what, "output") for what in ("full disk", "read-only", "second run")),
        *(Fault(what, "checkpoint") for what in ("torn", "truncated", "flipped byte")),
        Fault("full", "/dev/shm"),
        *(Fault(what, "clock") for what in ("a day forward", "a day back")),
        *[Fault("taken", "port")] * mode.has_server,
        *(Fault("fork", target) for target in [*mode.ranks, *["reward"] * has_rewards]),
        *(Fault("SIGKILL", target, FINAL) for target in ["launcher", *mode.ranks]),
        *[Fault("stranger", "doors")] * has_other_users(),
    ]


def has_other_users() -> bool:
    """Return whether this process may become another user: root may, unless its namespace maps only root."""
    num_ids = int(Path("/proc/self/uid_map").read_text().split()[2])
    return os.geteuid() == 0 and num_ids > NOBODY


def must_go_on(fault: Fault, mode: Mode) -> bool:
    """Return whether the run must not end, as when a single rank or the launcher hangs, which nobody watches."""
    stops = fault.what in ("SIGSTOP", "loop")
    unwatched = fault.target == "launcher" or (fault.target == "rank 0" and mode.world_size == 1)
    return (stops and unwatched) or fault.what in LASTING


def may_go_on(fault: Fault) -> bool:
    """Return whether the run may end or go on: a run notices exhausted memory only if it needs more."""
    return fault.what in ("out of memory", "full")


def cause(fault: Fault, mode: Mode) -> str:
    """Return a pattern for the error that names the fault; empty if SIGKILL leaves no launcher to report it."""
    match fault.what, fault.target:
        case ("SIGKILL", "launcher"):
            return ""
        case ("fork", _):
            return f"{fault.killed} of {mode.world_size} was ended by SIGKILL"
        case (name, "launcher"):
            return f"the run was ended by {name}"
        case (name, "server"):
            return f"Engine{'Timeout' if name == 'SIGSTOP' else 'Died'}: the server at "
        case ("SIGSTOP", "sampler"):
            return "EngineTimeout: the sampler process "
        case ("SIGSTOP" | "loop", target) if target.startswith("rank"):
            return f"{target}( of 2 raised no error|, which has not made progress)"
        case (name, "sampler") if name in SIGNALS:
            return f"the sampler process .* was ended by {name}"
        case (name, target) if name in SIGNALS:
            return f"{target} of {mode.world_size} was ended by {name}"
        case ("loop", target):
            return f"the {target} .*failed.*: no answer within {DEADLINE_S:g} s"
        case ("raise", target):
            return f"ArithmeticError: a fault in {target}"
        case ("out of memory", target):
            # Python may raise a plain MemoryError, and the kernel words a failed thread differently. While libraries
            # are loaded, there may be no error at all: the dynamic loader exits with 127, and C++ with SIGABRT.
            return (
                "raised Engine(Error|Died)"
                if target == "sampler"
                else "rank 0 of . raised .*(?i:memory|alloc|Resource temporarily unavailable|new thread)"
                "|rank 0 of . (ended with exit code 127|was ended by SIGABRT)"
            )
        case ("full disk", _):
            return "No space left on device.*/disk/run|/disk/run.*No space left on device"
        case ("read-only", _):
            return "Read-only file system: '.*/checkpoints|/checkpoints/.* cannot be written .*Read-only file system"
        case (_, "checkpoint"):
            return "the checkpoint .* cannot be read .*has changed"
        case ("full", "/dev/shm"):
            # A server on this machine may fail first, and only its own log has the reason.
            refused = "|the server refused .*EngineCore encountered an issue" if mode.has_server else ""
            return f"No space left on device|/dev/shm{refused}"
    raise ValueError(fault)


def limit_s(fault: Fault, mode: Mode, start_s: float) -> float:
    """Return the seconds until all processes must be gone; `start_s` is the time that the first step still needs."""
    limit = MARGIN_S + start_s
    if fault.target == "checkpoint":
        return limit
    if fault.target == "server" and start_s:
        # The run cannot distinguish it from a server that is still starting.
        limit += LOAD_S
    if fault.what in ("SIGSTOP", "loop"):
        limit += max(DEADLINE_S, COLLECTIVE_S)
        is_rank = fault.target.startswith("rank")
        if fault.what == "SIGSTOP":
            limit += AGENT_S if is_rank else LOAD_S * (start_s > 0)
    return limit
