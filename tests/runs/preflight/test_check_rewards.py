"""Reward functions with parameters that the prompts cannot fill, and runs without evaluation."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from kit.config_texts import MINIMAL, RL
from kit.rank_processes import save_tiny_llama

from vectorlm.cli import main
from vectorlm.errors import ConfigError
from vectorlm.runs.config.load import load_config, save_config
from vectorlm.runs.preflight.checked import preflight
from vectorlm.runs.preflight.settings import setting_problems
from vectorlm.runs.preflight.user_code import signature_problems
from vectorlm.sampling.settings import EngineSettings
from vectorlm.train.settings import EvaluationSettings
from vectorlm.types import PromptRecord

CONFIG = RL.replace("[abc]", "questions.jsonl").replace("countdown: 1.0", '"rewards.py:reward": 1.0')
ROWS = [{"prompt": "1 + 1", "answer": "2"}, {"prompt": "2 + 2", "answer": "4"}]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tiny_llama(tmp_path / "model", hidden_size=64)
    Path("my.yaml").write_text(CONFIG)
    write_rows("questions.jsonl", ROWS)
    return tmp_path


def write_rows(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def define(signature):
    Path("rewards.py").write_text(f"def reward({signature}):\n    return 0.0\n")


def found(reward, rows=ROWS):
    records = [
        PromptRecord(row["prompt"], {name: row[name] for name in row if name != "prompt"}) for row in rows
    ]
    return [" -> ".join(problem) for problem in signature_problems(reward, records, "rl.prompts")]


def test_trls_signature_passes_the_check_without_a_sampler_section(folder, capsys):
    define("prompts, completions, answer, **kwargs")
    assert main(["check", "my.yaml"]) == 0
    assert "evaluation   none (set evaluation.prompts)\n" in capsys.readouterr().out


def test_check_prints_a_file_that_says_the_same(folder, capsys):
    define("prompts, completions, answer, **kwargs")
    changes = ["rl.algorithm={name: dapo, clip_high: 0.3}", "engine.max_num_seqs=4"]
    assert main(["check", "my.yaml", *(word for change in changes for word in ("--set", change))]) == 0
    Path("printed.yaml").write_text(capsys.readouterr().out)
    given = load_config("my.yaml", changes)
    assert load_config("printed.yaml") == given
    found = yaml.safe_load(Path("printed.yaml").read_text())
    assert found["rl"]["algorithm"] == {"name": "dapo", **asdict(given.rl.algorithm.settings)}
    assert (found["engine"]["max_num_seqs"], found["rl"]["algorithm"]["clip_high"]) == (4, 0.3)


@pytest.mark.parametrize(
    ("reward", "rule"),
    [
        ("judge(model='self')", "needs a run of reinforcement learning"),
        ("judge(model='m')", "needs either the url of a server"),
        ("judge(model='m', url='http://localhost/v1', pattern='(')", "as pattern"),
    ],
)
def test_a_judge_that_fine_tuning_cannot_ask_is_refused(folder, reward, rule):
    Path("tuned.yaml").write_text(MINIMAL.replace("models/tiny", "model"))
    changes = [
        f'evaluation={{prompts: questions.jsonl, rewards: {{"{reward}": 1.0}}}}',
        "train_parameters.lora_peft_config={r: 4, target_modules: [q_proj]}",
    ]
    with pytest.raises(ConfigError, match=rf"evaluation\.rewards=.*judge.*{rule}"):
        preflight(load_config("tuned.yaml", changes), 1)


@pytest.mark.parametrize("weight", ["high", "null", ".nan", "true"])
def test_the_weight_of_an_evaluation_s_reward_is_a_number(folder, weight):
    define("completions, **kwargs")
    evaluation = f"evaluation={{prompts: [abc], rewards: {{'rewards.py:reward': {weight}}}}}"
    with pytest.raises(ConfigError, match=r"evaluation\.rewards\.rewards\.py:reward"):
        preflight(load_config("my.yaml", [evaluation]), 1)


def test_the_check_shows_the_environment_and_asks_it_for_its_columns(folder, capsys):
    Path("game.py").write_text(
        "class Game:\n"
        "    def __init__(self, answer, hints=()):\n        pass\n"
        "    def step(self, message):\n        pass\n"
    )
    Path("game.yaml").write_text(
        CONFIG.replace('rewards: {"rewards.py:reward": 1.0}', "environment: game.py:Game")
    )
    assert main(["check", "game.yaml"]) == 0
    said = capsys.readouterr().out
    assert "rewards      environment x 1\n" in said
    assert "environment  game.py:Game, up to 4 turns a rollout\n" in said
    write_rows("questions.jsonl", [*ROWS, {"prompt": "3 + 3"}])
    assert main(["check", "game.yaml"]) == 2
    assert "'game.py:Game' needs the parameter 'answer'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("signature", "name", "winner"),
    [
        ("completion, messages", "messages", "the column, not the run's value"),
        ("completions, environment, **kwargs", "environment", "the column, not the run's value"),
        ("text, num_turns=1", "num_turns", "the column, not the run's value"),
        ("text, log", "log", "the run's function, not the column"),
        ("text, **columns", "messages", None),
        ("text", "messages", None),
    ],
)
def test_the_check_notes_what_both_a_column_and_the_run_could_fill(folder, capsys, signature, name, winner):
    define(signature)
    write_rows("questions.jsonl", [{**row, name: "x"} for row in ROWS])
    asked = "train_parameters.sampler={prompts: questions.jsonl, reward: 'rewards.py:reward'}"
    assert main(["check", "my.yaml", "--set", asked]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if "the reward" in line]
    places = ["rl.prompts", "evaluation.prompts"] if winner else []
    assert [note.removeprefix("#   note").lstrip() for note in notes] == [
        f"{place}: the reward rewards.py:reward gets as {name!r} {winner}. Rename the column if it should get the other"
        for place in places
    ]


def test_the_check_names_a_parameter_that_nothing_supplies(folder, capsys):
    define("prompts, completions, answr, trainer_state")
    assert main(["check", "my.yaml"]) == 2
    assert capsys.readouterr().err == (
        "ConfigError: 2 problems:\n"
        "  - rl.rewards.rewards.py:reward=1.0 needs 'answr', which the prompts do not have: the columns of rl.prompts "
        "are answer. Did you mean 'answer'? (my.yaml:12)\n"
        "  - rl.rewards.rewards.py:reward=1.0 needs 'trainer_state', which the prompts do not have: it belongs to "
        "TRL's trainer. Give it a default: `trainer_state=None`. (my.yaml:12)\n"
    )


def test_a_column_that_one_prompt_lacks_is_missed_by_a_function_of_one_completion_alone():
    rows = [*ROWS, {"prompt": "3 + 3"}]
    assert found(lambda completions, answer: 0, rows) == []
    assert found(lambda text, answer=None: 0, rows) == []
    assert found(lambda text, answer: 0, rows) == [
        "needs 'answer', which prompt 2 of rl.prompts does not have -> Give it a default, or fill the column."
    ]
    assert found(lambda text, prompt, completion_ids: 0, rows) == []


def test_a_function_without_a_parameter_for_the_completion_is_refused():
    assert found(lambda prompt, answer: 0) == [
        "needs a parameter for the completion -> Add a parameter `completion`, or `messages`."
    ]
    assert found(lambda prompt, completion: 0) == []
    assert found(lambda messages, answer: 0) == []
    assert found(lambda *texts: 0) == []


def test_the_reward_of_an_evaluation_is_checked_too(folder):
    define("completion, solution")
    reward = "train_parameters.sampler={prompts: questions.jsonl, reward: 'rewards.py:reward'}"
    with pytest.raises(ConfigError) as caught:
        preflight(load_config("my.yaml", [reward, "rl.rewards={countdown: 1.0}"]), 1)
    assert "rl.rewards.countdown=1.0 needs 'numbers', which the prompts do not have" in str(caught.value)
    assert "evaluation.rewards='rewards.py:reward' needs 'solution'" in str(caught.value)


@pytest.mark.parametrize("override", [None, "train_parameters.sampler=null", "train_parameters.sampler={}"])
def test_reinforcement_learning_needs_neither_a_sampler_section_nor_questions(folder, override):
    config = load_config("my.yaml", [override] if override else [])
    assert (config.engine, config.evaluation) == (EngineSettings(), EvaluationSettings())
    assert list(setting_problems(config, 1)) == []
    save_config(config, "saved.yaml")
    assert load_config("saved.yaml") == config


@pytest.mark.parametrize("name", ["sample_frequency: 2", "reward: countdown", "output_jsonl_path: a.jsonl"])
def test_settings_of_an_evaluation_without_questions_are_refused(folder, name):
    with pytest.raises(ConfigError, match=name.partition(":")[0]):
        preflight(load_config("my.yaml", [f"train_parameters.sampler={{{name}}}"]), 1)


@pytest.mark.parametrize("given", ["engine.dtype=float32", "train_parameters.sampler.sampling_params={n: 2}"])
def test_an_engine_of_fine_tuning_needs_prompts(tmp_path, given):
    (tmp_path / "my.yaml").write_text(MINIMAL)
    with pytest.raises(ConfigError, match=r"evaluation\.prompts"):
        preflight(load_config(tmp_path / "my.yaml", [given]), 1)
    off = load_config(tmp_path / "my.yaml", [given, "evaluation=null"])
    assert not any("evaluation" in problem for problem in setting_problems(off, 1))


@pytest.mark.parametrize(
    ("prompts", "said"), [("questions.jsonl", "the prompts of questions.jsonl"), ("[a, b]", "2 prompts")]
)
def test_check_says_what_a_policy_learns_from(folder, capsys, prompts, said):
    Path("rewards.py").write_text("def reward(completion):\n    return 0.0\n")
    assert main(["check", "my.yaml", "--set", f"rl.prompts={prompts}"]) == 0
    assert f"grpo, 2 steps on {said}\n" in capsys.readouterr().out
