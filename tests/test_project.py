"""The checks of a project of one's own: they pass what `vectorlm new` writes, and name what is wrong elsewhere."""

import subprocess
import sys

import pytest

from vectorlm.cli import main
from vectorlm.project import PROJECT_CHECKS, ProjectUnderTest

BROKEN = {
    "rewards_survive_any_completion": ("return float(completion.split()[0] == str(answer))", "IndexError"),
    "rewards_are_deterministic": ("return random.random()", "and then"),
    "rewards_tell_completions_apart": ("return 0.5", "gave 0.5 to each of"),
}


@pytest.fixture
def project(tmp_path, folder, monkeypatch):
    """What `vectorlm new` writes, with a tiny tokenizer's model."""
    monkeypatch.chdir(tmp_path)
    assert main(["new", "mine", "--repository", "https://example.org/vectorlm"]) == 0
    monkeypatch.chdir(tmp_path / "mine")
    (tmp_path / "mine/model").symlink_to(folder)
    return tmp_path / "mine"


def test_the_workflow_clones_what_was_named(project):
    assert "--depth 1 https://example.org/vectorlm " in (project / ".github/workflows/test.yml").read_text()
    assert len((project / "prompts.jsonl").read_text().splitlines()) == 81
    assert main(["new", str(project)]) == 2


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_reward_is_named(project, name):
    body, said = BROKEN[name]
    (project / "rewards.py").write_text(f"import random\ndef is_right(completion, answer):\n    {body}\n")
    (project / "environment.py").unlink()
    check = {each.__name__: each for each in PROJECT_CHECKS}[name]
    with pytest.raises(AssertionError, match=said):
        check(ProjectUnderTest("config.yaml"))


@pytest.mark.slow
def test_what_is_written_passes_its_own_tests(project):
    """All of its file of tests, and those of rewards by the option too."""
    plugin = ["-p", "no:cacheprovider", "--vectorlm", "config.yaml"]
    command = [sys.executable, "-m", "pytest", *plugin, "-k", "test_project or rewards", "."]
    printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    assert f"{len(PROJECT_CHECKS) + len(BROKEN)} passed" in printed, printed
