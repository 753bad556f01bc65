"""Runs on pairs and on steps: their files, resumption, and equal results on two ranks."""

import math
import shutil

import pytest
import torch
from datasets import Dataset
from kit.batches import rollout_of
from kit.metrics_page import METRICS
from kit.rank_processes import on_ranks, save_tiny_llama
from kit.sft_runs import SAMPLER, are_equal, assert_last_answers_are_those_of, lines, train, weights_of
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from vectorlm.cli import main
from vectorlm.errors import ConfigError
from vectorlm.ranks.topology import Topology
from vectorlm.rl.rewards.reward_model import RewardModel
from vectorlm.runs.config.load import load_config
from vectorlm.runs.preflight.checked import preflight
from vectorlm.train.objective import Steps
from vectorlm.train.shard import load_sharded

CONFIG = """
model: {inputs}/model
train_parameters:
  output_dir: {output}
  max_seq_len: 16
  epochs: 3
  seed: 3
  optimizer: {{lr: 0.003}}
  gradient_accumulation_steps: 2
  logging_steps: 5
  checkpointing_enabled: True
  save_frequency: 5
dataset: {{train_bs: 2, eval_bs: 4, train_ds: {inputs}/pairs, eval_ds: {inputs}/held_out}}
{section}
"""


def pairs(num_pairs, seed):
    """Return pairs: the chosen text counts on from its prompt, and the rejected text repeats one letter."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(num_pairs):
        start, length = torch.randint(2, 12, (2,), generator=generator).tolist()
        prompt = [start, start + 1, start + 2]
        good = [start + 3 + place for place in range(1 + length % 4)]
        bad = [start] * (1 + length % 3)
        found.append(
            {
                "input_ids": prompt + good + [0] + prompt + bad + [0],
                "labels": [-100] * 3 + good + [0] + [-100] * 3 + bad + [0],
                "seq_lengths": [4 + len(good), 4 + len(bad)],
                "pair_margin": 0.0,
            }
        )
    return found


def labelled(num_pairs, seed):
    """Return the pairs' texts as good and bad completions, each with its prompt and another row's completion."""
    texts, found = [], []
    for row in pairs(num_pairs, seed):
        first = row["seq_lengths"][0]
        for part, is_good in ((slice(first), 1.0), (slice(first, None), 0.0)):
            texts.append((row["input_ids"][part], row["labels"][part], is_good))
    for (ids, labels, is_good), (other, _, _) in zip(texts, [*texts[2:], *texts[:2]], strict=True):
        second = ids[:3] + other[3:]
        found.append(
            {
                "input_ids": ids + second,
                "labels": labels + [-100] * 3 + second[3:],
                "seq_lengths": [len(ids), len(second)],
                "is_good": is_good,
            }
        )
    return found


END = 27
"""The letter z, which ends a step."""


def solutions(num_rows, seed):
    """Return prompts with one to three steps of two letters: right steps count on, and wrong steps are x and x."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(num_rows):
        start, num_steps = torch.randint(2, 12, (2,), generator=generator).tolist()
        right = torch.randint(2, (1 + num_steps % 3,), generator=generator).tolist()
        ids, labels = [start, start + 1, start + 2], [-100] * 3
        for place, is_right in enumerate(right):
            following = start + 3 + 2 * place
            ids += [following, following + 1, END] if is_right else [25, 25, END]
            labels += [-100, -100, is_right]
        found.append({"input_ids": ids, "labels": labels, "num_steps": float(len(right))})
    return found


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    path = tmp_path_factory.mktemp("inputs")
    save_tiny_llama(path / "model")
    Dataset.from_list(pairs(17, 0)).save_to_disk(path / "pairs")
    Dataset.from_list(pairs(9, 1)).save_to_disk(path / "held_out")
    Dataset.from_list(labelled(9, 0)).save_to_disk(path / "labels")
    Dataset.from_list(labelled(5, 1)).save_to_disk(path / "held_out_labels")
    Dataset.from_list(solutions(17, 0)).save_to_disk(path / "steps")
    Dataset.from_list(solutions(9, 1)).save_to_disk(path / "held_out_steps")
    return path


def config_of(inputs, output, section, *overrides):
    path = output.with_suffix(".yaml")
    text = CONFIG.format(inputs=inputs, output=output, section=section)
    for word, rows in (("kto", "labels"), ("step_separator", "steps")):
        if word in section:
            text = text.replace("/pairs", f"/{rows}").replace("/held_out", f"/held_out_{rows}")
    path.write_text(text)
    return load_config(path, overrides)


SECTIONS = {
    "reward model": "reward_model: {center_coef: 0.01}",
    "steps": "reward_model: {step_separator: z}",
    "dpo": "preference: {loss: dpo, beta: 0.5}",
    "kto": "preference: {loss: kto, beta: 0.5}",
}


@pytest.fixture(
    scope="module",
    params=[
        "reward model",
        "dpo",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("steps", "kto")),
    ],
)
def finished(request, inputs, tmp_path_factory):
    """Return the section and the folder of a run on one rank, with checkpoints of steps 10 and 15."""
    output = tmp_path_factory.mktemp("finished") / "run"
    on_ranks(1, train, config_of(inputs, output, SECTIONS[request.param]))
    return SECTIONS[request.param], output


@pytest.mark.slow
def test_a_run_learns_which_text_is_better(finished):
    section, output = finished
    metrics = lines(output / "metrics.jsonl")
    held_out = [line for line in metrics if "eval/loss" in line]
    assert [line["step"] for line in held_out] == [0, 5, 10, 15]
    assert held_out[-1]["eval/loss"] < held_out[0]["eval/loss"]
    if "preference" in section:
        # The policy still equals the reference: KTO's loss is 1/2 and DPO's is log 2.
        start = 0.5 if "kto" in section else math.log(2)
        assert held_out[0]["eval/loss"] == pytest.approx(start, abs=1e-5)
    names = {name.partition("/")[2] for name in held_out[-1] if name.startswith("eval/")}
    assert {name for name in metrics[-1] if name != "step"} <= METRICS
    if "step_separator" in section:
        assert names == {"loss", *Steps.names}
        assert held_out[-1]["eval/step_accuracy"] > 0.9
        return
    if "kto" in section:
        assert names == {"loss", "chosen_reward", "rejected_reward", "kl"}
    else:
        assert names == {"loss", "chosen_reward", "rejected_reward", "pair_accuracy", "pair_margin"}
        assert held_out[-1]["eval/pair_accuracy"] == 1
    rewards = [held_out[-1][f"eval/{name}_reward"] for name in ("chosen", "rejected")]
    assert rewards[0] > rewards[1]


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(finished, inputs, tmp_path):
    section, whole = finished
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000015")
    on_ranks(1, train, config_of(inputs, tmp_path / "run", section))
    assert are_equal(weights_of(tmp_path / "run"), weights_of(whole))
    last = [lines(output / "metrics.jsonl")[-1] for output in (whole, tmp_path / "run")]
    same = [name for name in last[0] if name.startswith(("train/loss", "eval/"))]
    assert [last[0][name] for name in same] == [last[1][name] for name in same]


@pytest.mark.slow  # Two more ranks load torch.
def test_two_ranks_and_padded_rows_train_as_one_rank_does(finished, inputs, tmp_path):
    section, whole = finished
    changes = ["train_parameters.gradient_accumulation_steps=1", "train_parameters.pack_rows=False"]
    if section in (SECTIONS["steps"], SECTIONS["kto"]):
        changes = ["train_parameters.context_parallel=2"]
    on_ranks(2, train, config_of(inputs, tmp_path / "run", section, *changes))
    mine, theirs = (lines(output / "metrics.jsonl") for output in (tmp_path / "run", whole))
    for metric in [name for name in theirs[-1] if name.startswith(("train/loss", "eval/"))]:
        found = [line[metric] for line in mine if metric in line]
        # Over 15 steps, fp32 sums in another order round differently.
        assert found == pytest.approx([line[metric] for line in theirs if metric in line], abs=2e-4)


@pytest.mark.slow
def test_transformers_and_a_reward_of_a_run_read_the_reward_model(finished, inputs):
    section, output = finished
    if "center_coef" not in section:
        return
    model = AutoModelForSequenceClassification.from_pretrained(output / "final-model")
    texts = [torch.tensor(row["input_ids"]).split(row["seq_lengths"]) for row in pairs(9, 1)]
    with torch.no_grad():
        chosen, rejected = (
            torch.cat([model(input_ids=pair[place][None]).logits[:, 0] for pair in texts]) for place in (0, 1)
        )
    # The score is read before the EOS, even if the text has none.
    without_end = torch.stack([model(input_ids=pair[0][None, :-1]).logits[0, 0] for pair in texts])
    torch.testing.assert_close(without_end, chosen)
    last = lines(output / "metrics.jsonl")[-1]
    assert last["eval/chosen_reward"] == pytest.approx(chosen.mean().item(), abs=1e-5)
    assert last["eval/pair_margin"] == pytest.approx((chosen - rejected).mean().item(), abs=1e-5)
    words = ["".join(chr(95 + token) for token in pair[0][:-1]) for pair in texts]
    reward = RewardModel(
        str(output / "final-model"), lambda load: load(False), Topology(), None, max_tokens=64, max_length=16
    )
    rollouts = [rollout_of(word[:3], word[3:]) for word in words]
    assert reward(rollouts) == pytest.approx(chosen.tolist(), abs=1e-5)
    card = (output / "final-model" / "README.md").read_text()
    assert "text-classification" in card
    assert "AutoModelForSequenceClassification" in card


def rewards_of_steps(topology, path, texts, rule):
    model = RewardModel(
        str(path),
        lambda load: load_sharded(load, topology),
        topology,
        None,
        max_tokens=64,
        max_length=16,
        step_reward=rule,
    )
    return model([rollout_of(text[:3], text[3:]) for text in texts])


def test_a_reward_of_a_run_combines_what_transformers_reads_at_the_end_of_each_step(finished, inputs):
    section, output = finished
    if "step_separator" not in section:
        return
    model = AutoModelForSequenceClassification.from_pretrained(output / "final-model")
    expected, texts = [], []
    for row in solutions(9, 1):
        ids = row["input_ids"]
        ends = [place + 1 for place, token in enumerate(ids) if token == END]
        with torch.no_grad():
            scores = [model(input_ids=torch.tensor([ids[:end]])).logits.item() for end in ends]
        expected.append(torch.tensor(scores).sigmoid())
        texts.append("".join(chr(95 + token) for token in ids))
    right = [label == 1 for row in solutions(9, 1) for label in row["labels"] if label != -100]
    found = torch.cat(expected)
    last = lines(output / "metrics.jsonl")[-1]
    assert last["eval/right_probability"] == pytest.approx(found[right].mean().item(), abs=1e-5)
    error = found - torch.tensor(right).float()
    assert last["eval/step_brier"] == pytest.approx(error.square().mean().item(), abs=1e-5)
    assert last["eval/step_bias"] == pytest.approx(error.mean().item(), abs=1e-5)
    # The last step may lack the separator, and a policy may write the separator twice.
    texts[0], texts[1] = texts[0][:-1], texts[1] + "z"
    for rule, combine in (("min", min), ("mean", lambda x: sum(x) / len(x)), ("last", lambda x: x[-1])):
        (rewards,) = on_ranks(1, rewards_of_steps, output / "final-model", texts, rule)
        assert rewards == pytest.approx(
            [combine(probabilities.tolist()) for probabilities in expected], abs=1e-5
        )


@pytest.mark.slow  # Two more ranks load torch, and vLLM starts.
def test_the_engine_answers_with_the_weights_of_a_policy_that_learns_from_pairs(inputs, tmp_path):
    # vLLM's CPU attention needs heads of at least 32.
    model_path = save_tiny_llama(tmp_path / "model", hidden_size=64)
    config = config_of(inputs, tmp_path / "run", SECTIONS["dpo"], SAMPLER, f"model={model_path}")
    on_ranks(2, train, config)
    samples = lines(tmp_path / "run" / "samples.jsonl")
    assert [sample["train_step"] for sample in samples] == [0, 0, 4, 4, 8, 8, 9, 9]
    assert samples[-2]["options"] != samples[0]["options"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final-model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "final-model")
    assert_last_answers_are_those_of(model, tokenizer, samples[-2:])


@pytest.mark.slow  # Two more ranks load torch.
def test_adapters_and_head_of_a_reward_model_are_merged(inputs, tmp_path, capsys):
    lora = "train_parameters.lora_peft_config={r: 4, lora_alpha: 16, target_modules: all-linear}"
    config = config_of(
        inputs, tmp_path / "run", "reward_model: {}", lora, "train_parameters.optimizer.lr=0.01"
    )
    on_ranks(2, train, preflight(config, 2))
    expected = lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert expected["eval/pair_accuracy"] > 0.8
    texts = [torch.tensor(row["input_ids"]).split(row["seq_lengths"]) for row in pairs(9, 1)]
    for source in ("run", "run/final-model"):
        merged = tmp_path / source.replace("/", "-")
        assert main(["export", str(tmp_path / source), "--merge", "--output", f"{merged}-merged"]) == 0
        model = AutoModelForSequenceClassification.from_pretrained(f"{merged}-merged")
        with torch.no_grad():
            chosen = torch.cat([model(input_ids=pair[0][None]).logits[:, 0] for pair in texts])
        assert expected["eval/chosen_reward"] == pytest.approx(chosen.mean().item(), abs=1e-4)
    card = (tmp_path / "run" / "final-model" / "README.md").read_text()
    assert "rl.reward_models: {path/to/merged: 1.0}" in card


@pytest.mark.parametrize(
    ("section", "change", "text"),
    [
        ("", "train_parameters.epochs=1", "pairs.*texts"),
        ("reward_model: {}", 'reward_model.step_separator="\\n"', "pairs.*steps"),
        (
            "reward_model: {step_separator: z}",
            "dataset_preprocess={load_path: a, save_path: b, examples: steps}",
            "reward_model.step_separator='z'",
        ),
        ("reward_model: {step_separator: z}", "reward_model.center_coef=0.1", "reward_model.center_coef"),
        ("preference: {loss: dpo}", "preference.loss=kto", "pairs.*labels"),
        ("reward_model: {}", "preference={loss: dpo}", "preference"),
        ("preference: {loss: ipo}", "preference.label_smoothing=0.1", "preference.label_smoothing"),
        ("reward_model: {}", "train_parameters.lora_peft_config={task_type: CAUSAL_LM}", "task_type"),
        ("reward_model: {}", "train_parameters.sampler={prompts: [a]}", "train_parameters.sampler"),
    ],
)
def test_a_run_on_other_data_or_with_what_it_cannot_use_is_refused(inputs, tmp_path, section, change, text):
    with pytest.raises(ConfigError, match=text):
        preflight(config_of(inputs, tmp_path / "run", section, change), 1)
