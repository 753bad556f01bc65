"""Count the wrong lines that the tests notice (mutation testing). Run: python benchmarks/mutants.py --seed 0

mutmut changes one place at a time; pyproject.toml lists the files and the fast tests that run first. Slower tests run
on mutants that survive these. Mutants that mypy rejects are not drawn. mutmut leaves out decorated functions and lines
outside functions. equivalent_mutants.json explains why no test can notice a mutant. Writes results/mutants.json.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from report import ROOT, write_result

VERSION = "3.8.1"
TOOL = ROOT / "build" / f"mutmut-{VERSION}"
TREE = ROOT / "mutants"
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.json")
SIZES = {"algorithms": 70, "sampling.weights": 55, "sampling.sampler": 40}
"""Mutants to draw from each package; in `sampling.sampler` only the scheduler is mutated."""
SLOWER = {
    "algorithms": (
        *("tests/rl/test_prepare.py", "tests/rl/test_rl_correction.py", "tests/rl/test_rl_metrics.py"),
        *("tests/rl/test_micro_batch.py", "tests/rl/rollouts/test_replay.py"),
    ),
    "sampling.weights": (
        *("tests/sampling/weights", "tests/runs/preflight"),
        *("tests/sampling/test_hf_engine.py", "tests/sampling/test_hot_swap.py"),
    ),
    "sampling.sampler": (
        "tests/sampling/testing/test_contract.py",
        "tests/sampling/test_hf_engine.py",
        "-k",
        "inline or hf_engine",
    ),
}
LIMIT_S = 300
KILLED, SURVIVED, UNTESTED = (1, 2, 3, -9, -11), 0, 33
"""Exit codes of mutmut; -9 and -11 are crashes, and all codes that are not listed are time-outs."""
WARM_UP = "vectorlm.sampling.weights.inspection.x_widest_word__mutmut_1"
"""Mutant that is run first: mutmut has no command that only writes the mutants and records which test calls which
function."""


def run(*command: str, cwd: Path = ROOT, mutant: str | None = None, **options: Any) -> Any:
    """Run a command with mutmut on the path, and with `mutant` active if it is given."""
    path = {"PYTHONPATH": str(TOOL), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    chosen = {} if mutant is None else {"MUTANT_UNDER_TEST": mutant}
    env = {**os.environ, "OMP_NUM_THREADS": "1", **path, **chosen}
    return subprocess.run(command, cwd=cwd, env=env, text=True, **options)


def mutmut(*names: str) -> None:
    """Run the fast tests on these mutants, with mutmut."""
    run(
        sys.executable,
        "-m",
        "mutmut",
        "run",
        "--max-children",
        "1",
        *names,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def spans() -> dict[str, tuple[Path, int, int]]:
    """Return the file, the first and the last line of every mutant and of every original function."""
    found = {}
    for index in sorted(TREE.glob("vectorlm/**/*.spans")):
        file = index.with_suffix("")
        module = ".".join(file.relative_to(TREE).with_suffix("").parts).removesuffix(".__init__")
        for name, (start, end) in json.loads(index.read_text())["spans"].items():
            found[f"{module}.{name}"] = file, start, end
    return found


def refused_by_mypy(places: dict[str, tuple[Path, int, int]]) -> set[str]:
    """Return the mutants with a type error."""
    lines = run("mypy", "--output", "json", cwd=TREE, capture_output=True).stdout.splitlines()
    errors = {(TREE / error["file"], error["line"]) for error in map(json.loads, filter(None, lines))}
    return {
        name
        for name, (file, start, end) in places.items()
        if any((file, line) in errors for line in range(start, end + 1))
    }


def exit_codes() -> dict[str, Any]:
    """Return mutmut's exit code of every mutant; None if it was not tested since its function changed."""
    codes = {}
    for meta in TREE.glob("vectorlm/**/*.meta"):
        codes.update(json.loads(meta.read_text())["exit_code_by_key"])
    return codes


def change(name: str, places: dict[str, tuple[Path, int, int]]) -> tuple[str, str]:
    """Return the function that a mutant breaks, and the lines that differ."""
    function = name.rpartition("__mutmut_")[0]
    before, after = (lines_of(places, variant) for variant in (f"{function}__mutmut_orig", name))
    _, _, *lines = difflib.unified_diff(before, after, n=0, lineterm="")
    lines = [line for line in lines if line[0] in "+-"]
    readable = function.replace("xǁ", "").replace(".x_", ".").replace("ǁ", ".")
    return readable, " ".join(f"{line[0]} {line[1:].strip()}" for line in lines)


def lines_of(places: dict[str, tuple[Path, int, int]], name: str) -> list[str]:
    """Return the lines of a mutant or an original function, with its name replaced by `function`."""
    file, start, end = places[name]
    text = "\n".join(lines_in(file)[start - 1 : end])
    return text.replace(name.rpartition(".")[2], "function").splitlines()


@functools.cache
def lines_in(file: Path) -> list[str]:
    return file.read_text().splitlines()


@functools.cache
def slower_tests(name: str, package: str) -> int:
    """Run the slower tests of `package` on a mutant (empty: the original code); return mutmut's exit code."""
    arguments = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not long", *SLOWER[package])
    options: dict[str, Any] = {"capture_output": True, "timeout": LIMIT_S}
    try:
        return run(sys.executable, "-m", "pytest", *arguments, cwd=TREE, mutant=name, **options).returncode
    except subprocess.TimeoutExpired:
        return 36


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="test again only what the last run left alive")
    given = parser.parse_args()
    if not TOOL.exists():
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--target", str(TOOL))
        run(*pip, f"mutmut=={VERSION}", check=True)
    if not given.keep:
        shutil.rmtree(TREE, ignore_errors=True)
    mutmut(WARM_UP)
    places = spans()
    refused = refused_by_mypy(places)
    mutants = {name for name in places if not name.endswith("_orig")}
    changes = {name: change(name, places) for name in sorted(mutants - refused)}
    drawn: dict[str, str] = {}
    for package, size in SIZES.items():
        of_package = [name for name in changes if name.startswith(f"vectorlm.{package}.")]
        # Sorted by a hash of the change: edits of other code then do not change the draw.
        of_package.sort(key=lambda name: hashlib.sha256(f"{given.seed} {changes[name]}".encode()).digest())
        drawn.update(dict.fromkeys(of_package[:size], package))
    codes = exit_codes()
    if left := [name for name in drawn if codes[name] not in KILLED]:
        mutmut(*left)
        codes = exit_codes()
    reasons = {
        (mutant["function"], mutant["change"]): mutant["reason"]
        for mutant in json.loads(EQUIVALENT.read_text())
    }
    counts, details = {package: Counter[str]() for package in SIZES}, []
    for name, package in drawn.items():
        code, (function, lines) = codes[name], changes[name]
        reason, slower = reasons.get((function, lines)), code in (SURVIVED, UNTESTED)
        if slower:
            code = SURVIVED if reason else slower_tests(name, package)
            if code != SURVIVED and slower_tests("", package) != SURVIVED:
                raise SystemExit(f"The slower tests of {package} fail on the code as it is.")
        alive = "equivalent" if reason else "survived"
        outcome = alive if code == SURVIVED else "killed" if code in KILLED else "timed_out"
        counts[package][outcome] += 1
        details.append({"function": function, "change": lines, "outcome": outcome, "slower_tests": slower})
        details[-1] |= {"reason": reason} if outcome == "equivalent" else {}
        if outcome == "survived":
            print(f"{function}: {lines}", flush=True)
    counts["all"] = sum(counts.values(), Counter())
    rows = []
    for package, count in counts.items():
        killed, noticeable = count["killed"] + count["timed_out"], count.total() - count["equivalent"]
        row = {"package": package, "mutants": count.total()}
        row |= {outcome: count[outcome] for outcome in ("killed", "timed_out", "equivalent", "survived")}
        rows.append(row | {"killed_%": round(100 * killed / noticeable, 1)})
    setting = {
        "seed": given.seed,
        "mutmut": VERSION,
        "mutants": len(mutants),
        "refused_by_mypy": len(mutants & refused),
    }
    write_result("mutants", setting, rows, {"drawn": details})


if __name__ == "__main__":
    main()
