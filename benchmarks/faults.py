"""Inject faults into runs, and record the outcome and leftovers of every fault. Run: python benchmarks/faults.py

Every run gets several faults at random moments, and is started again after each fault that ends it. At the end its
weights are compared, bit for bit, with the weights of an undisturbed run (not in asynchronous RL). All faults take
hours; an interrupted program, or one that `--minutes` ended, continues with the runs that are left. The program needs
Linux: in its own mount namespace, /dev/shm and the runs' folder are small file systems that faults can fill.
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
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from fault_kinds import (
    DEADLINE_S,
    FINAL,
    FORK,
    LOAD_S,
    MODES,
    PATIENCE,
    PAUSE,
    SIGNALS,
    STEP_S,
    Fault,
    Mode,
    cause,
    faults_of,
    limit_s,
    may_go_on,
    must_go_on,
)
from found import add_found, read_found
from report import ROOT, write_result
from stranger import visit

sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "sampling")]
from kit.open_ports import listening
from kit.watched_run import WatchedRun
from server_process import TOKEN, running_server

from vectorlm.train.checkpoint.folder import folder_of, steps_in, unfinished

RUN = str(Path(__file__).with_name("faulty_run.py"))
NAMESPACE = "VECTORLM_FAULTS"
"""Environment variable that marks the process with its own mounts."""
DISK_MIB, SHM_MIB = 256, 512
START_S, PAUSE_S = 180.0, 3.0
SPARE_BYTES = 1 << 20
SERVER = ("--dtype", "float32", "--max-model-len", "64", "--logprobs-mode", "processed_logprobs")
FAULTS_PER_RUN = 3
EARLY = 0.25
"""Probability that a fault happens while the processes start, for faults that may."""
STEPS, MAX_STALENESS = 14, 2
JUMP_S = 86_400
FILLER = "filler"


class Run(WatchedRun):
    """A run, and the state that it is expected to have."""

    resumes_from: int | None = None
    """The step that it must resume from; None if there is no checkpoint."""
    began: float
    fork: int | None = None
    """Pid of the process that user code has forked, which may outlive the run; None if there is none."""
    shared_at_end: set[str] | None = None
    """Names in /dev/shm after the run had ended but its fork had not; None for a run without a fork."""

    def processes(self) -> Iterator[tuple[int, str]]:
        """Yield pid and command line of all processes but a fork and Python's resource tracker, which waits for it."""
        for pid, command in super().processes():
            if self.fork is None or not (pid == self.fork or "resource_tracker" in command):
                yield pid, command


@dataclass
class Record:
    """A fault and its outcome."""

    kind: str
    world_size: int
    what: str
    target: str
    moment: str = ""
    outcome: str = ""
    """``ended``, ``went on``, or a list of complaints."""
    error: str = ""
    gone_s: float = 0.0
    """Seconds from the fault until the last process of the run was gone; 0 if the run went on."""
    left: dict[str, Any] = field(default_factory=dict)
    resumed: bool | None = None
    """Whether the run resumed and its final weights equal the undisturbed run's; None if they cannot be compared."""

    @property
    def is_good(self) -> bool:
        """Whether the outcome is allowed, nothing was left behind, and the final weights are not wrong."""
        return self.outcome in ("ended", "went on") and not self.left and self.resumed is not False


@dataclass(frozen=True)
class Reference:
    """The measurements of an undisturbed run."""

    digest: str
    first_step_s: float
    """Seconds from its start until its first step."""
    step_s: float


class Campaign:
    """The folders of one part's runs, their shared server, and the undisturbed runs to compare them with."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.disk, self.triggers = folder, folder / "disk", folder / "triggers"
        self.references: dict[Mode, Reference] = {}
        self.server = stack.enter_context(ExitStack())
        self.serving: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.forks: list[tuple[Run, Record]] = []
        """Runs whose forks still exist, and the records of these faults."""
        for new_folder in (self.disk, self.triggers, folder / "scratch", folder / "references"):
            new_folder.mkdir()
        mount("-t", "tmpfs", "-o", f"size={DISK_MIB}m", "none", self.disk)
        mount("-t", "tmpfs", "-o", f"size={SHM_MIB}m", "none", "/dev/shm")
        make = [sys.executable, str(ROOT / "examples/make_countdown.py"), "--output_dir", folder / "data"]
        sizes = ["--num_train", "896", "--num_eval", "16", "--num_questions", "4"]
        subprocess.run([*make, *sizes], check=True, stdout=subprocess.DEVNULL)

    def begin(self, mode: Mode, output: Path) -> Run:
        """Start a run, and the server if it needs one."""
        base = ROOT / "configs" / ("countdown_sft" if mode.kind == "fine-tuning" else "countdown_grpo")
        config = yaml.safe_load(base.with_suffix(".yaml").read_text())
        data, train = str(self.folder / "data"), config["train_parameters"]
        config["model"] = f"{data}/model"
        train |= {"output_dir": str(output), "checkpointing_enabled": True}
        engine, evaluation = config["engine"], config["evaluation"]
        engine |= {"timeout_s": DEADLINE_S, "start_timeout_s": LOAD_S}
        if mode.has_server:
            self.serve()
            own = {"timeout_s": DEADLINE_S, "start_timeout_s": LOAD_S}
            config["engine"] = {**own, "inference": "server", "url": self.url}
        if mode.kind == "fine-tuning":
            train |= {"epochs": 1, "logging_steps": 1, "save_frequency": 2 / STEPS}
            config["dataset"] |= {"train_ds": f"{data}/train", "eval_ds": f"{data}/eval", "eval_bs": 16}
            config["dataset"]["train_bs"] = 64 // mode.world_size
            evaluation |= {"prompts": f"{data}/eval.jsonl", "every": 4}
        else:
            # An evaluation samples one answer per held-out prompt, but these runs have an environment with turns.
            del config["evaluation"]
            config["rl"] |= {
                "algorithm": "grpo",
                "prompts": f"{data}/train.jsonl",
                "prompts_per_step": 8,
                "max_steps": STEPS,
                "save_every": 2,
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
        run = self.start([RUN, path, mode.world_size])
        run.resumes_from = max(steps_in(output / "checkpoints"), default=None)
        return run

    def serve(self) -> None:
        """Start the server that the runs share, unless it is running."""
        if self.serving is None or self.serving.poll() is not None:
            self.server.close()
            server = running_server(self.folder / "data/model", self.folder / "server.log", *SERVER)
            self.serving, self.url = self.server.enter_context(server)
            # The first answer takes longer than DEADLINE_S, because kernels are compiled.
            question = {"model": str(self.folder / "data/model"), "prompt": "1", "max_tokens": 8}
            headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
            request = urllib.request.Request(
                f"{self.url}/v1/completions", json.dumps(question).encode(), headers
            )
            urllib.request.urlopen(request, timeout=START_S).close()

    def trial(self, mode: Mode, faults: Sequence[Fault], chance: random.Random) -> list[Record]:
        """Start a run, inject the faults one by one, and start it again after every fault that ends it."""
        reference = self.reference(mode)
        output = self.disk / "run"
        records, run = [], None
        steps = sorted(chance.sample(range(2, STEPS - 3), len(faults)))
        for fault, planned in zip(faults, steps, strict=True):
            # An early second run could lock the folder before the first one does.
            may_be_early = (
                run is None
                and fault.target != "checkpoint"
                and fault.what not in ("second run", "fork")
                and not fault.moment
            )
            is_early = may_be_early and chance.random() < EARLY
            # The metrics of a resumed run contain its earlier steps.
            step = min(max(planned, last_step(output) + (run is None)), STEPS - 2)
            run = run or self.begin(mode, output)
            if not is_early:
                # The metrics also contain the steps of the run before.
                self.wait_for(run, partial(has_come_to, step, run, output), START_S)
            if fault.target == "checkpoint":
                self.wait_for(run, lambda: bool(checkpoints(output)), START_S)
            if fault.moment == FINAL:
                self.wait_for(run, lambda run=run: is_writing_model(run, output), START_S)
            # A run with few steps left may end soon after its first step.
            longest = 0.7 * reference.first_step_s if is_early else reference.step_s
            time.sleep(chance.random() * (2 * STEP_S if fault.moment == FINAL else longest))
            moment = fault.moment or ("starting" if is_early else f"step {last_step(output)}")
            record = Record(mode.kind, mode.world_size, fault.kind, fault.target, moment)
            records.append(record)
            start_s = reference.first_step_s if is_early or fault.target == "checkpoint" else 0.0
            run = self.befall(run, output, fault, mode, record, start_s)
        run = run or self.begin(mode, output)
        self.wait_for(run, lambda: False, START_S)
        if (
            ended(run)
            and run.process.returncode
            and records[-1].outcome == "went on"
            and may_go_on(faults[-1])
        ):
            # The run noticed the fault only after it had gone on.
            begin, last = time.monotonic(), records[-1]
            last.left, last.error = leftovers(run, PAUSE_S), message(run)
            last.gone_s = round(time.monotonic() - begin, 1)
            is_named = re.search(cause(faults[-1], mode), last.error, re.DOTALL)
            last.outcome = "ended" if is_named else "another error"
            kill(run)
            run = self.begin(mode, output)
            self.wait_for(run, lambda: False, START_S)
        oldest = max((row.get("staleness/token_max", 0) for row in rows_of(output)), default=0)
        is_over = run.process.returncode == 0 and last_step(output) == STEPS and oldest <= MAX_STALENESS
        has_resumed = is_over and says_where_it_resumes(run)
        left = leftovers(run, PAUSE_S)
        if found := [path.name for path in (*output.glob(".*"), *output.glob("checkpoints/.*"))]:
            left["files"] = found
        while self.forks:
            forked, record = self.forks.pop()
            assert forked.fork is not None
            send_signal(forked.fork, signal.SIGKILL)
            forked.fork = None
            # With its fork, the last user of the run's shared memory is gone.
            record.left |= leftovers(forked, PAUSE_S)
        for record in records:
            if not has_resumed:
                record.error += f" | at the end: {message(run) or 'it did not resume'}"
            if not has_resumed or mode.is_deterministic:
                record.resumed = has_resumed and digest_of(output) == reference.digest
            record.left |= left
        kill(run)
        shutil.rmtree(output)
        return records

    def befall(
        self, run: Run, output: Path, fault: Fault, mode: Mode, record: Record, start_s: float
    ) -> Run | None:
        """Inject a fault, write its outcome into `record`, and return the run if it continues, else None."""
        if ended(run):
            record.outcome, record.error = "over before the fault", message(run)
            return None
        complaints: list[str] = []
        if record.moment != "starting" and not says_where_it_resumes(run):
            complaints.append("did not resume")
        if fault.target == "checkpoint":
            kill(run)
            damage(output, fault.what)
            run = self.begin(mode, output)
        before, begin, limit = last_step(output), time.monotonic(), limit_s(fault, mode, start_s)

        def has_gone_on() -> bool:
            return last_step(output) >= min(before + 2, STEPS)

        try:
            with self.happening(run, output, fault, mode, record, complaints):
                if must_go_on(fault, mode):
                    self.wait_for(run, lambda: False, PAUSE_S)
                else:
                    self.wait_for(run, has_gone_on if may_go_on(fault) else lambda: False, limit)
                    if ended(run):
                        # Checked while the fault still lasts.
                        record.left = leftovers(run, begin + limit - time.monotonic())
                        record.gone_s = round(time.monotonic() - begin, 1)
                    elif not may_go_on(fault):
                        complaints.append(f"did not end within {limit:.0f} s")
        except ProcessLookupError as error:
            complaints.append(str(error))
        if must_go_on(fault, mode) or (may_go_on(fault) and not ended(run)):
            self.wait_for(run, has_gone_on, START_S)
            if not has_gone_on():
                complaints.append("did not go on")
            elif not complaints:
                record.outcome = "went on"
                return run
        record.error = message(run)
        if ended(run) and run.process.returncode == 0:
            complaints.append("ended as if nothing had happened")
        elif not (
            must_go_on(fault, mode)
            or re.search(cause(fault, mode), record.error, re.DOTALL)
            or ended_before_it_watched(run, fault, record)
        ):
            complaints.append("another error")
        if not self.has_whole_model(output, mode):
            complaints.append("left half of a model")
        record.outcome = ", ".join(complaints) or "ended"
        kill(run)
        if fault.target == "checkpoint":
            # The error tells the user to delete it.
            shutil.rmtree(checkpoints(output)[-1])
        return None

    @contextmanager
    def happening(
        self, run: Run, output: Path, fault: Fault, mode: Mode, record: Record, complaints: list[str]
    ) -> Iterator[None]:
        """Keep the fault in effect for the block, and append what goes wrong to `complaints`."""
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
                    undo.callback(subprocess.run, ["umount", "--lazy", folder], check=True)
                case ("second run", _):
                    # Without a pause, the first run would end before the second one checks the lock.
                    pause = self.triggers / PAUSE
                    pause.touch()
                    undo.callback(pause.unlink)
                    second = self.begin(mode, output)
                    self.require_refused(second, "is in use by another run", complaints)
                case (_, "clock"):
                    shift = self.triggers / "clock"
                    shift.write_text(str(JUMP_S if fault.what == "a day forward" else -JUMP_S))
                    undo.callback(shift.unlink)
                case ("fork", target):
                    note = self.triggers / FORK
                    (self.triggers / f"{target}.fork").touch()
                    self.wait_for(run, lambda: note.exists() and bool(note.read_text()), START_S)
                    if not note.exists():
                        raise ProcessLookupError(f"{target} has not forked")
                    fork = int(note.read_text())
                    undo.callback(note.unlink)
                    if target != "reward":
                        # A fork of a reward worker ends with the worker.
                        run.fork = fork
                        self.forks.append((run, record))
                        undo.callback(lambda: Path(f"/proc/{fork}").exists() or complaints.append("no fork"))
                    os.kill(self.pid_of(run, fault.killed), signal.SIGKILL)
                case ("stranger", _):
                    deadline = time.monotonic() + PAUSE_S
                    done: set[str] = set()
                    while not ended(run) and time.monotonic() < deadline:
                        ports = [port for _, port in listening(pid for pid, _ in run.processes())]
                        done |= {*visit([run.scratch, Path("/dev/shm")], ports)}
                    # Other users may read torch's cache of compiled kernels.
                    done = {deed for deed in done if not re.match("read .*/torchinductor_", deed)}
                    complaints += [f"a stranger {deed}" for deed in sorted(done)]
                case ("taken", "port"):
                    words = ["-m", "vectorlm", "serve", "--model", self.folder / "data/model"]
                    words += ["--port", self.url.rpartition(":")[2]]
                    other = self.start([*words, "--", *SERVER])
                    self.require_refused(other, "ddress already in use", complaints)
            yield
        if fault.target == "server":
            self.server.close()
            self.serving = None

    def require_refused(self, other: Run, cause: str, complaints: list[str]) -> None:
        """Append a complaint unless the second run or server ends with this error and leaves no process and no file."""
        self.wait_for(other, lambda: False, START_S)
        if cause not in other.error():
            complaints.append(f"the second one said {other.error()[-400:]!r}")
        # Its shared memory cannot be distinguished from the first one's.
        if found := leftovers(other, PAUSE_S).keys() - {"shared memory"}:
            complaints.append(f"the second one left {sorted(found)}")
        kill(other)

    def pid_of(self, run: Run, target: str) -> int:
        """Wait until the process of a run's part exists, and return its pid."""
        note = self.triggers / f"{target}.pid"

        def find() -> int | None:
            if target == "launcher":
                return run.process.pid
            for pid, command in run.processes():
                is_rank = note.exists() and int(note.read_text() or 0) == pid
                if is_rank or (target == "sampler" and "vectorlm.sampling.sampler.process" in command):
                    return pid
            return None

        if target == "server":
            assert self.serving is not None
            return self.serving.pid
        self.wait_for(run, lambda: find() is not None, START_S)
        pid = find()
        if pid is None:
            # Do not return 0 or -1: os.kill would signal many processes.
            raise ProcessLookupError(f"there is no {target} any more")
        return pid

    def has_whole_model(self, output: Path, mode: Mode) -> bool:
        """Return whether the final model, if it exists, has the same files as an undisturbed run's."""
        names = [
            {path.name for path in (folder / "final-model").glob("*")}
            for folder in (output, self.folder / "references" / str(mode))
        ]
        return not names[0] or names[0] == names[1]

    def reference(self, mode: Mode) -> Reference:
        """Return the undisturbed run of this mode; the first call runs it."""
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

    def start(self, command: Sequence[Any]) -> Run:
        """Start a command with its own folder for temporary files."""
        scratch = Path(tempfile.mkdtemp(dir=self.folder / "scratch"))
        # The permissions of /tmp.
        scratch.chmod(0o1777)
        run = Run([str(word) for word in command], scratch)
        run.began = time.time()
        return run

    def wait_for(self, run: Run, condition: Callable[[], bool], limit_s: float) -> None:
        """Wait until the condition holds, the run has ended or `limit_s` is over."""
        deadline = time.monotonic() + limit_s
        while not condition() and not ended(run) and time.monotonic() < deadline:
            time.sleep(0.01)


def ended(run: Run) -> bool:
    return run.process.poll() is not None


def ended_before_it_watched(run: Run, fault: Fault, record: Record) -> bool:
    """Return whether a signal hit the launcher during its imports, when it ends without a message."""
    is_launcher = fault.target == "launcher" and fault.what in SIGNALS and record.moment == "starting"
    return is_launcher and run.process.returncode == -signal.Signals[fault.what] and not record.error


def is_writing_model(run: Run, output: Path) -> bool:
    """Return whether the run is writing its final model; the folder of an earlier, killed run does not count."""
    work = unfinished(output / "final-model")
    with suppress(FileNotFoundError):
        return work.stat().st_mtime > run.began
    return False


def leftovers(run: Run, patience_s: float) -> dict[str, list[str]]:
    """Wait up to `patience_s` for the run's processes to end; return unexpected processes, memory and files by kind."""
    deadline = time.monotonic() + patience_s
    while list(run.processes()) and time.monotonic() < deadline:
        time.sleep(0.02)
    found = run.leftovers()
    # Python's tracker removes a killed rank's semaphores when its pipe is closed; a fork of the rank keeps it open.
    if run.fork is not None:
        run.shared_at_end, found["shared memory"] = set(os.listdir("/dev/shm")), []
    if run.shared_at_end is not None:
        # Later runs, which the campaign has killed, also leave shared memory.
        found["shared memory"] = [name for name in found["shared memory"] if name in run.shared_at_end]
    found["shared memory"] = [name for name in found["shared memory"] if name != FILLER]
    # torch keeps its cache of compiled kernels on purpose, one per user.
    found["temporary files"] = [
        name for name in found["temporary files"] if not name.startswith("torchinductor_")
    ]
    return {what: [without_places(name) for name in names] for what, names in found.items() if names}


def says_where_it_resumes(run: Run) -> bool:
    """Return whether the run has reported that it resumes from its checkpoint; True if there is no checkpoint."""
    step = run.resumes_from
    return step is None or re.search(f"(from|is finished at) step {step}", run.error()) is not None


def has_come_to(step: int, run: Run, output: Path) -> bool:
    """Return whether this run or the one before has reached the step, and this run has reported where it resumes."""
    return last_step(output) >= step and says_where_it_resumes(run)


def kill(run: Run) -> None:
    """Kill the remaining processes of a run, and delete its temporary files."""
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
    """Return the metrics of a run, without a line that is only partly written."""
    path = output / "metrics.jsonl"
    rows = path.read_text().splitlines() if path.exists() else []
    return [json.loads(row) for row in rows if row.endswith("}")]


def last_step(output: Path) -> int:
    """Return the last step in a run's metrics; -1 if there is none."""
    return max((row["step"] for row in rows_of(output)), default=-1)


def checkpoints(output: Path) -> list[Path]:
    """Return the checkpoints of a run, the newest last."""
    folder = output / "checkpoints"
    return [folder_of(folder, step) for step in steps_in(folder)]


def without_places(text: str) -> str:
    """Remove the folders of this machine from a text."""
    folders = [ROOT, *(Path(sysconfig.get_path(name)) for name in ("scripts", "stdlib", "purelib"))]
    # Python and torch print where a linked environment really is.
    for folder in [*folders, *(folder.resolve() for folder in folders)]:
        text = text.replace(f"{folder}/", "")
    return text


def message(run: Run) -> str:
    """Return the last error of a run, without tracebacks and the folders of this machine; empty if there is none."""
    text = without_places(run.error())
    for name in ("RankFailed", r"\w+Error"):
        if found := re.findall(rf"^{name}: .*?(?=^Traceback|\Z)", text, re.DOTALL | re.MULTILINE):
            return found[-1].strip()[:600]
    return ""


def digest_of(output: Path) -> str:
    """Return a digest of the run's final weights."""
    files = sorted((output / "final-model").glob("*.safetensors"))
    assert files, f"{output} has no final model"
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def damage(output: Path, what: str) -> None:
    """Damage the largest file of the newest checkpoint."""
    path = max(checkpoints(output)[-1].rglob("*.distcp"), key=lambda path: path.stat().st_size)
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
    """Fill the file system of `folder` for the block."""
    path = folder / FILLER
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
    """Restart this program in its own mount namespace, and mount an empty file system on `folder`."""
    if NAMESPACE not in os.environ:
        folder.mkdir(parents=True, exist_ok=True)
        rights = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        os.environ |= {
            NAMESPACE: "1",
            "FAULTS": str(folder / "triggers"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).with_name('shifted_clock')}",
            "VECTORLM_SERVER_TOKEN": TOKEN,
        }
        os.execvp("unshare", ["unshare", "--mount", *rights, sys.executable, *sys.argv])
    mount("-t", "tmpfs", "none", folder)
    # Programs that nohup or a shell starts may ignore these signals.
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def run_part(arguments: argparse.Namespace) -> None:
    """Inject the faults of this part, and print a JSON record for each."""
    folder = ROOT / "data" / "faults" / str(arguments.part)
    enter_namespace(folder)
    chance, begin = random.Random(f"{arguments.seed} {arguments.part}"), time.monotonic()
    trials = []
    for mode in MODES[arguments.part]:
        faults = [fault for fault in faults_of(mode) if re.search(arguments.only, f"{mode}: {fault}")]
        chance.shuffle(faults)
        late = [fault for fault in faults if fault.moment == FINAL]
        faults = [fault for fault in faults if fault not in late]
        # At most one fault per trial may let the run go on; it comes last, because the run may end meanwhile.
        lasting = [fault for fault in faults if must_go_on(fault, mode) or may_go_on(fault)]
        faults.sort(key=lasting.__contains__)
        num_trials = max(-(-len(faults) // FAULTS_PER_RUN), len(lasting))
        trials += [(mode, faults[first::num_trials]) for first in range(num_trials)]
        trials += [(mode, late)] * bool(late)
    chance.shuffle(trials)
    found_in = (
        ROOT / "runs" / "faults" / f"seed {arguments.seed}, patience {PATIENCE:g}, part {arguments.part}"
    )
    left = {f"{mode}: {', '.join(map(str, faults))}": (mode, faults) for mode, faults in trials}
    for run in read_found(found_in):
        if left.pop(run["run"], None):
            show(run["faults"])
    if not left:
        return
    with ExitStack() as stack:
        campaign = Campaign(folder, stack)
        for index, (name, (mode, faults)) in enumerate(left.items()):
            # The first trial always runs: on a busy machine the time may already be over.
            is_late = arguments.minutes is not None and time.monotonic() - begin > 60 * arguments.minutes
            if index and is_late:
                break
            trial = campaign.trial(mode, faults, random.Random(f"{arguments.seed} {name}"))
            records = [asdict(record) for record in trial]
            add_found(found_in, {"run": name, "faults": records})
            show(records)


def show(records: Sequence[dict[str, Any]]) -> None:
    """Print a JSON line for each record."""
    for record in records:
        print(json.dumps(record), flush=True)


def records_of(part: int) -> tuple[list[Record], int]:
    """Run a part, print its output, and return its records and its exit code."""
    command = [sys.executable, *sys.argv, "--part", str(part)]
    records = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            records.append(Record(**json.loads(line)))
    return records, process.returncode


def main() -> None:
    """Inject all faults into all kinds of runs, or as many as fit into the time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes", type=float, help="begin no other run after that; by default every fault happens once"
    )
    parser.add_argument("--only", default="", help="a pattern, as in: --only 'RL, 2 ranks: SIGKILL'")
    parser.add_argument("--save", action="store_true", help="write results/faults.json")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part is not None:
        run_part(arguments)
        return
    with ThreadPoolExecutor() as parts:
        found = list(parts.map(records_of, range(len(MODES))))
    records = [record for part, _ in found for record in part]
    bad = [record for record in records if not record.is_good]
    for record in bad:
        print(f"not as it should be: {json.dumps(asdict(record))}")
    print(f"{len(records)} faults, {len(bad)} of them not as they should be")
    is_whole = not any(code for _, code in found)
    if arguments.save and is_whole:
        write_result(
            "faults",
            {"seed": arguments.seed, "patience": PATIENCE},
            table(records),
            {"faults": [asdict(record) for record in records]},
        )
    sys.exit(bool(bad) or not records or not is_whole)


def table(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return a row for each kind of fault."""
    kinds: dict[str, list[Record]] = {}
    for record in records:
        kinds.setdefault(record.what, []).append(record)
    return [_row(kind, kinds[kind]) for kind in sorted(kinds, key=str.lower)]


def _row(kind: str, records: Sequence[Record]) -> dict[str, Any]:
    same = [record.resumed for record in records if record.resumed is not None]
    return {
        "fault": kind,
        "of": ", ".join(sorted({re.sub(r" \d", "", record.target) for record in records})),
        "times": len(records),
        "run ended": sum(record.outcome == "ended" for record in records),
        "went on": sum(record.outcome == "went on" for record in records),
        "otherwise": sum(record.outcome not in ("ended", "went on") for record in records),
        "seconds until all was gone, at most": max(record.gone_s for record in records),
        "left something behind": sum(bool(record.left) for record in records),
        "same weights at the end": f"{sum(same)} of {len(same)}",
    }


if __name__ == "__main__":
    main()
