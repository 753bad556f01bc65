"""The tables of the README and the pages, made from the result files. Run: python benchmarks/table.py

Each table says at which commit it was measured, and whether the code that it measures has changed since. Only this
program compares the commits, and it writes what it finds into the pages: the tests read pages and results alone, so
that they pass in a clone without history and do not fail because of the next commit.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"


@dataclass(frozen=True)
class Table:
    """Rows of a result as a page shows them."""

    result: str
    """The file, by its name."""
    title: str
    columns: tuple[str, ...] = ()
    """Those that are shown; all when empty."""


PAGES = {
    "docs/benchmarks.md": [
        Table(
            "hot_swap",
            "One hot swap of 142 MB, beside one memcpy of the same bytes (median of 25, taken in turn)",
        ),
        Table(
            "sampling",
            "Sampling with log-probabilities, prompts of 32 tokens (medians of 7, taken in turn)",
        ),
        Table(
            "broadcast",
            "512 completions of 256 tokens with log-probabilities given to two ranks (median of 9)",
        ),
        Table("startup", "From the import to the first token (medians, taken in turn)"),
        Table(
            "countdown",
            "Right answers to held-out Countdown questions, in percent: mean (range) of three seeds",
        ),
        Table(
            "rl_step",
            "A step of GRPO of 36 M parameters beside TRL with vLLM in its process (medians of six steps in three "
            "runs, taken in turn; [speed.md](speed.md))",
            ("", "prompt + completion", "s a step", "times as fast", "memory of an update, MB", "commit"),
        ),
        Table(
            "real",
            "Steps of SmolLM2-135M-Instruct in fp32 beside TRL's: GRPO with 64 completions of 24 tokens after chats of "
            "up to 72, and fine-tuning on eight texts of 24 to 256 tokens (medians of two runs, taken in turn)",
        ),
        Table(
            "faults",
            "Runs that were broken on purpose, by kind of fault ([reliability.md](reliability.md))",
        ),
    ],
    "docs/speed.md": [
        Table(
            "before_after",
            "Sampling, swaps and dynamic sampling of two commits, and bare vLLM (medians of three rounds, in turn)",
        ),
        Table(
            "sampling_parts",
            "Where sampling's time goes, with texts and log-probabilities (medians of three rounds)",
        ),
        Table("rl_step", "A step of GRPO: tokens, completions of a group and groups (medians of six steps)"),
        Table(
            "sft",
            "Fine-tuning on texts of a long tail of lengths, packed into rows of 1,024 tokens (medians of nine steps)",
        ),
    ],
    "docs/reference_and_teacher.md": [
        Table(
            "distill",
            "A Countdown student of 0.1 M parameters after as many tokens, from the same start: mean (range) of three "
            "seeds",
        ),
    ],
    "docs/truncated_sampling.md": [
        Table(
            "truncation",
            "Log-probabilities of the engine and of the trainer, which computes in float32",
        ),
    ],
    "docs/engines.md": [
        Table(
            "busy",
            "A GRPO step of 512 completions on 2 cores, alone and beside one process that computes all the time",
        )
    ],
    "docs/correction.md": [
        Table(
            "correction",
            "Points of held-out accuracy that 40 steps on Countdown gain: mean (range) of the seeds",
        )
    ],
    "docs/choosing.md": [
        Table("choosing", "Held-out accuracy by step, in percent, and the gain in points; one seed")
    ],
    "docs/async.md": [
        Table(
            "async",
            "Time of a step, and until the reward is there: mean (range) of the seeds",
            (
                "run",
                "lengths",
                "seeds",
                "s a step",
                "predicted",
                "times as fast",
                "steps to reward 0.25",
                "s to reward 0.25",
                "steps to reward 0.28",
                "s to reward 0.28",
                "reward at the end",
                "commit",
            ),
        ),
        Table(
            "async",
            "Age of what is trained on, and who waited, of the same runs",
            (
                "run",
                "lengths",
                "tokens, mean and longest",
                "lag",
                "by formula",
                "lag of a token, mean and most",
                "ESS",
                "stall, %",
                "engine idle, %",
                "trainer idle, %",
            ),
        ),
        Table(
            "staleness",
            "Points of held-out accuracy that 64 optimizer steps gain, and the KL divergence of the trained policy "
            "from its start in nats of a completion: mean (range) of the seeds",
        ),
    ],
    "docs/papers.md": [Table("papers", "Measured; seeds as mean (range)")],
    "docs/simulation.md": [
        Table(
            "simulate",
            "**Simulated, not measured**: a step of 128 prompts with 16 completions of Llama 3.1 8B on H100 GPUs",
        ),
    ],
    "docs/reliability.md": [
        Table("faults", "Runs that were broken on purpose, by kind of fault"),
        Table("soak", "Two long runs on two ranks, after a tenth of each and at its end"),
        Table("mutants", "Changes to the code, one at a time, and whether the tests notice"),
    ],
}
"""Which results each page shows."""

_SAMPLING = ("vectorlm/engine", "vectorlm/backends/vllm")
_TRAINING = ("vectorlm/train", "vectorlm/data")
_LEARNING = ("vectorlm/rl", "vectorlm/algorithms", "vectorlm/train")
MEASURED_CODE = {
    "async": (*_LEARNING, *_SAMPLING, "vectorlm/rollouts", "benchmarks/async.py"),
    "before_after": (*_SAMPLING, "vectorlm/weights", "benchmarks/before_after.py"),
    "broadcast": ("vectorlm/engine", "vectorlm/ranks", "benchmarks/broadcast.py"),
    "busy": (*_LEARNING, *_SAMPLING, "vectorlm/ranks", "benchmarks/busy.py"),
    "choosing": (*_LEARNING, "benchmarks/choosing.py"),
    "correction": (*_LEARNING, "benchmarks/correction.py"),
    "countdown": (*_LEARNING, "benchmarks/countdown.py"),
    "distill": (*_LEARNING, "benchmarks/distill.py"),
    "environments": ("vectorlm/rollouts", "vectorlm/workers", "benchmarks/environments.py"),
    "faults": ("vectorlm", "benchmarks/faults.py", "benchmarks/fault_kinds.py"),
    "gpu": ("vectorlm", "tests/gpu"),
    "hot_swap": (*_SAMPLING, "vectorlm/weights", "benchmarks/hot_swap.py"),
    "mutants": ("vectorlm", "tests", "benchmarks/mutants.py"),
    "papers": (*_LEARNING, "benchmarks/papers.py"),
    "real": (*_LEARNING, *_SAMPLING, "vectorlm/data", "benchmarks/real.py"),
    "rl_step": (*_LEARNING, *_SAMPLING, "benchmarks/rl_step.py"),
    "same_run": ("vectorlm", "benchmarks/same_run.py"),
    "sampling": (*_SAMPLING, "benchmarks/sampling.py"),
    "sampling_parts": (*_SAMPLING, "benchmarks/sampling_parts.py"),
    "sft": (*_TRAINING, "benchmarks/sft.py"),
    "simulate": ("vectorlm/rollouts", "benchmarks/simulate.py", "benchmarks/simulated.py"),
    "soak": ("vectorlm", "benchmarks/soak.py"),
    "staleness": (*_LEARNING, "benchmarks/staleness.py"),
    "startup": (*_SAMPLING, "benchmarks/startup.py"),
    "truncation": ("vectorlm/algorithms", "vectorlm/backends/vllm", "benchmarks/truncation.py"),
}
"""The files and folders of which each result says something."""


def with_tables(text: str, page: str, changed: Collection[str] | None = None) -> str:
    """Return the text of a page with its tables made again, each with its command, commit and date.

    `changed` names the results that are older than their code; without it each table keeps what the page says of it.
    """
    if changed is None:
        lines = text.splitlines()
        changed = [
            name
            for name in MEASURED_CODE
            if any(f"`{_command(name, page)}` at " in line and _mark(page) in line for line in lines)
        ]
    tables = (
        _headlines(changed)
        if page == "README.md"
        else "\n\n".join(_render(table, page, changed) for table in PAGES[page])
    )
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{tables}\n{END}", text, flags=re.DOTALL)


def results_older_than_their_code() -> list[str]:
    """Name the results whose code differs from the commit they were measured at, comments and docstrings aside."""
    return [name for name in MEASURED_CODE if _is_older_than_its_code(name)]


def _is_older_than_its_code(name: str) -> bool:
    result = _read(name)
    for commit in {row.get("commit", result["commit"]).split()[0] for row in result["rows"]}:
        differing = _git("diff", "--name-only", commit, "--", *MEASURED_CODE[name])
        # A commit that is not in the history cannot be compared: its code has been rewritten since.
        if differing is None or any(_code_differs(commit, path) for path in differing.splitlines()):
            return True
    return False


def _code_differs(commit: str, path: str) -> bool:
    old, new = _git("show", f"{commit}:{path}"), ROOT / path
    if old is None or not new.exists() or new.suffix != ".py":
        return True
    return _bare(old) != _bare(new.read_text())


def _bare(source: str) -> str:
    """Return code as a tree without comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = None
    return ast.dump(tree)


def _git(*arguments: str) -> str | None:
    """Return what git prints, or None if it fails."""
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT)
    return done.stdout.strip() if done.returncode == 0 else None


def _command(name: str, page: str) -> str:
    """Return what a page calls the program of a result."""
    return f"benchmarks/{name}.py" if page == "README.md" else _read(name)["command"]


def _mark(page: str) -> str:
    """Return what stands beside a result that is older than its code; the README explains its asterisk."""
    return "\\*" if page == "README.md" else "; the code has changed since"


def _origin(name: str, page: str, changed: Collection[str], commit: str | None = None) -> str:
    """Return which program measured a result, at which commit, on which day."""
    result = _read(name)
    mark = _mark(page) if name in changed else ""
    return f"`{_command(name, page)}` at {commit or result['commit']} ({result['date']}{mark})"


def _headlines(changed: Collection[str]) -> str:
    """Return the README's table: one number of each of seven benchmarks, and what it was measured beside."""
    lines = ["| on two CPU cores | vectorlm | beside it | measured by |", "| --- | ---: | ---: | --- |"]

    def add(what: str, ours: str, other: str, name: str, commit: str | None = None) -> None:
        lines.append(f"| {what} | {ours} | {other} | {_origin(name, 'README.md', changed, commit)} |")

    swap = {row["what"]: row["ms"] for row in _read("hot_swap")["rows"]}
    add(
        "new weights into the running engine, verified (142 MB)",
        f"{swap['packed, verified']:.0f} ms",
        f"restarting it: {swap['engine restart']:,.0f} ms",
        "hot_swap",
    )
    sampling = {
        (row["prompts x new tokens"], row["what"]): row["tokens/s"] for row in _read("sampling")["rows"]
    }
    add(
        "sampling, 64 prompts of 64 new tokens",
        f"{sampling['64 x 64 tokens', 'SamplingEngine.generate']:,} tokens/s",
        f"`vllm.LLM`: {sampling['64 x 64 tokens', 'vllm.LLM.generate']:,} tokens/s",
        "sampling",
    )
    real = _read("real")["rows"]
    for job, what in (
        ("GRPO", "a GRPO step of SmolLM2-135M, 64 completions of 24 tokens"),
        ("fine-tuning", "fine-tuning SmolLM2-135M on texts of 24 to 256 tokens"),
    ):
        ours, other = (
            next(row for row in real if row["job"] == job and row[""].startswith(who))
            for who in ("vectorlm, one rank", "TRL")
        )
        add(what, ours["speed"], f"TRL: {other['speed']}", "real")
    steps = {(row["prompt + completion"], row[""]): row for row in _read("rl_step")["rows"]}
    ours, other = (steps["128 + 64, 8 of 8", who] for who in ("vectorlm, one rank", "TRL, 8 rows a pass"))
    add(
        "a GRPO step of 36 M parameters, 64 completions of 128 + 64 tokens",
        f"{ours['s a step']} s a step",
        f"TRL: {other['s a step']} s a step",
        "rl_step",
        ours["commit"],
    )
    overlap = {row["run"]: row for row in _read("async")["rows"] if row["lengths"] == "long tail"}
    add(
        "a step with sampling in flight, tokens at most 2 versions old",
        f"{overlap['in flight, k = 2']['s a step'].split()[0]} s",
        f"taking turns: {overlap['taking turns on all, 1 rank']['s a step'].split()[0]} s",
        "async",
        overlap["in flight, k = 2"]["commit"],
    )
    faults = _read("faults")["rows"]
    total = sum(row["times"] for row in faults)
    survived = total - sum(row["otherwise"] for row in faults)
    add("runs broken on purpose that ended as promised", f"{survived} of {total}", "", "faults")
    return "\n".join(lines)


def _read(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def _render(table: Table, page: str, changed: Collection[str]) -> str:
    result = _read(table.result)
    columns = table.columns or tuple(result["rows"][0])
    lines = [columns, ("---", *["---:"] * (len(columns) - 1))]
    lines += [[str(row[column]) for column in columns] for row in result["rows"]]
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table.title}; {_origin(table.result, page, changed)}:\n\n{rows}"


if __name__ == "__main__":
    # A clone without history says nothing of old commits: the pages keep what they say.
    has_history = _git("rev-parse", "--is-shallow-repository") == "false"
    changed = results_older_than_their_code() if has_history else None
    for page in ("README.md", *PAGES):
        path = ROOT / page
        path.write_text(with_tables(path.read_text(), page, changed))
    print("older than their code:", ", ".join(changed) if changed is not None else "unknown, no history here")
