"""Teachers that the check refuses: wrong settings, another tokenizer, a server that cannot score."""

import json
import shutil
from pathlib import Path

import pytest
from kit.rank_processes import save_tiny_llama

from vectorlm.cli import main
from vectorlm.errors import ConfigError
from vectorlm.runs.config.load import load_config
from vectorlm.runs.config.value import raise_problems
from vectorlm.runs.preflight.memory import plan_of_config
from vectorlm.runs.preflight.rl import check_teacher, rl_problems
from vectorlm.runs.preflight.settings import setting_problems

CONFIG = """
model: model
train_parameters:
  output_dir: runs/taught
  max_seq_len: 64
  optimizer: {lr: 1.0e-3}
  sampler: {sample_frequency: 1, prompts: [abc], engine: {max_model_len: 64, kv_cache_memory_bytes: 16777216}}
rl:
  algorithm: on_policy_distillation
  max_steps: 2
  prompts: [abc, bcd]
  prompts_per_step: 2
  sampling_params: {max_tokens: 8}
  teacher: {model: teacher}
"""
SERVER = "rl.teacher={server: 'http://127.0.0.1:9'}"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("taught")
    save_tiny_llama(folder / "model", hidden_size=64)
    save_tiny_llama(folder / "teacher", vocab_size=56, hidden_size=128)
    return folder


@pytest.fixture
def here(models, tmp_path, monkeypatch):
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(CONFIG)
    return tmp_path


def refusal(*overrides):
    config = load_config("my.yaml", overrides)
    with pytest.raises(ConfigError) as caught:
        raise_problems([*setting_problems(config, 1), *rl_problems(config, config.rl)])
    return str(caught.value)


def test_a_larger_teacher_with_the_same_tokenizer_is_accepted_without_rewards(here, capsys):
    assert main(["check", "my.yaml"]) == 0
    out = capsys.readouterr().out
    assert "  teacher      teacher x 1, by sampled tokens\n" in out
    assert "  rewards      none\n" in out


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rl.teacher={coef: 0.5}"], "'rl.teacher'"),
        (["rl.teacher.server='http://a'"], "'rl.teacher'"),
        (["rl.teacher.model=nowhere"], "rl.teacher.model='nowhere'"),
        (
            ["rl.teacher.kind=full", "rl.teacher.server='http://a'", "rl.teacher.model=null"],
            "rl.teacher.kind='full'",
        ),
        (["rl.teacher=null"], "rl.algorithm.name='on_policy_distillation'"),
        (["rl.teacher.beta=0.5"], "rl.teacher.beta=0.5 has no effect with rl.teacher.kind='sampled'"),
        (
            ["rl.teacher.kind=full", "rl.teacher.beta=0", "rl.sampling_params={max_tokens: 8, top_p: 0.9}"],
            "rl.teacher.beta=0.0",
        ),
        (["rl.teacher.timeout_s=5"], "rl.teacher.timeout_s=5.0 has no effect with rl.teacher.server=null"),
        (["rl.group_size=2", "rl.algorithm.dynamic_sampling=True"], "rl.algorithm.dynamic_sampling=true"),
        (
            [SERVER, "rl.sampling_params={max_tokens: 8, temperature: 0.7}"],
            "rl.sampling_params.temperature=0.7",
        ),
        (
            ["rl.algorithm=online_dpo", "rl.group_size=2", "rl.rewards={countdown: 1}"],
            "rl.teacher.kind='sampled'",
        ),
        (["rl.algorithm=reinforce"], "must have a reward"),
        (["rl.teacher.model=self"], "rl.teacher.prompt_column"),
        (["rl.teacher.prompt_column=told"], "rl.teacher.prompt_column='told' has no effect"),
        ([SERVER, "rl.teacher.top_k=4"], "rl.teacher.top_k=4"),
        (["model=teacher", "rl.teacher.model=model"], "rl.teacher.model='model'"),
    ],
)
def test_what_cannot_be_taught_is_refused(here, overrides, words):
    assert words in refusal(*overrides)


UNREAD = {
    "rl.top_entropy_quantile": 0.2,
    "rl.off_policy_mask": 0.5,
    "rl.algorithm.clip_low": 0.1,
    "rl.algorithm.clip_high": 0.3,
    "rl.algorithm.dual_clip": 3.0,
    "rl.algorithm.importance_sampling_level": "sequence",
    "rl.correction.preset": "tis",
    "rl.correction.level": "sequence",
}


@pytest.mark.parametrize("name", UNREAD)
def test_settings_of_a_loss_that_is_always_0_are_refused(here, name):
    def problems(*overrides):
        config = load_config("my.yaml", overrides)
        return list(rl_problems(config, config.rl))

    given = f"{name}={UNREAD[name]}"
    (text,) = problems("rl.teacher.kind=full", given)
    assert text.startswith(f"{name}=")
    assert problems(given) == []
    of_rewards = ["rl.algorithm.name=grpo", "rl.group_size=2", "rl.rewards={countdown: 1}"]
    assert problems("rl.teacher.kind=full", *of_rewards, given) == []
    if name == "rl.top_entropy_quantile":
        assert problems("rl.teacher.kind=full", "rl.entropy_coef=0.1", given) == []


def test_what_only_rejects_tokens_has_an_effect_on_a_teacher(here):
    for preset in ("mis", "icepop"):
        config = load_config("my.yaml", ["rl.teacher.kind=full", f"rl.correction.preset={preset}"])
        assert list(rl_problems(config, config.rl)) == []
    quantised = load_config("my.yaml", ["rl.teacher.kind=full", "engine.quantization=int8"])
    assert quantised.rl.correction.preset == "off"


def test_a_teacher_that_reads_less_is_refused(here):
    description = json.loads(Path("teacher/config.json").read_text())
    Path("teacher/config.json").write_text(json.dumps(description | {"max_position_embeddings": 32}))
    assert "rl.teacher.model='teacher'" in (text := refusal())
    assert "32" in text
    # GPT-2's family uses this name.
    del description["max_position_embeddings"]
    Path("teacher/config.json").write_text(json.dumps(description | {"n_positions": 16}))
    assert "16" in refusal()


def change_tokenizer(change):
    path = Path("teacher/tokenizer.json")
    tokenizer = json.loads(path.read_text())
    change(tokenizer["model"]["vocab"])
    path.write_text(json.dumps(tokenizer))


def test_another_tokenizer_is_refused_with_the_first_token_that_differs(here, capsys):
    def swap(vocabulary):
        vocabulary["c"], vocabulary["d"] = vocabulary["d"], vocabulary["c"]

    change_tokenizer(swap)
    assert main(["check", "my.yaml"]) == 2
    error = capsys.readouterr().err
    assert "rl.teacher.model='teacher'" in error
    assert "token 4 is 'c' for the policy and 'd' for the teacher" in error


def test_a_token_of_one_tokenizer_and_another_special_token_are_named(here):
    path = Path("teacher/tokenizer_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "z"}))
    with pytest.raises(ConfigError, match="eos_token_id is 0 for the policy and 27 for the teacher"):
        check_teacher(load_config("my.yaml"))
    change_tokenizer(lambda vocabulary: vocabulary.update({"ab": len(vocabulary)}))
    with pytest.raises(ConfigError, match="token 28 is None for the policy and 'ab' for the teacher"):
        check_teacher(load_config("my.yaml"))


def test_a_server_that_is_not_there_is_named(here, capsys):
    assert main(["check", "my.yaml", "--set", SERVER]) == 1
    assert "the server at http://127.0.0.1:9 does not answer" in capsys.readouterr().err


def test_the_memory_plan_counts_the_teacher_by_its_own_size(here):
    def plan(*overrides):
        return plan_of_config(load_config("my.yaml", overrides), 1)

    def frozen(plan):
        return {row.name: row.training for row in plan.rows}.get("frozen models", 0)

    teacher = 4 * plan_of_config(load_config("my.yaml", ["model=teacher"]), 1).demand.model.num_parameters
    assert frozen(plan()) == pytest.approx(teacher, abs=4)
    assert frozen(plan(SERVER)) == 0
    assert frozen(plan("rl.kl_coef=0.1")) == pytest.approx(
        teacher + 4 * plan().demand.model.num_parameters, abs=4
    )
    rows = [
        {row.name: row.training for row in found.rows} for found in (plan(), plan("rl.teacher.kind=full"))
    ]
    assert rows[1]["activations"] > rows[0]["activations"]


def test_every_prompt_must_have_the_teachers(here, capsys):
    path = Path("prompts.jsonl")
    given = ["--set", "rl.teacher={model: self, prompt_column: told}", "--set", "rl.prompts=prompts.jsonl"]
    rows = [{"prompt": letter * 3} for letter in "abcd"]

    def check():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        code = main(["check", "my.yaml", *given])
        return code, capsys.readouterr().err

    for row in rows:
        row["told"] = "abc"
    assert check() == (0, "")
    rows[-1]["told"] = "a" * 500
    code, error = check()
    assert code == 2
    assert f"prompt {len(rows) - 1} of the column 'told' has 500 tokens" in error
    del rows[-1]["told"]
    code, error = check()
    assert code == 2
    assert "rl.teacher.prompt_column='told'" in error
