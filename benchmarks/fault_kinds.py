"""What happens to the runs of faults.py, which error must name it, and how soon everything must be gone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

SIGNALS = ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGHUP")
PATIENCE = float(os.environ.get("VECTORLM_FAULTS_PATIENCE", "1"))
"""Times all deadlines; more than 1 on a machine that others use too."""
DEADLINE_S, COLLECTIVE_S, LOAD_S = 12 * PATIENCE, 15 * PATIENCE, 60 * PATIENCE
"""Longest silence of an engine, a reward or an environment; longest collective; longest start of an engine."""
LASTING = ("second run", "a day forward", "a day back", "taken", "stranger")
"""What no run may end of."""
NOBODY = 65534
AGENT_S = 30.0
"""How long torch's agent waits for a stopped rank to heed SIGTERM."""
STEP_S = 0.2
"""How long a step takes at least, and half of the writing of a model: a fault then meets what it is meant for."""
PAUSE = "pause"
"""A file of this name among the triggers lets every rank wait before its next step."""
FINAL = "final model"
"""The moment after the last step, when rank 0 writes the model."""
FORK = "fork.pid"
"""The file among the triggers in which a fork notes its number."""
MARGIN_S = 15 * PATIENCE
"""Beyond the deadlines: until the fault is met, and until the last process is gone."""


@dataclass(frozen=True)
class Mode:
    """What is run, and on how many ranks."""

    kind: str
    world_size: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.world_size} rank{'s' * (self.world_size > 1)}"

    @property
    def ranks(self) -> list[str]:
        """The ranks as targets."""
        return [f"rank {rank}" for rank in range(self.world_size)]

    @property
    def has_server(self) -> bool:
        """Whether a server samples."""
        return self.kind == "RL on a server"

    @property
    def is_deterministic(self) -> bool:
        """Whether two runs end with the same weights: what is in flight meets an update by chance."""
        return self.kind != "asynchronous RL"


MODES = (
    (Mode("fine-tuning", 1), Mode("RL", 2), Mode("asynchronous RL", 1), Mode("RL on a server", 2)),
    (Mode("fine-tuning", 2), Mode("RL", 1), Mode("asynchronous RL", 2), Mode("RL on a server", 1)),
)
"""What is broken at the same time, on one thread each."""


@dataclass(frozen=True)
class Fault:
    """What happens, and to which part."""

    what: str
    target: str = ""
    moment: str = ""
    """Empty for any moment between the start and the step before the last."""

    @property
    def kind(self) -> str:
        """Its name in the table."""
        return ", ".join(filter(None, (self.what, self.moment)))

    @property
    def killed(self) -> str:
        """Whom SIGKILL meets once user code has forked; reward workers are each rank's, and rank 0 dies for them."""
        return "rank 0" if self.target == "reward" else self.target

    def __str__(self) -> str:
        return f"{self.kind} {self.target}".strip()


def faults_of(mode: Mode) -> list[Fault]:
    """List everything that may happen to a run."""
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
    """Whether this process may become another user: root may, but not in a namespace that maps root alone."""
    num_ids = int(Path("/proc/self/uid_map").read_text().split()[2])
    return os.geteuid() == 0 and num_ids > NOBODY


def must_go_on(fault: Fault, mode: Mode) -> bool:
    """Whether the run must not end; nobody watches a single rank, or the launcher."""
    stops = fault.what in ("SIGSTOP", "loop")
    unwatched = fault.target == "launcher" or (fault.target == "rank 0" and mode.world_size == 1)
    return (stops and unwatched) or fault.what in LASTING


def may_go_on(fault: Fault) -> bool:
    """Whether the run may as well go on: one that needs no more memory does not notice that there is none."""
    return fault.what in ("out of memory", "full")


def cause(fault: Fault, mode: Mode) -> str:
    """Return a pattern of the error that names the fault; nobody is left to name the launcher's own end."""
    match fault.what, fault.target:
        case ("SIGKILL", "launcher"):
            return ""
        case ("fork", _):
            return f"{fault.killed} of {mode.world_size} was ended by SIGKILL"
        case (name, "launcher"):
            return f"the run was ended by {name}"
        case (name, "server"):
            return f"the server at .* {'said nothing' if name == 'SIGSTOP' else 'does not answer'}"
        case ("SIGSTOP", "sampler"):
            return "the sampler process .* said nothing"
        case ("SIGSTOP" | "loop", target) if target.startswith("rank"):
            return f"{target}( of 2 raised nothing and did not come|, which has not made progress)"
        case (name, "sampler") if name in SIGNALS:
            return f"the sampler process .* was ended by {name}"
        case (name, target) if name in SIGNALS:
            return f"{target} of {mode.world_size} was ended by {name}"
        case ("loop", target):
            return f"the {target} .*failed.*: no answer within {DEADLINE_S:g} s"
        case ("raise", target):
            return f"ArithmeticError: a fault in {target}"
        case ("out of memory", target):
            # Python itself may be out of memory, and say nothing of use; for a thread the kernel has other words. While
            # libraries are still loaded, nothing may come out: the dynamic loader ends a process with 127, and C++ with
            # SIGABRT.
            return (
                "raised Engine(Error|Died)"
                if target == "sampler"
                else "rank 0 of . raised .*(?i:memory|alloc|Resource temporarily unavailable|new thread)"
                "|rank 0 of . (ended with exit code 127|was ended by SIGABRT)"
            )
        case ("full disk", _):
            return "No space left on device.*/disk/run|/disk/run.*No space left on device"
        case ("read-only", _):
            return "Read-only file system: '.*/checkpoints"
        case (_, "checkpoint"):
            return "the checkpoint .* cannot be read .*has changed"
        case ("full", "/dev/shm"):
            # A server on this machine may fail first, and writes the reason to its own log alone.
            refused = "|the server refused .*EngineCore encountered an issue" if mode.has_server else ""
            return f"No space left on device|/dev/shm{refused}"
    raise ValueError(fault)


def limit_s(fault: Fault, mode: Mode, start_s: float) -> float:
    """Return when all processes must be gone; `start_s` is what the run still needs to its first step."""
    limit = MARGIN_S + start_s
    if fault.target == "checkpoint":
        return limit
    if fault.target == "server" and start_s:
        # It may still be on its way, for all that the run knows.
        limit += LOAD_S
    if fault.what in ("SIGSTOP", "loop"):
        limit += max(DEADLINE_S, COLLECTIVE_S)
        is_rank = fault.target.startswith("rank")
        if fault.what == "SIGSTOP":
            limit += AGENT_S if is_rank else LOAD_S * (start_s > 0)
    return limit
