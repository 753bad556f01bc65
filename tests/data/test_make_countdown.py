"""Countdown problems, their solutions, and the example that makes a first run's model and data."""

import json
import sys
from itertools import permutations, product
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from vectorlm.data.loader import load_dataset
from vectorlm.errors import DatasetError
from vectorlm.rl.rewards.countdown import countdown_reward

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import make_countdown
from countdown_problems import CountdownRules, generate_problems, solve


def make(folder, *options):
    """Run the script with small numbers."""
    sizes = ["--num_train", "300", "--num_eval", "40", "--num_questions", "30"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_countdown.py", "--output_dir", str(folder), *sizes, *options])
        make_countdown.main()
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


@pytest.mark.parametrize(
    "rules",
    [
        CountdownRules(),
        CountdownRules(num_numbers=4, highest=9, operators="+-*/", max_target=50),
        CountdownRules(num_numbers=2, lowest=0, highest=30, operators="-/"),
    ],
)
def test_every_reference_solution_earns_the_full_reward(rules):
    training, evaluation = generate_problems(60, 20, rules=rules, seed=3)
    for problem in training + evaluation:
        assert countdown_reward(problem.completion, numbers=problem.numbers, target=problem.target) == 1.0
        assert len(problem.numbers) == rules.num_numbers
        assert all(rules.lowest <= number <= rules.highest for number in problem.numbers)
        assert 1 <= problem.target <= rules.max_target
        assert set(problem.solution) - set("0123456789()") <= set(rules.operators)


def test_training_and_evaluation_share_no_problem_even_reordered():
    training, evaluation = generate_problems(1500, 100, rules=CountdownRules(highest=9), seed=0)
    held_out = {problem.key for problem in evaluation}
    assert len(held_out) == 100
    assert not held_out & {problem.key for problem in training}
    assert len({(problem.numbers, problem.target) for problem in training}) == 1500
    assert len({problem.key for problem in training}) < 1500


def test_more_problems_than_exist_are_refused():
    rules = CountdownRules(num_numbers=2, highest=3)
    with pytest.raises(DatasetError, match="500"):
        generate_problems(500, 0, rules=rules, seed=0)


def test_impossible_rules_are_refused():
    for rules in ({"lowest": 5, "highest": 4}, {"operators": "+**x"}, {"operators": ""}):
        with pytest.raises(DatasetError, match=next(iter(rules))):
            CountdownRules(**rules)


def _brute_force(numbers, operators):
    """Return all non-negative whole numbers that three numbers reach; evaluates both shapes of expression as Python."""
    reached = set()
    for (a, b, c), left, right in product(permutations(numbers), operators, operators):
        for text in (f"({a}{left}{b}){right}{c}", f"{a}{left}({b}{right}{c})"):
            try:
                value = eval(text)
            except ZeroDivisionError:
                continue
            if value > -1e-9 and abs(value - round(value)) < 1e-9:
                reached.add(round(value))
    return reached


@pytest.mark.parametrize("numbers", [(3, 5, 8), (2, 2, 7), (1, 6, 6), (4, 9, 12)])
@pytest.mark.parametrize("operators", ["+-", "+-*", "+-*/"])
def test_the_solver_reaches_exactly_what_brute_force_reaches(numbers, operators):
    assert set(solve(numbers, operators)) == _brute_force(numbers, operators)
