"""The example that makes a first run's model and data."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from vectorlm.data.loader import load_dataset
from vectorlm.rl.rewards.countdown import countdown_reward

SCRIPT = Path(__file__).parents[2] / "examples" / "make_countdown.py"


def make(folder, *options):
    """Run the script with small numbers."""
    specification = importlib.util.spec_from_file_location("make_countdown", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    sizes = ["--num_train", "300", "--num_eval", "40", "--num_questions", "30"]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        specification.loader.exec_module(module)
        patch.setattr(sys, "argv", [str(SCRIPT), "--output_dir", str(folder), *sizes, *options])
        module.main()
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("countdown"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder / "model")


@pytest.fixture(scope="module")
def prompt_records(folder):
    return [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]


def problem_keys(dataset, tokenizer):
    """Read (sorted numbers, target) back from the text of each row."""
    keys = []
    for row in dataset:
        prompt = tokenizer.decode(row["input_ids"], skip_special_tokens=True).split(".")[0]
        numbers, target = prompt.removeprefix("Using the numbers ").split(" make ")
        keys.append((tuple(sorted(map(int, numbers.split(", ")))), int(target)))
    return keys


def test_no_problem_to_learn_from_is_asked(folder, tokenizer, prompt_records):
    training = set(problem_keys(load_dataset(folder / "train"), tokenizer))
    held_out = problem_keys(load_dataset(folder / "eval"), tokenizer)
    asked = [
        (tuple(sorted(prompt_record["numbers"])), prompt_record["target"]) for prompt_record in prompt_records
    ]
    assert len(held_out) == len(set(held_out)) == 40
    assert asked == held_out[:30]
    assert not training & set(held_out)


def test_labels_hold_a_right_answer_and_the_end_token_alone(folder, tokenizer, prompt_records):
    dataset = load_dataset(folder / "eval")
    assert dataset["id"][:] == list(range(40))
    for prompt_record, row in zip(prompt_records, dataset, strict=False):
        assert row["attention_mask"] == [1] * len(row["input_ids"])
        num_prompt = row["labels"].count(-100)
        assert row["input_ids"][:num_prompt] == tokenizer(prompt_record["prompt"])["input_ids"]
        assert row["labels"][num_prompt:] == row["input_ids"][num_prompt:]
        assert row["labels"][-1] == tokenizer.eos_token_id
        completion = tokenizer.decode(row["labels"][num_prompt:-1])
        assert countdown_reward(completion, **prompt_record) == 1.0


def test_the_tokenizer_is_short_on_questions_and_lossless_on_other_text(tokenizer):
    prompt_record = "Using the numbers 3, 15, 8 make 26."
    assert len(tokenizer(prompt_record)["input_ids"]) == 10
    for text in (prompt_record, " <answer>(3+15)*8</answer>", "Any other text:\n  007, 1234 ~ {x}"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert {tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token} == {"<pad>", "<s>", "</s>"}


def test_a_question_asked_as_chat_has_the_tokens_of_the_text(tokenizer):
    prompt_record = "Using the numbers 3, 15, 8 make 26."
    chat = [{"role": "user", "content": prompt_record}]
    tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tokens == tokenizer(prompt_record)["input_ids"]


def test_the_model_fits_the_tokenizer_and_vllm(folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.head_dim in (32, 64, 96, 128)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert 500_000 < model.num_parameters() < 2_000_000


def test_the_same_seed_writes_the_same_files_and_another_seed_does_not(folder, tmp_path):
    def contents(root):
        paths = sorted(path for path in root.rglob("*") if path.is_file())
        return {path.relative_to(root): path.read_bytes() for path in paths}

    first = contents(folder)
    assert contents(make(tmp_path / "again")) == first
    assert contents(make(tmp_path / "again")) == first
    other = contents(make(tmp_path / "other", "--seed", "1"))
    assert other[Path("eval.jsonl")] != first[Path("eval.jsonl")]
    assert other[Path("model/model.safetensors")] != first[Path("model/model.safetensors")]
