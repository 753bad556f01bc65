"""Whole runs of models split over ranks: equal to one rank, killed, and resumed in other layouts."""

import shutil
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from kit.families import FAMILIES, save_family
from kit.rank_processes import forked, on_ranks, save_tiny_llama
from kit.rl_runs import (
    ONE_AT_A_TIME,
    config_of,
    cut_after_step_2,
    lines,
    numbers,
    save_files,
    stop_after_step_2,
)
from kit.sft_runs import are_equal, make_config, train, weights_of
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from vectorlm.cli import main
from vectorlm.errors import ConfigError
from vectorlm.runs.preflight.checked import preflight
from vectorlm.runs.preflight.memory import plan_of_config
from vectorlm.runs.preflight.memory_plan import plan_memory
from vectorlm.runs.reinforcement import reinforce

TENSOR, EXPERT = "train_parameters.tensor_parallel=2", "train_parameters.expert_parallel=2"
NAMES = ("policy/loss", "policy/grad_norm", "reward/mean", "eval/accuracy", "critic/loss", "reference/kl")
NAMES += (
    "policy/router_aux_loss",
    "policy/routes_differ",
    "sft/loss",
    "teacher/loss",
    "teacher/kl",
    "perf/trained_tokens",
)
LORA = "train_parameters.lora_peft_config={r: 4, target_modules: [q_proj, o_proj, down_proj]}"
PPO = ["rl.critic.lr=1e-3", "rl.kl_coef=0.05", "rl.kl_in=reward"]


def with_two_key_heads(files, family=None):
    """Replace the model of `files` by a Llama, or a model of another family, with heads that two ranks can split."""
    folder = files / "model"
    shutil.rmtree(folder)
    save_tiny_llama(folder, hidden_size=64, num_key_value_heads=2)
    if family is not None:
        settings = {**FAMILIES[family].settings, "num_key_value_heads": 2}
        save_family(replace(FAMILIES[family], settings=settings), folder)
    return files


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return with_two_key_heads(save_files(tmp_path_factory.mktemp("dense")))


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return with_two_key_heads(save_files(tmp_path_factory.mktemp("experts")), "Qwen3-MoE")


@pytest.fixture(scope="module")
def alone(files, tmp_path_factory):
    """Return the folder of a GRPO run on one rank."""
    return run(files, tmp_path_factory.mktemp("alone") / "alone", 1)


def run(files, output, world_size, *overrides, algorithm="grpo"):
    config = config_of(files, output, algorithm, [*ONE_AT_A_TIME, *overrides])
    forked(reinforce, config, world_size=world_size)
    return output


def assert_alike(output, expected):
    """Check that runs have equal rollouts and, up to rounding, equal numbers, and the engine the trainer's weights."""
    texts, wanted = (
        [row["completion"] for row in lines(run / "rollouts.jsonl")] for run in (output, expected)
    )
    assert texts == wanted
    for found, line in zip(numbers(output), numbers(expected), strict=True):
        names = [name for name in NAMES if name in line]
        assert [found[name] for name in names] == pytest.approx(
            [line[name] for name in names], rel=1e-3, abs=1e-6
        )
        assert found.get("sampler/logprob_gap_max", 0.0) < 1e-4


@pytest.mark.slow
def test_grpo_with_split_matrices_is_grpo_on_one_rank_and_goes_on_when_killed(files, alone, tmp_path):
    split = run(files, tmp_path / "split", 2, TENSOR, "engine.transport=bucketed")
    assert_alike(split, alone)
    cut = tmp_path / "cut"
    cut_after_step_2(split, cut)
    run(files, cut, 2, TENSOR, "engine.transport=bucketed")
    assert are_equal(weights_of(split), weights_of(cut))
    assert numbers(split) == numbers(cut)
    assert (
        main(["export", str(split / "checkpoints/step-00000004"), "--output", str(tmp_path / "model")]) == 0
    )
    assert are_equal(weights_of(split), weights_of(tmp_path / "model"))


@pytest.mark.slow
def test_grpo_with_split_experts_is_grpo_on_one_rank(experts, tmp_path):
    """The runs replay the engine's routes and train with the load-balancing loss."""
    replayed = ["rl.router_replay=engine", "train_parameters.router_aux_loss_coef=0.1"]
    expected = run(experts, tmp_path / "alone", 1, *replayed)
    both = run(experts, tmp_path / "both", 2, TENSOR, EXPERT, "engine.transport=pull", *replayed)
    assert_alike(both, expected)
    assert all("policy/router_aux_loss" in line for line in numbers(both)[1:])


@pytest.mark.long
def test_split_experts_replay_the_choice_of_the_old_policy(experts, tmp_path):
    steps = ["rl.router_replay=old_policy", "rl.num_mini_batches=2", "rl.num_epochs=2"]
    expected = run(experts, tmp_path / "alone", 1, *steps)
    assert_alike(run(experts, tmp_path / "split", 2, EXPERT, *steps), expected)


@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (2, (TENSOR, "engine.transport=pull")),
        (2, (TENSOR, "engine.transport=push")),
        (2, (EXPERT, "engine.transport=bucketed")),
        (4, (TENSOR, "engine.transport=pull")),
    ],
    ids=str,
)
def test_experts_swap_with_every_transport(experts, tmp_path, world_size, overrides):
    expected = run(experts, tmp_path / "alone", 1)
    assert_alike(run(experts, tmp_path / "split", world_size, *overrides), expected)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["merged", "adapter"])
def test_adapters_of_split_matrices_swap(files, tmp_path, mode):
    adapters = [LORA, f"engine.lora_mode={mode}"]
    expected = run(files, tmp_path / "alone", 1, *adapters)
    assert_alike(run(files, tmp_path / "split", 2, TENSOR, *adapters), expected)


@pytest.mark.long
def test_a_critic_and_a_reference_are_not_split_and_a_run_goes_on_in_another_layout(files, tmp_path):
    expected = run(files, tmp_path / "alone", 1, *PPO, algorithm="ppo")
    split = run(files, tmp_path / "split", 2, TENSOR, *PPO, algorithm="ppo")
    assert_alike(split, expected)
    for world_size, overrides in ((1, ()), (2, ()), (4, (TENSOR,))):
        cut = tmp_path / f"cut-{world_size}"
        cut_after_step_2(split, cut)
        run(files, cut, world_size, *overrides, *PPO, algorithm="ppo")
        assert_alike(cut, expected)


@pytest.mark.long
def test_a_teacher_reward_models_and_texts_beside_completions_change_nothing(files, tmp_path):
    scorer = AutoModelForSequenceClassification.from_pretrained(files / "model", num_labels=1)
    scorer.config.pad_token_id = 0
    for folder, model in (
        ("scorer", scorer),
        ("teacher", AutoModelForCausalLM.from_pretrained(files / "model")),
    ):
        shutil.copytree(files / "model", tmp_path / folder)
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(1.5)
        model.save_pretrained(tmp_path / folder)
    ids = [list(range(start, start + 8)) for start in range(2, 18)]
    rows = [{"input_ids": row, "labels": [-100] * 3 + row[3:]} for row in ids]
    Dataset.from_list(rows).save_to_disk(tmp_path / "texts")
    settings = [
        f"rl.sft={{dataset: {tmp_path}/texts, rows_per_step: 4}}",
        f"rl.teacher={{model: {tmp_path}/teacher, kind: full, coef: 0.1}}",
        f"rl.reward_models={{{tmp_path}/scorer: 0.5}}",
        "rl.kl_coef=0.05",
        "rl.num_mini_batches=2",
    ]
    expected = run(files, tmp_path / "alone", 1, *settings)
    for world_size in (2, 4):
        assert_alike(run(files, tmp_path / f"split-{world_size}", world_size, TENSOR, *settings), expected)


@pytest.mark.long
def test_a_killed_rank_ends_the_run_and_the_same_command_goes_on(files, alone, tmp_path):
    config = config_of(files, tmp_path / "run", overrides=[*ONE_AT_A_TIME, TENSOR])
    with pytest.raises(AssertionError, match="died"):
        forked(stop_after_step_2, config)
    forked(reinforce, config)
    assert_alike(tmp_path / "run", alone)


@pytest.fixture(scope="module")
def texts(inputs, tmp_path_factory):
    """Return the inputs of fine-tuning runs, with a model that two ranks can split."""
    folder = tmp_path_factory.mktemp("texts") / "inputs"
    shutil.copytree(inputs, folder)
    return with_two_key_heads(folder)


def losses_of(output):
    names = ("train/loss", "train/grad_norm", "eval/loss")
    return [[line.get(name, 0.0) for name in names] for line in lines(output / "metrics.jsonl")]


@pytest.mark.slow
def test_fine_tuning_with_split_matrices_is_that_of_one_rank_and_goes_on_in_other_layouts(texts, tmp_path):
    def fine_tune(name, world_size, num_micro_batches, **changes):
        config = make_config(
            texts,
            tmp_path / name,
            checkpointing_enabled=True,
            gradient_accumulation_steps=num_micro_batches,
            **changes,
        )
        on_ranks(world_size, train, config)
        return tmp_path / name

    alone = fine_tune("alone", 1, 4)
    split = fine_tune("split", 2, 4, tensor_parallel=2)
    for line, expected in zip(losses_of(split), losses_of(alone), strict=True):
        assert line == pytest.approx(expected, rel=1e-5)
    for name, layout in (("same", (2, 4, 2)), ("sharded", (2, 2, 1))):
        world_size, num_micro_batches, size = layout
        shutil.copytree(split, tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints" / "step-00000006")
        fine_tune(name, world_size, num_micro_batches, tensor_parallel=size)
        if name == "same":
            assert are_equal(weights_of(tmp_path / name), weights_of(split))
        torch.testing.assert_close(weights_of(tmp_path / name), weights_of(split), rtol=1e-4, atol=1e-5)


REFUSED = {
    "tensor_parallel": (3, (), "num_key_value_heads, 2"),
    "expert_parallel": (2, (TENSOR,), "has none"),
    "context_parallel": (2, (TENSOR,), "tensor_parallel"),
    "exact": ("true", (TENSOR,), "tensor_parallel"),
    "compile": ("true", (TENSOR,), "tensor_parallel"),
    "sharding_strategy": ("NO_SHARD", (TENSOR,), "tensor_parallel"),
    "engine.quantization": ("int8", (TENSOR,), "tensor_parallel"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_refused_by_name_before_anything_starts(files, tmp_path, name, capsys):
    value, others, text = REFUSED[name]
    config_of(files, tmp_path / "run")
    path = files / "run.yaml"
    setting = name if "." in name else f"train_parameters.{name}"
    sets = [word for item in (*others, f"{setting}={value}") for word in ("--set", item)]
    assert main(["check", str(path), "--world_size", "6" if value == 3 else "2", *sets]) != 0
    said = capsys.readouterr().err
    assert setting in said
    assert text in said


def test_sizes_that_do_not_divide_the_ranks_are_refused(experts, tmp_path):
    def problem(world_size, *overrides):
        config = config_of(experts, tmp_path / "run", overrides=overrides)
        with pytest.raises(ConfigError) as caught:
            preflight(config, world_size)
        return str(caught.value)

    assert "tensor_parallel=2" in problem(3, TENSOR)
    assert "expert_parallel=4" in problem(4, "train_parameters.expert_parallel=4")
    assert "expert_parallel=3" in problem(6, TENSOR, "train_parameters.expert_parallel=3")


def test_the_memory_plan_divides_what_is_split(experts, tmp_path):
    config = config_of(experts, tmp_path / "run", overrides=[TENSOR, EXPERT])
    demand = plan_of_config(config, 4, device_bytes=80 << 30, ranks_per_node=4).demand
    assert (demand.tensor_parallel, demand.expert_parallel) == (2, 2)

    def bytes_of(tensor_parallel, expert_parallel):
        both = {"tensor_parallel": tensor_parallel, "expert_parallel": expert_parallel}
        rows = plan_memory(replace(demand, gathers_once=False, **both)).rows
        return {row.name: row.training for row in rows}

    whole, matrices, only_experts = bytes_of(1, 1), bytes_of(2, 1), bytes_of(1, 2)
    assert matrices["activations"] < whole["activations"]
    assert matrices["gathered weights"] < only_experts["gathered weights"] < whole["gathered weights"]
    # Both ranks of a pair have the whole embeddings.
    assert whole["weights"] == only_experts["weights"] < matrices["weights"]
