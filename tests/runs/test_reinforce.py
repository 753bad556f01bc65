"""Whole reinforcement learning runs with vLLM: their files, resumption, and the losses of the one-page GRPO."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from kit.metrics_page import METRICS
from kit.rank_processes import forked, save_adapters
from kit.rl_runs import (
    ONE_AT_A_TIME,
    REWARD,
    check_rl,
    config_of,
    cut_after_step_2,
    is_documented,
    lines,
    numbers,
    save_files,
)
from kit.sft_runs import are_equal, weights_of

from vectorlm.cli import main
from vectorlm.errors import ConfigError
from vectorlm.runs.reinforcement import reinforce

ROOT = Path(__file__).parents[2]
TOOL = f"{ROOT}/examples/calculator_tool.py:Calculator"
PPO = [
    "rl.num_mini_batches=2",
    "rl.num_epochs=2",
    "rl.kl_coef=0.05",
    "rl.kl_in=reward",
    "rl.kl_target=0.5",
    "rl.kl_horizon=100",
    "rl.critic.lr=1e-3",
    "rl.critic.warmup_steps=1",
    "rl.reference_sync_every=3",
    "rl.rollout.save_tokens=True",
    *ONE_AT_A_TIME,
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return save_files(tmp_path_factory.mktemp("rl"))


@pytest.fixture(scope="module")
def grpo(files, tmp_path_factory):
    """Return the folder of a GRPO run on two ranks that keeps tokens, with examples/grpo_one_page.py's optimizer."""
    output = tmp_path_factory.mktemp("grpo") / "grpo"
    overrides = [
        "train_parameters.optimizer.betas=[0.9, 0.98]",
        "train_parameters.optimizer.weight_decay=0.0",
        "train_parameters.device_peak_tflops=0.5",
        "rl.rollout.save_tokens=True",
    ]
    forked(reinforce, config_of(files, output, overrides=overrides))
    return output


def test_a_grpo_run_leaves_model_metrics_rollouts_and_samples(files, grpo):
    output = grpo
    metrics = lines(output / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 1, 2, 3, 4]
    assert [line["step"] for line in metrics if "eval/accuracy" in line] == [0, 2, 4]
    names = {name for line in metrics for name in line if name != "step"}
    assert [name for name in sorted(names) if not is_documented(name)] == []
    rollouts = lines(output / "rollouts.jsonl")
    assert len(rollouts) == 4 * 16
    assert {row["version"] for row in rollouts if row["train_step"] == 3} == {2}
    by_hand = sum(row["reward"] for row in rollouts if row["train_step"] == 1) / 16
    assert metrics[1]["reward/mean"] == pytest.approx(by_hand)
    assert all(row["advantage"] is not None for row in rollouts)
    assert all(row["columns"] == {"wanted": row["prompt"][0]} for row in rollouts)
    timeline = lines(output / "timeline.jsonl")
    # The engine's times of the last step arrive with the evaluation after it.
    sampled_from = next(begin for name, begin, _ in timeline[-1]["trainer"] if name == "generate")
    assert max(end for _, end in timeline[-1]["engine"]) > sampled_from
    assert metrics[0]["time/start_s"] > 0
    assert [line["step"] for line in metrics if "time/save_s" in line] == [3]
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(output / "final-model")
    start = AutoModelForCausalLM.from_pretrained(files / "model")
    assert any(not torch.equal(a, b) for a, b in zip(trained.parameters(), start.parameters(), strict=True))
    num_weights = sum(
        parameter.numel() for name, parameter in trained.named_parameters() if "embed" not in name
    )
    for line in metrics[1:]:
        # A group's prompt is computed once.
        sampled = line["prompt/length_mean"] + line["completion/length_mean"]
        assert 0 <= line["perf/trained_tokens"] < 16 * sampled
        # Groups with equal rewards are not computed.
        assert (line["perf/trained_tokens"] == 0) == (line["policy/skipped_groups"] == 1)
        flops = 6 * num_weights * line["perf/trained_tokens"] / line["time/update_s"]
        assert line["perf/mfu"] == pytest.approx(flops / (2 * 0.5e12))
    assert (output / "run.png").read_bytes().startswith(b"\x89PNG")


PAGE = ROOT / "examples/grpo_one_page.py"


def run_the_page(files):
    spec = importlib.util.spec_from_file_location("grpo_one_page", PAGE)
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    page.NUM_PROMPTS, page.GROUP_SIZE, page.SEED = 4, 4, 3
    page.SAMPLING = {"temperature": 1.0, "max_tokens": 8}
    rewards = {}
    exec(REWARD, rewards)
    page.countdown_reward = rewards["letters"]
    return page.loop(str(files / "model"), str(files / "questions.jsonl"), 4, 1e-3)


@pytest.mark.slow
def test_the_page_has_the_librarys_losses(files, grpo):
    """The two loops have the same prompts, seeds and weights."""
    assert PAGE.read_text().count("\n") <= 150
    losses, _ = forked(run_the_page, files)
    metrics = lines(grpo / "metrics.jsonl")[1:]
    assert [loss for loss, _ in losses] == pytest.approx([line["policy/loss"] for line in metrics], abs=1e-6)
    norms = [line["policy/grad_norm"] for line in metrics]
    assert [norm for _, norm in losses] == pytest.approx(norms, rel=1e-3)
    assert sum(norm > 0.1 for norm in norms) >= 2, "nothing was learned, so equality proves nothing"


@pytest.fixture(scope="module")
def ppo(files, tmp_path_factory):
    """Return the folder of a PPO run on two ranks."""
    output = tmp_path_factory.mktemp("ppo") / "whole"
    forked(reinforce, config_of(files, output, "ppo", PPO))
    return output


@pytest.mark.slow
def test_a_ppo_run_that_goes_on_from_a_checkpoint_ends_bit_for_bit_where_it_ended_before(
    files, ppo, tmp_path
):
    first, second = ppo, tmp_path / "cut"
    cut_after_step_2(first, second)
    forked(reinforce, config_of(files, second, "ppo", PPO))
    assert are_equal(weights_of(first), weights_of(second))
    assert lines(first / "rollouts.jsonl") == lines(second / "rollouts.jsonl")
    assert numbers(first) == numbers(second)
    assert all(
        is_documented(name) for line in lines(first / "metrics.jsonl") for name in line if name != "step"
    )
    assert numbers(first)[2]["critic/loss"] > 0
    assert "policy/loss" not in numbers(first)[1], "the first step warms the critic up"


@pytest.mark.slow
@pytest.mark.parametrize("shared_by", [1, 2])
def test_a_ppo_run_goes_on_with_another_number_of_ranks(files, ppo, tmp_path, shared_by):
    whole, cut = ppo, tmp_path / "cut"
    cut_after_step_2(whole, cut)
    overrides = [*PPO, f"train_parameters.context_parallel={shared_by}"]
    forked(reinforce, config_of(files, cut, "ppo", overrides), world_size=shared_by)
    texts = [[row["completion"] for row in lines(folder / "rollouts.jsonl")] for folder in (whole, cut)]
    assert texts[0] == texts[1]
    for line, expected in zip(numbers(cut), numbers(whole), strict=True):
        names = [
            name for name in expected if name.startswith(("policy/", "critic/", "reference/", "reward/"))
        ]
        # The ranks' sums have another order and round differently.
        assert [line[name] for name in names] == pytest.approx(
            [expected[name] for name in names], rel=1e-3, abs=1e-6
        )


@pytest.mark.slow
def test_a_step_that_is_made_again_is_bit_for_bit_what_was_logged(ppo, tmp_path, capsys, forks_ranks):
    output = tmp_path / "run"
    shutil.copytree(ppo, output)
    # Step 3 has no checkpoint; step 4 has the final model.
    for step, weights in ((3, "not compared"), (4, "as logged")):
        assert main(["replay", str(output), "--step", str(step)]) == 0
        printed = capsys.readouterr().out
        assert printed.count("as logged") == 5 + (weights == "as logged")
        assert f"  weights              {weights}" in printed
    rollouts = lines(output / "rollouts.jsonl")
    changed = [row | {"reward": row["reward"] + (row["train_step"] == 4)} for row in rollouts]
    changed[-1]["reward"] += 1.0
    (output / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
    assert main(["replay", str(output), "--step", "4"]) == 1
    assert "tensors differ" in capsys.readouterr().out
    assert sorted(output.glob("replay-*")) == []
    assert main(["replay", str(output), "--step", "5"]) == 2


@pytest.mark.slow
def test_rollouts_that_one_run_kept_are_trained_on_by_another_beside_its_own(files, grpo, tmp_path):
    overrides = [
        "rl.rollout.source=file",
        f"rl.rollout.path={grpo}/rollouts.jsonl",
        "rl.rollout.replayed_share=0.5",
        "rl.correction.preset=tis",
        "rl.max_steps=3",
    ]
    forked(reinforce, config_of(files, tmp_path / "again", overrides=overrides), world_size=1)
    first, *_, last = lines(tmp_path / "again" / "metrics.jsonl")[1:]
    assert first["rollout/replayed"] == 0.5
    # At first, both halves have the first two versions of the weights. Then the policy moves away from the rest.
    assert first["correction/ess"] > 0.9
    assert last["correction/ratio_max"] > first["correction/ratio_min"]
    assert all(is_documented(name) for name in last if name != "step")
    drift = lines(tmp_path / "again" / "correction.jsonl")
    assert [line["train_step"] for line in drift] == [1, 2, 3]
    assert (tmp_path / "again" / "correction.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_an_algorithm_of_ones_own_a_tool_and_adapters_that_were_there(files, tmp_path):
    overrides = [
        f"rl.environment={TOOL}",
        "evaluation.prompts=null",
        "evaluation.rewards=null",
        "rl.max_steps=1",
        f"model={save_adapters(files / 'model', tmp_path / 'adapters')}",
        "rl.kl_coef=0.1",
    ]
    forked(
        reinforce, config_of(files, tmp_path / "own", f"{ROOT}/examples/my_algorithm.py:MEDIAN", overrides)
    )
    metrics = lines(tmp_path / "own" / "metrics.jsonl")[-1]
    # Reference and engine have the adapters that the policy starts with.
    assert metrics["reference/kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["sampler/logprob_gap_max"] < 1e-4
    assert (tmp_path / "own" / "final-model" / "adapter_config.json").exists()


GAME = """
from vectorlm.rl.environments.environment import Reply

class Vowels:
    async def reset(self, row):
        self.first = row["wanted"]

    async def step(self, message):
        number = sum(message["content"].count(letter) for letter in "aeiou")
        return Reply("abc", reward=number / 4 or None, metrics={"vowels": number})
"""


TWO_WAYS = """
import json, urllib.request

class Played:
    def respond(self, text):
        # After an empty answer, a longer prompt begins a row of its own.
        return None if not text or "u" in text else "bcd"

def agent(url, key, row):
    text = row["prompt"]
    for _ in range(4):
        headers = {"Authorization": f"Bearer {key}"}
        body = json.dumps({"model": "policy", "prompt": text}).encode()
        with urllib.request.urlopen(urllib.request.Request(url + "/completions", body, headers)) as answer:
            choice = json.load(answer)["choices"][0]
        if choice["finish_reason"] == "length" or not choice["text"] or "u" in choice["text"]:
            return
        text += choice["text"] + "bcd"
"""


@pytest.mark.slow
def test_an_agent_is_trained_on_bit_for_bit_as_an_environment(files, tmp_path):
    """Tokens, log-probabilities and gradients are equal, on two ranks, with one engine and with two."""
    (files / "two_ways.py").write_text(TWO_WAYS)
    overrides = [
        "evaluation.prompts=null",
        "evaluation.rewards=null",
        "rl.sampling_params={max_tokens: 12, stop: [o, x, a]}",
        "rl.rollout.save_tokens=True",
        "rl.max_steps=1",
        *ONE_AT_A_TIME,
    ]
    found = []
    for prefix, name, num_engines in (("", "Played", 1), ("openai:", "agent", 2)):
        output = tmp_path / name
        where = [f"rl.environment={prefix}{files}/two_ways.py:{name}"]
        where.append(f"engine.data_parallel_size={num_engines}")
        forked(reinforce, config_of(files, output, overrides=overrides + where))
        found.append((lines(output / "rollouts.jsonl"), weights_of(output)))
    (played, weights), (asked, weights_too) = found
    assert max(row["num_turns"] for row in played) > 1
    assert asked == played
    assert are_equal(weights_too, weights)


@pytest.mark.slow
def test_rewards_of_turns_are_all_that_a_run_needs(files, tmp_path):
    (files / "game.py").write_text(GAME)
    overrides = [
        f"rl.environment={files}/game.py:Vowels",
        "evaluation.rewards=null",
        "evaluation.sampling_params={max_tokens: 12, stop: [e, o, x], n: 2, temperature: 0.7}",
        "rl.sampling_params={max_tokens: 12, stop: [e, o, x]}",
        "rl.rewards={}",
        "rl.rollout.save_tokens=True",
        "rl.max_steps=2",
        "rl.async={max_staleness: 1}",
        "train_parameters.keep_best=True",
        "train_parameters.best_metric=eval/reward/environment",
    ]
    config = config_of(files, tmp_path / "game", overrides=overrides)
    forked(reinforce, config)
    before, *metrics = lines(tmp_path / "game" / "metrics.jsonl")
    samples = [sample for sample in lines(tmp_path / "game" / "samples.jsonl") if sample["train_step"] == 0]
    rewards = [sample["rewards"] for sample in samples]
    assert [len(sample_rewards) for sample_rewards in rewards] == [2] * 8
    assert (
        before["eval/reward"]
        == before["eval/reward/environment"]
        == pytest.approx(sum(map(sum, rewards)) / 16)
    )
    assert before["eval/logged/vowels"] > 0
    # The answers contain the environment's turns.
    assert any("abc" in text[1:] for sample in samples for text in sample["options"])
    assert all(is_documented(name) for line in metrics for name in line if name != "step")
    assert metrics[-1]["reward/environment/mean"] == metrics[-1]["reward/mean"] > 0
    rows = lines(tmp_path / "game" / "rollouts.jsonl")
    assert max(row["num_turns"] for row in rows) > 1
    for row in rows:
        assert sum(row["turn_rewards"]) == pytest.approx(row["reward"])
        assert len(row["turn_ends"]) == row["num_turns"]
        assert row["turn_ends"][-1] == len(row["token_ids"])


ASYNC = "rl.async={max_staleness: 1}"
GRAMMAR = "rl.sampling_params={structured_outputs: {choice: [b]}}"


@pytest.mark.parametrize(
    ("algorithm", "overrides"),
    [
        ("gpro", ["rl.algorithm=gpro"]),
        ("grpo", ["rl.group_size=1"]),
        ("grpo", ["rl.sampling_params={repetition_penalty: 1.1}"]),
        ("grpo", ["rl.sampling_params={min_tokens: 2}"]),
        ("grpo", ["rl.sampling_params={thinking_token_budget: 64}"]),
        ("grpo", ["rl.sampling_params={n: 2}"]),
        ("grpo", ["rl.sampling_params={temperature: 0}"]),
        ("grpo", ["rl.sampling_params={temperature: null}"]),
        ("grpo", ["rl.sampling_params={temperature: .inf}"]),
        ("grpo", ["rl.sampling_params={structured_outputs: {structural_tag: a}}"]),
        ("grpo", [GRAMMAR, "engine.structured_outputs_config={backend: guidance}"]),
        ("grpo", ["engine.logprobs_mode=raw_logprobs"]),
        ("grpo", ["engine.logits_processors=['mine:Processor']"]),
        ("grpo", ["engine.watermark_config={key: 1}"]),
        ("grpo", ["engine.hf_overrides={rope_theta: 1.0}"]),
        ("grpo", ["rl.rewards={}"]),
        ("grpo", ["rl.rewards={countdown: .nan}"]),
        ("grpo", ["rl.rewards={countdown: -.inf}"]),
        ("grpo", ["rl.reward_models={no/such: 1.0}"]),
        ("grpo", ["rl.critic.model=no/such"]),
        ("grpo", ["rl.num_mini_batches=9"]),
        ("grpo", ["rl.max_tokens_per_micro_batch=32"]),
        ("online_dpo", ["rl.max_tokens_per_micro_batch=127"]),
        ("copg", ["rl.max_tokens_per_micro_batch=255"]),
        *((name, [ASYNC, "rl.async.overdue=mask"]) for name in ("online_dpo", "copg")),
        ("grpo", ["rl.kl_target=1.0"]),
        ("grpo", ["rl.kl_coef=0.1", "rl.kl_target=1.0", "rl.kl_horizon=10"]),
        ("grpo", ["rl.kl_coef=0.1", "rl.kl_importance_weights=True", "rl.kl_straight_through=True"]),
        ("grpo", ["rl.kl_coef=0.1", "train_parameters.lora_peft_config={bias: lora_only}"]),
        ("grpo", ["rl.kl_coef=0.1", "train_parameters.lora_peft_config={init_lora_weights: false}"]),
        ("online_dpo", ["train_parameters.lora_peft_config={bias: all}"]),
        ("online_dpo", ["rl.kl_coef=0.1", "rl.kl_in=reward"]),
        ("gdpo", ["rl.kl_coef=0.1", "rl.kl_in=reward"]),
        ("gdpo", ["rl.missing_end_penalty=0.5"]),
        ("gdpo", ["rl.algorithm.dynamic_sampling=True"]),
        ("ppo", ["rl.group_size=1", "rl.algorithm.dynamic_sampling=True"]),
        ("ppo", ["rl.critic.warmup_steps=4"]),
        ("reinforce_pp", ["rl.group_size=1", "rl.prompts_per_step=1"]),
        ("reinforce", ["rl.group_size=1", "rl.algorithm.whiten_advantages=True", "rl.prompts_per_step=1"]),
        ("online_dpo", ["rl.algorithm.preference=ipo", "rl.algorithm.label_smoothing=0.1"]),
        ("online_dpo", ["rl.off_policy_mask=0.5"]),
        ("grpo", ["rl.correction.preset=bypass", "rl.correction.level=token"]),
        ("grpo", ["rl.overlong_buffer_tokens=9"]),
        ("rloo", [f"rl.environment={TOOL}", "rl.overlong_buffer_tokens=4"]),
        ("grpo", [f"rl.environment={TOOL}", "rl.algorithm=remax"]),
        ("pass_at_k", ["rl.algorithm.pass_k=4"]),
        ("clip_cov", ["rl.algorithm.covariance_low=9.0"]),
        ("gmpo", ["rl.top_entropy_quantile=0.2"]),
        ("grpo", ["engine.max_model_len=65"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[-1],
)
def test_what_cannot_be_carried_out_or_would_change_nothing_is_refused_by_name(
    files, tmp_path, algorithm, overrides
):
    with pytest.raises(ConfigError) as caught:
        check_rl(config_of(files, tmp_path / "refused", algorithm, overrides))
    assert overrides[-1].partition("=")[0] in str(caught.value)


def test_rewards_of_one_name_are_refused(files, tmp_path):
    twice = ["rl.rewards={a.py:score: 1, b.py:score: 1}"]
    with pytest.raises(ConfigError, match="score"):
        check_rl(config_of(files, tmp_path / "refused", overrides=twice))


def test_penalties_are_fine_where_completions_need_not_be_the_policys(files, tmp_path):
    overrides = ["rl.sampling_params={repetition_penalty: 1.1, top_p: 0.9}"]
    check_rl(config_of(files, tmp_path / "cut", "best_of_k", overrides))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "lora", "world_size", "ratio"),
    [
        ("tis", "null", 2, "correction/ratio_max"),
        ("bypass", "{r: 4, target_modules: [q_proj, v_proj]}", 1, "policy/ratio_max"),
    ],
)
def test_truncated_completions_are_trained_on_as_they_were_drawn(
    files, tmp_path, capsys, forks_ranks, preset, lora, world_size, ratio
):
    overrides = [
        "rl.sampling_params={max_tokens: 8, temperature: 0.9, top_p: 0.9, top_k: 30, min_p: 0.02}",
        "rl.kl_coef=0.05",
        f"rl.correction.preset={preset}",
        f"train_parameters.lora_peft_config={lora}",
        "rl.rollout.save_tokens=True",
        "rl.max_steps=3",
    ]
    config = config_of(files, tmp_path / "cut", overrides=overrides)
    forked(reinforce, config, world_size=world_size)
    metrics = lines(tmp_path / "cut" / "metrics.jsonl")[1:]
    assert [line["step"] for line in metrics] == [1, 2, 3]
    for line in metrics:
        assert line[ratio] == pytest.approx(1, abs=1e-4)
        assert line.get("sampler/logprob_gap_max", 0) < 1e-4
        assert line["sampler/outside_support"] == 0
    # The reference has probabilities for all tokens, and the policy draws from nine tenths of them at most.
    assert metrics[0]["reference/kl"] > 0.1
    assert "sampler/outside_support" in METRICS
    assert main(["replay", str(tmp_path / "cut"), "--step", "3"]) == 0
    assert "  weights              as logged" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "engines", "cuts"), [(2, 2, ""), (1, 1, ", top_p: 0.9, top_k: 4")])
def test_completions_under_a_grammar_are_trained_on_as_they_were_drawn(
    files, tmp_path, world_size, engines, cuts
):
    overrides = [
        f"rl.sampling_params={{max_tokens: 8, structured_outputs: {{regex: '[b-k]{{2,5}}'}}{cuts}}}",
        "rl.correction.preset=tis",
        f"engine.data_parallel_size={engines}",
        "rl.rollout.save_tokens=True",
        "rl.max_steps=2",
    ]
    forked(reinforce, config_of(files, tmp_path / "cut", overrides=overrides), world_size=world_size)
    metrics = lines(tmp_path / "cut" / "metrics.jsonl")[1:]
    assert [line["step"] for line in metrics] == [1, 2]
    for line in metrics:
        assert line["correction/ratio_max"] == pytest.approx(1, abs=1e-4)
        assert line["sampler/logprob_gap_max"] < 1e-4
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(files / "model", dtype=torch.float64)
    first = [row for row in lines(tmp_path / "cut" / "rollouts.jsonl") if row["train_step"] == 1]
    over_all, gaps = [], []
    for row in first:
        written, num_prompt = row["token_ids"], len(row["prompt_token_ids"])
        logits = model(torch.tensor([row["prompt_token_ids"] + written])).logits[0]
        for at, token in enumerate(written):
            # The grammar allows two to five letters from b to k, then an end token of the tokenizer or of the model.
            kept = [*range(3, 13)] * (at < 5) + [0, 2] * (at >= 2)
            scores = logits[num_prompt + at - 1]
            over_all.append(abs(scores.log_softmax(-1)[token].item() - row["sampler_logprobs"][at]))
            if not cuts:
                found = scores[kept].log_softmax(-1)[kept.index(token)].item()
                gaps.append(abs(found - row["sampler_logprobs"][at]))
    assert max(gaps, default=0.0) < 1e-5
    assert sum(over_all) / len(over_all) > 0.5


@pytest.mark.slow
def test_a_quantised_engine_that_speculates_is_corrected_and_counted(files, tmp_path, capsys):
    drafts = "{method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 2, prompt_lookup_min: 1}"
    overrides = [
        "engine.dtype=auto",
        "engine.quantization=int8",
        f"engine.speculative_config={drafts}",
        "rl.sampling_params={max_tokens: 16}",
        "rl.max_steps=2",
    ]
    reinforce(config_of(files, tmp_path / "int8", overrides=overrides))
    said = [line for line in capsys.readouterr().err.splitlines() if "rl.correction.preset" in line]
    assert len(said) == 1
    assert "tis" in said[0]
    assert "int8" in said[0]
    for line in lines(tmp_path / "int8" / "metrics.jsonl")[1:]:
        assert 0 <= line["sampler/accepted_tokens"] <= 3
        assert 1e-4 < line["sampler/logprob_gap_max"] < 1
        assert line["correction/weight_max"] <= 2
    assert "sampler/accepted_tokens" in METRICS


@pytest.mark.slow
def test_transformers_samples_what_the_trainer_computes(files, tmp_path):
    overrides = [
        "engine.inference=transformers",
        "engine={}",
        "rl.sampling_params={max_tokens: 8, temperature: 0.7, top_p: 0.9}",
        "rl.max_steps=2",
        "rl.correction.preset=tis",
    ]
    reinforce(config_of(files, tmp_path / "hf", overrides=overrides))
    metrics = lines(tmp_path / "hf" / "metrics.jsonl")[1:]
    assert [line["step"] for line in metrics] == [1, 2]
    assert all(line["sampler/logprob_gap_max"] < 1e-4 for line in metrics)


CONTROL = """
from dataclasses import replace
from vectorlm.algorithms import get_algorithm

GRPO = get_algorithm("grpo")
FLIPPED = replace(GRPO, name="flipped", advantages=lambda scores, knobs: -GRPO.advantages(scores, knobs))
"""


def gain(files, output, algorithm, reward):
    """Train for sixteen steps; return the increase of the share of vowels."""
    overrides = [
        f'rl.rewards={{"{files}/rewards.py:{reward}": 1.0}}',
        "rl.max_steps=16",
        "rl.group_size=16",
        "rl.save_every=100",
        "rl.max_tokens_per_micro_batch=2048",
        "train_parameters.optimizer.lr=3e-3",
        "evaluation.every=100",
    ]
    forked(reinforce, config_of(files, output, algorithm, overrides), world_size=1)
    # Measure the true reward, also if the run trained on another one.
    rewards = {}
    exec(REWARD, rewards)
    rows = lines(output / "rollouts.jsonl")

    def mean(steps):
        found = [rewards["vowels"](row["completion"]) for row in rows if row["train_step"] in steps]
        return sum(found) / len(found)

    return mean(range(13, 17)) - mean(range(1, 4))


@pytest.mark.long
def test_rewards_teach_flipped_advantages_unteach_and_shuffled_rewards_do_neither(files, tmp_path):
    (files / "control.py").write_text(CONTROL)
    taught = gain(files, tmp_path / "taught", "grpo", "vowels")
    untaught = gain(files, tmp_path / "untaught", f"{files}/control.py:FLIPPED", "vowels")
    noise = gain(files, tmp_path / "noise", "grpo", "shuffled")
    # One token in ten of a random model is a vowel.
    assert taught > 0.3
    assert untaught < -0.03
    assert abs(noise) < taught / 3
