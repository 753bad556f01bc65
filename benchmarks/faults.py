"""Break runs on purpose, and write down what each fault did and left behind. Run: python benchmarks/faults.py

Every run is broken several times, at random moments, and started again each time; at the end its weights are compared,
bit for bit, with those of a run that nothing happened to. Mounts are made in a namespace of their own (Linux), where
/dev/shm and the folder of the runs are small file systems that can be filled.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from report import ROOT, write_result

sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "engine")]
from server_process import running_server
from watched_run import WatchedRun

RUN = str(Path(__file__).with_name("faulty_run.py"))
NAMESPACE = "VECTORLM_FAULTS"
"""Set in the process that has its own mounts."""
DISK_MIB, SHM_MIB = 256, 64
DEADLINE_S = 8.0
"""Longest silence of an engine, a reward or an environment."""
START_S, END_S, PAUSE_S = 120.0, 60.0, 3.0
SPARE_BYTES = 1 << 20
SERVER = ("--dtype", "float32", "--max-model-len", "64")
FAULTS_PER_RUN = 3
STEPS, MAX_STALENESS = 14, 2
JUMP_S = 86_400
SIGNALS = ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGHUP")


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

    def __str__(self) -> str:
        return f"{self.what} {self.target}".strip()


@dataclass
class Record:
    """One fault, and what became of the run."""

    kind: str
    world_size: int
    what: str
    target: str
    moment: str = ""
    outcome: str = ""
    """``ended``, ``went on``, or what was wrong."""
    error: str = ""
    gone_s: float = 0.0
    """From the fault until the last process of the run was gone; of a run that goes on 0."""
    left: dict[str, Any] = field(default_factory=dict)
    resumed: bool | None = None
    """Whether the weights at the end were those of a run without faults; None where they cannot be compared."""

    @property
    def is_good(self) -> bool:
        """Whether everything was as promised."""
        return self.outcome in ("ended", "went on") and not self.left and self.resumed is not False


def faults_of(mode: Mode) -> list[Fault]:
    """List everything that may happen to a run."""
    processes = ["launcher", "sampler", *mode.ranks, *["server"] * mode.has_server]
    code = [*mode.ranks, *([] if mode.kind == "fine-tuning" else ["reward", "environment"])]
    return [
        *(Fault(what, target) for what in SIGNALS for target in processes),
        *(Fault(what, target) for what in ("raise", "loop") for target in code),
        *(Fault("out of memory", target) for target in ("sampler", "rank 0")),
        *(Fault(what, "output") for what in ("full disk", "read-only", "second run")),
        *(Fault(what, "checkpoint") for what in ("torn", "truncated", "flipped byte")),
        Fault("full", "/dev/shm"),
        *(Fault(what, "clock") for what in ("a day forward", "a day back")),
        *[Fault("taken", "port")] * mode.has_server,
    ]


def cause(fault: Fault, mode: Mode) -> str | None:
    """Return the pattern of the error that names the fault; None where the run must go on."""
    ranks = mode.world_size
    match fault.what, fault.target:
        case ("SIGKILL", "launcher"):
            return ""
        case ("SIGSTOP", "launcher") | ("second run" | "a day forward" | "a day back" | "taken", _):
            return None
        case (name, "launcher"):
            return f"ended by {name}"
        case ("SIGSTOP", "sampler" | "server"):
            return "said nothing"
        case ("SIGSTOP" | "loop", target) if target.startswith("rank"):
            # Nobody watches a single rank.
            return f"{target} .*(stopped|did not)" if ranks > 1 else None
        case (name, "server") if name in SIGNALS:
            return "the server at .* does not answer"
        case (name, target) if name in SIGNALS:
            who = "the sampler process .*" if target == "sampler" else f"{target} of {ranks} "
            return f"{who}was ended by {name}"
        case ("loop", target):
            return f"{target}.*{DEADLINE_S:g} s"
        case ("raise", target):
            return f"ArithmeticError: a fault in {target}"
        case ("out of memory", _):
            return "(?i)memory|bad_alloc|allocate"
        case ("full disk", _):
            return "No space left on device"
        case ("read-only", _):
            return "Read-only file system"
        case (_, "checkpoint"):
            return "the checkpoint .* cannot be read"
        case ("full", "/dev/shm"):
            return "No space left on device|/dev/shm"
    raise ValueError(fault)


MAY_GO_ON = ("out of memory", "full")
"""A run that needs no more memory does not notice that there is none."""


@dataclass(frozen=True)
class Reference:
    """A run that nothing happened to."""

    digest: str
    first_step_s: float
    """From its start until its first step."""
    step_s: float


class Campaign:
    """The folders of the runs, the server that they share, and what runs without faults look like."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.disk, self.triggers = folder, folder / "disk", folder / "triggers"
        self.references: dict[Mode, Reference] = {}
        self.server = stack.enter_context(ExitStack())
        self.server_pid: int | None = None
        self.url = ""
        for each in (self.disk, self.triggers, folder / "scratch", folder / "references"):
            each.mkdir()
        mount("-t", "tmpfs", "-o", f"size={DISK_MIB}m", "none", self.disk)
        mount("-t", "tmpfs", "-o", f"size={SHM_MIB}m", "none", "/dev/shm")
        make = [sys.executable, str(ROOT / "examples/make_countdown.py"), "--output_dir", folder / "data"]
        sizes = ["--num_train", "896", "--num_eval", "16", "--num_questions", "4"]
        subprocess.run([*make, *sizes], check=True, stdout=subprocess.DEVNULL)

    def begin(self, mode: Mode, output: Path) -> WatchedRun:
        """Start a run, and the server if it needs one."""
        base = ROOT / "configs" / ("countdown_sft" if mode.kind == "fine-tuning" else "countdown_grpo")
        config = yaml.safe_load(base.with_suffix(".yaml").read_text())
        data, train = str(self.folder / "data"), config["train_parameters"]
        config["model"] = f"{data}/model"
        train |= {"output_dir": str(output), "checkpointing_enabled": True}
        train["sampler"] |= {"prompts": f"{data}/eval.jsonl", "sample_frequency": 4, "timeout_s": DEADLINE_S}
        if mode.has_server:
            self.serve()
            train["sampler"] |= {"inference": "server", "engine": {"url": self.url}}
            del train["sampler"]["vllm_dtype"]
        if mode.kind == "fine-tuning":
            train |= {"epochs": 1, "logging_steps": 1, "save_frequency": 2 / STEPS}
            config["dataset"] |= {"train_ds": f"{data}/train", "eval_ds": f"{data}/eval", "eval_bs": 16}
            config["dataset"]["train_bs"] = 64 // mode.world_size
        else:
            config["rl"] |= {
                "prompts": f"{data}/train.jsonl",
                "prompts_per_step": 8,
                "max_steps": STEPS,
                "save_every": 2,
                "dynamic_sampling": False,
                "rewards": {f"{RUN}:reward": 1.0},
                "reward_timeout_s": DEADLINE_S,
                "environment": f"{RUN}:Environment",
                "environment_timeout_s": DEADLINE_S,
                "max_turns": 2,
            }
            del config["rl"]["max_sampling_rounds"]
        if mode.kind == "asynchronous RL":
            config["rl"]["async"] = {"max_staleness": MAX_STALENESS, "update": "keep"}
        path = output.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(config))
        return self.start([RUN, path, mode.world_size])

    def serve(self) -> None:
        """Start the server that all runs on a server share, unless it is there."""
        if self.server_pid is None:
            server = running_server(self.folder / "data/model", self.folder / "server.log", *SERVER)
            process, self.url = self.server.enter_context(server)
            self.server_pid = process.pid

    def trial(self, mode: Mode, faults: Sequence[Fault], chance: random.Random) -> list[Record]:
        """Run once, let every fault happen in turn, and start again after each that ends the run."""
        reference = self.reference(mode)
        output = self.disk / "run"
        records, run = [], None
        steps = sorted(chance.sample(range(2, STEPS - 3), len(faults)))
        for fault, step in zip(faults, steps, strict=True):
            run = run or self.begin(mode, output)
            is_early = chance.random() < 0.25 and fault.target != "checkpoint" and last_step(output) < 0
            record = Record(mode.kind, mode.world_size, fault.what, fault.target)
            record.moment = "starting" if is_early else f"step {step}"
            records.append(record)
            if not is_early:
                self.wait_for(run, lambda step=step: last_step(output) >= step, START_S)
            time.sleep(chance.random() * (reference.first_step_s if is_early else reference.step_s))
            run = self.befall(run, output, fault, mode, record)
        run = run or self.begin(mode, output)
        self.wait_for(run, lambda: False, START_S)
        oldest = max((row.get("staleness/token_max", 0) for row in rows_of(output)), default=0)
        is_over = run.process.returncode == 0 and last_step(output) == STEPS and oldest <= MAX_STALENESS
        files = [path.name for path in (output / "checkpoints").glob(".*")]
        for record in records:
            if not is_over:
                record.error += f" | at the end: {last_line(run.error())}"
            if not is_over or mode.is_deterministic:
                record.resumed = is_over and digest_of(output) == reference.digest
            if files:
                record.left["files"] = files
        kill(run)
        shutil.rmtree(output)
        return records

    def befall(
        self, run: WatchedRun, output: Path, fault: Fault, mode: Mode, record: Record
    ) -> WatchedRun | None:
        """Let a fault happen, note what becomes of the run, and return it if it goes on."""
        if ended(run):
            record.outcome, record.error = "over before the fault", last_line(run.error())
            return None
        expected = cause(fault, mode)
        if fault.target == "checkpoint":
            kill(run)
            damage(output, fault.what)
            run = self.begin(mode, output)
        before, begin = last_step(output), time.monotonic()

        def has_gone_on() -> bool:
            return last_step(output) >= min(before + 2, STEPS)

        with self.happening(run, output, fault, mode) as complaints:
            if expected is None:
                self.wait_for(run, lambda: False, PAUSE_S)
            else:
                may_go_on = fault.what in MAY_GO_ON
                self.wait_for(run, has_gone_on if may_go_on else lambda: False, END_S)
                if not may_go_on and not ended(run):
                    complaints.append("did not end")
        if complaints:
            kill(run)
        elif expected is None or not ended(run):
            self.wait_for(run, has_gone_on, START_S)
            if not ended(run) or run.process.returncode == 0:
                record.outcome = "went on"
                return run
        while list(run.processes()) and time.monotonic() < begin + END_S:
            time.sleep(0.02)
        record.gone_s = round(time.monotonic() - begin, 1)
        record.error = last_line(run.error())
        record.left = {what: found for what, found in run.leftovers().items() if found}
        if run.process.returncode == 0:
            complaints.append("ended as if nothing had happened")
        elif expected is None:
            complaints.append("should have gone on")
        elif not re.search(expected, run.error()):
            complaints.append("another error")
        record.outcome = ", ".join(complaints) or "ended"
        kill(run)
        if fault.target == "checkpoint":
            # As the error says.
            shutil.rmtree(max((output / "checkpoints").glob("step-*")))
        return None

    @contextmanager
    def happening(self, run: WatchedRun, output: Path, fault: Fault, mode: Mode) -> Iterator[list[str]]:
        """Let a fault happen for the block; yields what is wrong, which nothing is at first."""
        complaints: list[str] = []
        with ExitStack() as undo:
            match fault.what, fault.target:
                case (name, target) if name in SIGNALS:
                    pid = self.pid_of(run, target)
                    os.kill(pid, signal.Signals[name])
                    undo.callback(send_signal, pid, signal.SIGCONT)
                case ("raise" | "loop", target):
                    trigger = self.triggers / f"{target}.{fault.what}"
                    trigger.touch()
                    undo.callback(trigger.unlink)
                case ("out of memory", target):
                    pid = self.pid_of(run, target)
                    used = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
                    limit_memory(pid, used + SPARE_BYTES)
                    undo.callback(limit_memory, pid, resource.RLIM_INFINITY)
                case ("full disk", _):
                    undo.enter_context(filled(self.disk))
                case ("full", shm):
                    undo.enter_context(filled(Path(shm)))
                case ("read-only", _):
                    folder = output / "checkpoints"
                    folder.mkdir(parents=True, exist_ok=True)
                    mount("--bind", "-o", "ro", folder, folder)
                    undo.callback(subprocess.run, ["umount", folder], check=True)
                case ("second run", _):
                    second = self.begin(mode, output)
                    self.wait_for(second, lambda: False, END_S)
                    if "another run writes to" not in second.error():
                        complaints.append(f"the second run said {last_line(second.error())!r}")
                    kill(second)
                case (_, "clock"):
                    shift = self.triggers / "clock"
                    shift.write_text(str(JUMP_S if fault.what == "a day forward" else -JUMP_S))
                    undo.callback(shift.unlink)
                case ("taken", "port"):
                    words = ["-m", "vectorlm", "serve", "--model", self.folder / "data/model"]
                    words += ["--port", self.url.rpartition(":")[2]]
                    other = self.start([*words, "--", *SERVER])
                    self.wait_for(other, lambda: False, END_S)
                    if "address already in use" not in other.error():
                        complaints.append(f"the second server said {last_line(other.error())!r}")
                    kill(other)
            yield complaints
        if fault.target == "server":
            self.server.close()
            self.server_pid = None

    def pid_of(self, run: WatchedRun, target: str) -> int:
        """Return the process of a run's part, once there is one."""
        note = self.triggers / f"{target}.pid"

        def find() -> int | None:
            if target == "launcher":
                return run.process.pid
            for pid, command in run.processes():
                is_rank = note.exists() and int(note.read_text() or 0) == pid
                if is_rank or (target == "sampler" and "vectorlm.engine.process" in command):
                    return pid
            return None

        if target == "server":
            assert self.server_pid is not None
            return self.server_pid
        self.wait_for(run, lambda: find() is not None, START_S)
        return find() or -1

    def reference(self, mode: Mode) -> Reference:
        """Run without a fault, once."""
        if mode not in self.references:
            output = self.folder / "references" / str(mode)
            if mode.has_server:
                self.serve()
            begin, run = time.monotonic(), self.begin(mode, output)
            self.wait_for(run, lambda: last_step(output) >= 1, START_S)
            first_step_s = time.monotonic() - begin
            self.wait_for(run, lambda: last_step(output) >= STEPS, START_S)
            step_s = (time.monotonic() - begin - first_step_s) / (STEPS - 1)
            self.wait_for(run, lambda: False, START_S)
            if run.process.returncode != 0:
                sys.exit(f"{mode}: a run without a fault ended at step {last_step(output)}: {run.error()}")
            self.references[mode] = Reference(digest_of(output), first_step_s, step_s)
        return self.references[mode]

    def start(self, command: Sequence[Any]) -> WatchedRun:
        """Start a command with a folder for temporary files of its own."""
        scratch = tempfile.mkdtemp(dir=self.folder / "scratch")
        return WatchedRun([str(word) for word in command], Path(scratch))

    def wait_for(self, run: WatchedRun, condition: Callable[[], bool], limit_s: float) -> None:
        """Wait until the condition holds, the run has ended or the time is over."""
        deadline = time.monotonic() + limit_s
        while not condition() and not ended(run) and time.monotonic() < deadline:
            time.sleep(0.01)


def ended(run: WatchedRun) -> bool:
    return run.process.poll() is not None


def kill(run: WatchedRun) -> None:
    """End what is left of a run, without ceremony."""
    while processes := list(run.processes()):
        for pid, _ in processes:
            send_signal(pid, signal.SIGKILL)
        run.process.poll()
        time.sleep(0.05)
    for path in run.scratch.iterdir():
        shutil.rmtree(path, ignore_errors=True)


def send_signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def rows_of(output: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run, but for a line that is being written."""
    path = output / "metrics.jsonl"
    rows = path.read_text().splitlines() if path.exists() else []
    return [json.loads(row) for row in rows if row.endswith("}")]


def last_step(output: Path) -> int:
    """Return the last step in a run's metrics; -1 where there is none."""
    return max((row["step"] for row in rows_of(output)), default=-1)


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if "Error" in line or "ended by" in line or "Died" in line]
    return (lines or text.splitlines() or [""])[0][:400]


def digest_of(output: Path) -> str:
    """Return a digest of the weights that a run has left."""
    files = sorted((output / "final-model").glob("*.safetensors"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def damage(output: Path, what: str) -> None:
    """Spoil a file of the newest checkpoint."""
    newest = max((output / "checkpoints").glob("step-*"))
    path = max(newest.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    if what == "torn":
        content[middle:] = bytes(len(content) - middle)
    elif what == "truncated":
        del content[middle:]
    else:
        content[middle] ^= 1
    path.write_bytes(content)


def limit_memory(pid: int, limit: int) -> None:
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


@contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Leave no byte free in the file system of `folder` for the block."""
    path = folder / "filler"
    try:
        with path.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass
        yield
    finally:
        path.unlink()


def mount(*words: Any) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)


def enter_namespace(folder: Path) -> None:
    """Go on in a namespace of mounts of its own, where `folder` is empty."""
    if NAMESPACE not in os.environ:
        folder.mkdir(parents=True, exist_ok=True)
        rights = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        os.environ |= {
            NAMESPACE: "1",
            "FAULTS": str(folder / "triggers"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).with_name('shifted_clock')}",
            "VECTORLM_SERVER_TOKEN": uuid.uuid4().hex,
        }
        os.execvp("unshare", ["unshare", "--mount", *rights, sys.executable, *sys.argv])
    mount("-t", "tmpfs", "none", folder)


def run_part(arguments: argparse.Namespace) -> None:
    """Break the runs of this part, and print a record in JSON for every fault."""
    folder = ROOT / "data" / "faults" / str(arguments.part)
    enter_namespace(folder)
    chance, begin = random.Random(f"{arguments.seed} {arguments.part}"), time.monotonic()
    trials = []
    for mode in MODES[arguments.part]:
        faults = [fault for fault in faults_of(mode) if re.search(arguments.only, f"{mode}: {fault}")]
        chance.shuffle(faults)
        trials += [(mode, faults[i : i + FAULTS_PER_RUN]) for i in range(0, len(faults), FAULTS_PER_RUN)]
    chance.shuffle(trials)
    with ExitStack() as stack:
        campaign = Campaign(folder, stack)
        for mode, faults in trials:
            if arguments.minutes is not None and time.monotonic() - begin > 60 * arguments.minutes:
                break
            for record in campaign.trial(mode, faults, chance):
                print(json.dumps(asdict(record)), flush=True)


def records_of(part: int) -> list[Record]:
    """Start a part, show what it prints, and return its records."""
    command = [sys.executable, *sys.argv, "--part", str(part)]
    records = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            records.append(Record(**json.loads(line)))
    if process.returncode != 0:
        sys.exit(f"part {part} failed: see above")
    return records


def main() -> None:
    """Go through all faults of all kinds of runs, or as many as fit into the time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes", type=float, help="begin no run after that; by default every fault happens once"
    )
    parser.add_argument("--only", default="", help="a pattern, as in: --only 'RL, 2 ranks: SIGKILL'")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part is not None:
        run_part(arguments)
        return
    with ThreadPoolExecutor() as parts:
        records = [record for found in parts.map(records_of, range(len(MODES))) for record in found]
    bad = [record for record in records if not record.is_good]
    for record in bad:
        print(f"not as it should be: {json.dumps(asdict(record))}")
    print(f"{len(records)} faults, {len(bad)} of them not as they should be")
    if not arguments.only and arguments.minutes is None:
        write_result(
            "faults", {"seed": arguments.seed}, table(records), {"faults": [asdict(each) for each in records]}
        )
    sys.exit(bool(bad))


def same(records: Sequence[Record]) -> int:
    return sum(record.resumed is True for record in records)


def table(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return a row for each kind of fault."""
    kinds: dict[str, list[Record]] = {}
    for record in records:
        part = re.sub(r" \d", "", record.target)
        kinds.setdefault(f"{record.what}, {part}".removesuffix(", "), []).append(record)
    return [
        {
            "fault": kind,
            "times": len(each),
            "run ended": sum(record.outcome == "ended" for record in each),
            "went on": sum(record.outcome == "went on" for record in each),
            "otherwise": sum(record.outcome not in ("ended", "went on") for record in each),
            "seconds until all was gone, at most": max(record.gone_s for record in each),
            "left something behind": sum(bool(record.left) for record in each),
            "same weights at the end": f"{same(each)} of {sum(record.resumed is not None for record in each)}",
        }
        for kind, each in sorted(kinds.items())
    ]


if __name__ == "__main__":
    main()
