"""Checks of a user's project: they pass for the output of `vectorlm new`, and name faults elsewhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from kit.rank_processes import save_tiny_llama
from kit.sft_runs import lines

from vectorlm import FakeEngine
from vectorlm.cli import main
from vectorlm.cli.project_checks import GAP, PROJECT_CHECKS, ProjectUnderTest, two_steps_train
from vectorlm.runs.config.load import load_config, save_config
from vectorlm.runs.preflight.checked import preflight

TINY_LLAMA = {"max_length": 256}
TRAIN, SAMPLER = "train_parameters", "train_parameters.sampler"
BROKEN = {
    "rewards_survive_any_completion": ("return float(completion.split()[0] == str(answer))", "IndexError"),
    "rewards_are_deterministic": ("return random.random()", "and then"),
    "rewards_tell_completions_apart": ("return 0.5", "gave 0.5 to each of"),
}


@pytest.fixture
def project(tmp_path, folder, monkeypatch):
    """Return the folder that `vectorlm new` writes, with the model of a tiny tokenizer."""
    monkeypatch.chdir(tmp_path)
    assert main(["new", "mine", "--repository", "https://example.org/vectorlm"]) == 0
    monkeypatch.chdir(tmp_path / "mine")
    (tmp_path / "mine/model").symlink_to(folder)
    # The project's files import their neighbours; other tests may have imported modules with the same names.
    monkeypatch.syspath_prepend(tmp_path / "mine")
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
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
    check = {function.__name__: function for function in PROJECT_CHECKS}[name]
    with pytest.raises(AssertionError, match=said):
        check(ProjectUnderTest("config.yaml"))


def test_a_judge_that_asks_the_run_s_engine_is_called_only_in_the_run(project):
    rewards = {"rewards.py:is_right": 1, "judge(model='self')": 1}
    mine = under_test(f"{TRAIN}.lora_peft_config={{r: 8}}", f"rl.rewards={json.dumps(rewards)}")
    assert list(mine.scored) == ["rewards.py:is_right"]


def test_what_the_checks_write_goes_with_them():
    under = ProjectUnderTest("config.yaml")
    folder = under.folder
    assert folder.is_dir()
    del under
    assert not folder.exists()


def under_test(*overrides):
    save_config(load_config("config.yaml", overrides), "mine.yaml")
    return ProjectUnderTest("mine.yaml")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (1, ["rl.environment=null", "rl.sampling_params.max_tokens=64", "rl.overlong_buffer_tokens=32"]),
        (1, ["rl.sampling_params.max_tokens=null"]),
        (1, ["rl.algorithm=online_dpo", "rl.sampling_params={max_tokens: 64, min_tokens: 32}"]),
        (1, ["rl.num_mini_batches=4", "rl.max_kl=0.1"]),
        (1, ["rl.algorithm=ppo", "rl.critic.warmup_steps=5"]),
        (1, [f"{TRAIN}.profile_steps=3"]),
        (1, [f"{TRAIN}.max_seq_len=-1"]),
        (2, [f"{TRAIN}.context_parallel=2"]),
        (1, [f"{TRAIN}.use_flash_attention=true", f"{TRAIN}.use_mp=false", f"{TRAIN}.dtype=bfloat16"]),
        (1, ["lora_peft_config={r: 8}", "rl.keep_adapters={every: 1, last: 2}"]),
        (1, ["lora_peft_config={r: 8}", "rl.environment=null", "rl.rewards={'judge(model=\"self\")': 1}"]),
        (1, ["lora_peft_config={r: 8}", f"{TRAIN}.share_base=true", "engine.dtype=float32"]),
        (1, [f"{SAMPLER}={{inference: transformers}}"]),
        (1, [f"{SAMPLER}={{inference: server, engine: {{url: 'http://a:1'}}}}", "lora_peft_config={use_dora: true}"]),
    ],
    ids=str,
)  # fmt: skip
def test_a_config_that_is_accepted_is_accepted_for_two_steps_too(project, world_size, overrides):
    mine = under_test(*overrides)
    preflight(mine.config, world_size)
    preflight(load_config("mine.yaml", mine.overrides), 1)


def test_two_steps_write_to_their_own_folder_alone(project):
    mine = under_test(
        "trackers={tensorboard: {}}",
        f"{SAMPLER}.output_jsonl_path=answers.jsonl",
        "push_to_hub={repo_id: me/mine}",
    )
    config = load_config("mine.yaml", mine.overrides)
    assert (config.trackers, config.push_to_hub) == ({}, None)
    assert config.samples_path.is_relative_to(mine.folder)


@pytest.mark.slow
def test_two_steps_have_tokens_to_compare_and_no_best_model_to_wait_for(project, tmp_path, monkeypatch):
    Path("held.jsonl").write_text(Path("prompts.jsonl").read_text().partition("\n")[0])
    mine = under_test(
        "rl.algorithm=dapo",
        "rl.drop_truncated=true",
        "rl.correction.preset=bypass",
        f"{TRAIN}.checkpointing_enabled=true",
        f"{TRAIN}.keep_best=true",
        f"{TRAIN}.final_model=best",
        f"{SAMPLER}.prompts=held.jsonl",
        f"{SAMPLER}.sample_frequency=1",
    )
    mine.model = save_tiny_llama(tmp_path / "bytes", vocab_size=128, **TINY_LLAMA)
    with FakeEngine(lambda prompt, version: "z" * 40) as engine:
        monkeypatch.setattr(
            "vectorlm.cli.project_checks.launch", lambda fn, checked, world_size: fn(checked, engine=engine)
        )
        two_steps_train(mine)
    assert all(GAP in row for row in lines(mine.run / "metrics.jsonl") if row["step"])


@pytest.mark.slow
def test_what_is_written_passes_its_own_tests(project):
    """Run the project's whole test file, and with the option the tests of its rewards too."""
    plugin = ["-p", "no:cacheprovider", "--vectorlm", "config.yaml"]
    command = [sys.executable, "-m", "pytest", *plugin, "-k", "test_project or rewards", "."]
    printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    assert f"{len(PROJECT_CHECKS) + len(BROKEN)} passed" in printed, printed
