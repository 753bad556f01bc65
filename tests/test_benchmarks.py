"""The configs of the benchmarks whose runs share an engine, checked as a run would check them."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from vectorlm.runs.preflight.rl import rl_problems
from vectorlm.runs.preflight.settings import setting_problems

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))
STUDIES = sorted(
    path.stem for path in BENCHMARKS.glob("*.py") if re.search(r"\bmeasure\(STUDY", path.read_text())
)


class Asked(Exception):
    """Raised instead of measuring; its arguments are the study and its jobs."""


def ask(study, jobs, *_):
    raise Asked(study, jobs)


@pytest.mark.parametrize("name", STUDIES)
def test_a_run_accepts_every_config(name, monkeypatch):
    program = importlib.import_module(name)
    # It trains models for minutes.
    monkeypatch.setattr(program, "prepare", lambda: None, raising=False)
    monkeypatch.setattr(program, "measure", ask)
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(Asked) as caught:
        program.main()
    study, jobs = caught.value.args
    # Seeds change no rule.
    for job in {json.dumps(job | {"seed": 0}): job for job in jobs}.values():
        config = study.config_of(job)
        problems = [*setting_problems(config, 1), *rl_problems(config, config.rl)]
        # The files of earlier runs do not exist.
        assert [problem for problem in problems if "runs/" not in problem] == [], job
