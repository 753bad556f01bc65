"""Write the tables of the README and the docs from the result files. Run: python benchmarks/table.py

A page names the results it shows: `<!-- benchmarks: begin NAME -->`. Each table gives the commit of its measurement,
and notes whether the measured code has changed since. Only this program compares commits and writes these notes. The
tests read only pages and results: they pass in a clone without history, and the next commit does not break them.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).parent.parent
REGION = re.compile(r"(<!-- benchmarks: begin ?(\w*) -->\n).*?(<!-- benchmarks: end -->)", re.DOTALL)
"""A region that this program writes: the tables of the named result, or the README's table if there is no name."""


@dataclass(frozen=True)
class Table:
    """A table on a page, with rows of a result."""

    title: str
    columns: tuple[str, ...] = ()
    """Columns that the page shows; empty for all."""
    leave_out: str = ""
    """A regular expression; rows with a matching cell are not shown. Empty shows all."""
    words: Mapping[str, str] = field(default_factory=dict)
    """What the page shows for some cells that are names in the result."""
    spread: bool = False
    """Pivot a table of three columns: values of the second become columns, and values of the third become cells."""


@dataclass(frozen=True)
class Result:
    """A file in benchmarks/results."""

    code: tuple[str, ...]
    """Files and folders whose code is measured."""
    tables: tuple[Table, ...] = ()


# No benchmark runs the files that `vectorlm new` copies.
_PACKAGE = ("vectorlm", ":!vectorlm/cli/project")
_SAMPLING = ("vectorlm/sampling",)
_LEARNING = ("vectorlm/rl", "vectorlm/algorithms", "vectorlm/train")
_SYNCHRONOUS = {"taking turns on all, 1 rank": "synchronous, 1 rank"}
RESULTS = {
    "async": Result(
        code=(*_LEARNING, *_SAMPLING, "benchmarks/async.py"),
        tables=(
            Table(
                "Synchronous and asynchronous steps: one seed, or the mean (range) of three",
                (
                    "run",
                    "lengths",
                    "s a step",
                    "times as fast",
                    "s to reward 0.28",
                    "ESS",
                    "engine idle, %",
                    "trainer idle, %",
                ),
                leave_out="split|2 ranks",
                words={
                    **_SYNCHRONOUS,
                    "long tail": "most short, some long",
                    "equal, every group": "equal, every group kept",
                },
            ),
        ),
    ),
    "broadcast": Result(
        code=("vectorlm/sampling", "vectorlm/ranks", "benchmarks/broadcast.py"),
        tables=(
            Table(
                "512 completions of 256 tokens with log-probabilities given to two ranks (median of 9)",
            ),
        ),
    ),
    "busy": Result(
        code=(*_LEARNING, *_SAMPLING, "vectorlm/ranks", "benchmarks/busy.py"),
        tables=(
            Table(
                "A GRPO step of 512 completions on two cores, alone and beside one busy process",
                ("threads wait", "machine", "step (s)", "beside libgomp's own, quiet"),
            ),
        ),
    ),
    "choosing": Result(
        code=(*_LEARNING, "benchmarks/choosing.py"),
        tables=(
            Table(
                "Held-out accuracy by step, in percent, and the gain in points: mean (range) of three seeds",
            ),
        ),
    ),
    "correction": Result(
        code=(*_LEARNING, "benchmarks/correction.py"),
        tables=(
            Table(
                "Gain in held-out accuracy after 40 steps, in points: mean (range) of three seeds",
                ("engine", "correction", "gain, points"),
                spread=True,
            ),
        ),
    ),
    "countdown": Result(
        code=(*_LEARNING, "benchmarks/countdown.py"),
        tables=(
            Table(
                "Accuracy on held-out Countdown questions: mean (range) of three seeds, from 36.9 % before",
                ("algorithm", "after, %", "gain, points", "commit"),
            ),
        ),
    ),
    "distill": Result(
        code=(*_LEARNING, "benchmarks/distill.py"),
        tables=(
            Table(
                "A Countdown student of 0.1 M parameters after equally many tokens: mean (range) of three seeds",
                (
                    "learning from",
                    "gain, points",
                    "KL(student, teacher) at the end",
                ),
            ),
        ),
    ),
    "environments": Result(
        code=("vectorlm/rl", "vectorlm/ranks/workers", "benchmarks/environments.py"),
    ),
    "faults": Result(
        code=(*_PACKAGE, "benchmarks/faults.py", "benchmarks/fault_kinds.py"),
    ),
    "gpu": Result(
        code=(*_PACKAGE, "benchmarks/gpu"),
    ),
    "hot_swap": Result(
        code=(*_SAMPLING, "benchmarks/hot_swap.py"),
        tables=(
            Table(
                "A weight update of 142 MB, and a memcpy of the same bytes (medians of 25, interleaved)",
                ("what", "ms", "pull (ms)", "bucketed (ms)"),
                leave_out="ranks hold all|caller waits",
            ),
        ),
    ),
    "learned_reward": Result(
        code=(*_LEARNING, "benchmarks/learned_reward.py", "benchmarks/near_reward.py"),
    ),
    "mutants": Result(
        code=("vectorlm", "tests", "benchmarks/mutants.py"),
    ),
    "optimizers": Result(
        code=("vectorlm/train", "benchmarks/optimizers.py"),
        tables=(
            Table(
                "A Countdown model of 0.1 M parameters after 256 steps of fine-tuning: mean (range) of three seeds",
                ("optimizer", "learning rate", "held-out loss", "right answers, %"),
            ),
        ),
    ),
    "papers": Result(
        code=(*_LEARNING, "benchmarks/papers.py"),
        tables=(
            Table(
                "Measured; seeds as mean (range)",
                ("run", "seeds", "measured", "commit"),
                words={**_SYNCHRONOUS, "one step off": "asynchronous, one step off"},
            ),
        ),
    ),
    "preferences": Result(
        code=("vectorlm/train", "vectorlm/data", "benchmarks/preferences.py"),
        tables=(
            Table(
                "A reward model and DPO of a 36 M Llama on eight pairs of 144 to 320 tokens a step, beside TRL's "
                "trainers (medians of two runs, interleaved)",
                ("job", "", "pairs per second", "times as fast"),
            ),
        ),
    ),
    "real": Result(
        code=(*_LEARNING, *_SAMPLING, "vectorlm/data", "benchmarks/real.py"),
        tables=(
            Table(
                "Steps of SmolLM2-135M-Instruct in fp32 beside TRL's: GRPO with 64 completions of 24 "
                "tokens after prompts of up to 72, and fine-tuning on eight texts of 24 to 256 tokens "
                "(medians of four runs, interleaved; the last row is one step)",
                ("job", "", "speed", "times as fast", "most memory of a process, GB"),
            ),
        ),
    ),
    "rl_step": Result(
        code=(*_LEARNING, *_SAMPLING, "benchmarks/rl_step.py"),
        tables=(
            Table(
                "A GRPO step; a group has the completions of one prompt (medians of four steps)",
                (
                    "",
                    "prompt + completion, tokens",
                    "s a step",
                    "sampling, s",
                    "update, s",
                    "times as fast",
                    "memory of an update, MB",
                ),
            ),
        ),
    ),
    "same_run": Result(
        code=(*_PACKAGE, "benchmarks/same_run.py"),
    ),
    "sampling": Result(
        code=(*_SAMPLING, "benchmarks/sampling.py"),
        tables=(
            Table(
                "Sampling with log-probabilities, prompts of 32 tokens (medians of 7, interleaved)",
                ("prompts x new tokens", "what", "tokens/s"),
                leave_out="SamplingEngine.generate",
            ),
        ),
    ),
    "sft": Result(
        code=("vectorlm/train", "vectorlm/data", "benchmarks/sft.py"),
        tables=(
            Table(
                "Fine-tuning on texts of 16 to 1,024 tokens, packed into rows of 1,024 tokens "
                "(medians of two runs, interleaved)",
                ("", "tokens per second", "times as fast", "peak memory of a process, MB"),
            ),
        ),
    ),
    "simulate": Result(
        code=("vectorlm/rl/rollouts", "benchmarks/simulate.py", "benchmarks/simulated.py"),
        tables=(
            Table(
                "**Simulated, not measured**: a step of 128 prompts with 16 completions of Llama 3.1 8B "
                "on H100 GPUs",
            ),
        ),
    ),
    "soak": Result(
        code=(*_PACKAGE, "benchmarks/soak.py"),
    ),
    "staleness": Result(
        code=(*_LEARNING, "benchmarks/staleness.py"),
        tables=(
            Table(
                "Gain in held-out accuracy after 64 optimizer steps, in points: mean (range) of the seeds",
                ("algorithm", "N = 1", "N = 4", "N = 8", "N = 16", "N = 32"),
            ),
        ),
    ),
    "startup": Result(
        code=(*_SAMPLING, "benchmarks/startup.py"),
        tables=(
            Table(
                "Start, from the import to the first token (medians, interleaved)",
                ("what", "s"),
                leave_out="load and shard|overlapping",
            ),
        ),
    ),
    "truncation": Result(
        code=("vectorlm/algorithms", "vectorlm/sampling/backends/vllm", "benchmarks/truncation.py"),
        tables=(
            Table(
                "Gap between the log-probabilities of the engine and of a trainer in float32",
                ("engine", "cut by", "gap, mean", "gap, largest", "gap over all tokens, mean", "largest"),
                leave_out="top_k|min_p",
            ),
        ),
    ),
}
"""All files in benchmarks/results, with the measured code and the tables that pages show."""


def with_tables(text: str, page: str, changed: Collection[str] | None = None) -> str:
    """Return the text of a page with its tables rewritten, each with its command, commit and date.

    `changed` names the results that are older than their code; None keeps the notes on the page.
    """
    if changed is None:
        marked = [line for line in text.splitlines() if _mark(page) in line]
        changed = [
            name for name in RESULTS if any(f"`{_command(name, page)}` at " in line for line in marked)
        ]

    def tables(match: re.Match[str]) -> str:
        name = match[2]
        made = (
            [_render(name, table, page, changed) for table in RESULTS[name].tables]
            if name
            else [_headlines(changed)]
        )
        return match[1] + "\n\n".join(made) + "\n" + match[3]

    return REGION.sub(tables, text)


def pages_with_tables() -> list[str]:
    """Return the names of the pages that show results."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(page.relative_to(ROOT)) for page in pages if REGION.search(page.read_text())]


def results_older_than_their_code() -> list[str]:
    """Return the names of results whose compiled code has changed since the commit of their measurement."""
    return [name for name in RESULTS if _is_older_than_its_code(name)]


def _is_older_than_its_code(name: str) -> bool:
    result = _read(name)
    for commit in {row.get("commit", result["commit"]).split()[0] for row in result["rows"]}:
        differing = _git("diff", "--name-only", commit, "--", *RESULTS[name].code)
        # A commit that is not in the history cannot be compared, and counts as changed.
        if differing is None or any(_code_differs(commit, path) for path in differing.splitlines()):
            return True
    return False


def _code_differs(commit: str, path: str) -> bool:
    old, new = _git("show", f"{commit}:{path}"), ROOT / path
    if old is None or not new.exists() or new.suffix != ".py":
        return True
    return _instructions(old) != _instructions(new.read_text())


def _instructions(source: str) -> object:
    """Return compiled code, which has neither comments, docstrings nor names of local variables."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""  # still a docstring, the only statement that may precede __future__

    def parts(code: CodeType) -> object:
        constants = [parts(part) if isinstance(part, CodeType) else repr(part) for part in code.co_consts]
        return code.co_name, code.co_code, code.co_names, constants

    return parts(compile(tree, "", "exec", dont_inherit=True))


def _git(*arguments: str) -> str | None:
    """Return the output of git, or None if it fails."""
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT)
    return done.stdout.strip() if done.returncode == 0 else None


def _command(name: str, page: str) -> str:
    """Return the command of a result, as the page shows it."""
    return f"benchmarks/{name}.py" if page == "README.md" else _read(name)["command"]


def _mark(page: str) -> str:
    """Return the note on a result that is older than its code; in the README one sentence covers all rows."""
    return "" if page == "README.md" else "; the code has changed since"


def _origin(name: str, page: str, changed: Collection[str], commit: str | None = None) -> str:
    """Return the command, commit and date of a result, as the page shows them."""
    result = _read(name)
    mark = _mark(page) if name in changed else ""
    return f"`{_command(name, page)}` at {commit or result['commit']} ({result['date']}{mark})"


def _headlines(changed: Collection[str]) -> str:
    """Return the README's table: one or two numbers from each of five benchmarks, with their baselines."""
    lines = ["| on two CPU cores | vectorlm | baseline | measured by |", "| --- | ---: | ---: | --- |"]

    def add(what: str, ours: str, other: str, name: str, commit: str | None = None) -> None:
        lines.append(f"| {what} | {ours} | {other} | {_origin(name, 'README.md', changed, commit)} |")

    swap = {row["what"]: row["ms"] for row in _read("hot_swap")["rows"]}
    add(
        "verified weight update of 142 MB",
        f"{swap['packed, verified']:.0f} ms",
        f"engine restart: {swap['engine restart']:,.0f} ms",
        "hot_swap",
    )
    sampling = {
        (row["prompts x new tokens"], row["what"]): row["tokens/s"] for row in _read("sampling")["rows"]
    }
    add(
        "sampling 64 tokens for each of 64 prompts",
        f"{sampling['64 x 64 tokens', 'SamplingEngine.generate']:,} tokens/s",
        f"`vllm.LLM`: {sampling['64 x 64 tokens', 'vllm.LLM.generate']:,} tokens/s",
        "sampling",
    )
    real = _read("real")["rows"]
    for job, what in (
        ("GRPO", "GRPO of SmolLM2-135M, 64 completions of 24 tokens a step"),
        ("fine-tuning", "fine-tuning of SmolLM2-135M, texts of 24 to 256 tokens"),
    ):
        ours, other = (
            next(row for row in real if row["job"] == job and row[""].startswith(who))
            for who in ("vectorlm, one rank", "TRL")
        )
        add(what, ours["speed"], f"TRL: {other['speed']}", "real")
    overlap = {row["run"]: row for row in _read("async")["rows"] if row["lengths"] == "long tail"}
    add(
        "asynchronous GRPO step, tokens at most 2 versions old",
        f"{overlap['in flight, k = 2']['s a step'].split()[0]} s a step",
        f"synchronous: {overlap['taking turns on all, 1 rank']['s a step'].split()[0]} s a step",
        "async",
        overlap["in flight, k = 2"]["commit"],
    )
    faults = _read("faults")["rows"]
    total = sum(row["times"] for row in faults)
    survived = total - sum(row["otherwise"] + row["left something behind"] for row in faults)
    add("injected faults that were handled as promised", f"{survived} of {total}", "", "faults")
    return "\n".join(lines)


def _read(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def _render(name: str, table: Table, page: str, changed: Collection[str]) -> str:
    result = _read(name)
    columns = table.columns or tuple(result["rows"][0])
    rows = [
        row
        for row in result["rows"]
        if not (table.leave_out and any(re.search(table.leave_out, str(row[column])) for column in columns))
    ]
    if table.spread:
        first, second, third = columns
        columns = (first, *dict.fromkeys(row[second] for row in rows))
        spread: dict[str, dict[str, str]] = {}
        for row in rows:
            spread.setdefault(row[first], {first: row[first]})[row[second]] = row[third]
        rows = [dict.fromkeys(columns, "") | row for row in spread.values()]
    lines = [columns, ("---", *["---:"] * (len(columns) - 1))]
    cells = [[str(row[column]) for column in columns] for row in rows]
    lines += [[table.words.get(cell, cell) for cell in line] for line in cells]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table.title}; {_origin(name, page, changed)}:\n\n{text}"


if __name__ == "__main__":
    # A clone without history cannot compare commits: the pages keep their notes.
    has_history = _git("rev-parse", "--is-shallow-repository") == "false"
    changed = results_older_than_their_code() if has_history else None
    for page in pages_with_tables():
        path = ROOT / page
        path.write_text(with_tables(path.read_text(), page, changed))
    print("older than their code:", ", ".join(changed) if changed is not None else "unknown, no history here")
