"""Signatures of reward functions in TRL's form, and their parameters in every position."""

import functools
import json

import pytest

from vectorlm.data.prompts import read_prompts
from vectorlm.rl.rewards.registry import RewardSignature
from vectorlm.rl.rewards.runner import Scorable, run_reward
from vectorlm.runs.preflight.user_code import signature_problems

ANSWERS = [Scorable("2", "1 + 1", (5,), {"answer": "2"}), Scorable("5", "2 + 2", (6, 7), {"answer": "4"})]
RIGHT = [1.0, 0.0]


def score(reward, items=ANSWERS):
    results = run_reward(reward, items)
    assert [result.error for result in results] == [None] * len(items)
    return [result.reward for result in results]


def equal(texts, wanted):
    return [float(text == right) for text, right in zip(texts, wanted, strict=True)]


def test_trls_signature_gets_lists_by_name():
    def reward(prompts, completions, answer, **kwargs):
        assert prompts == ["1 + 1", "2 + 2"]
        assert kwargs == {"completion_ids": [[5], [6, 7]]}
        return equal(completions, answer)

    assert score(reward) == RIGHT


def test_parameters_may_stand_in_any_order():
    def last(answer, completions):
        return equal(completions, answer)

    def by_keyword(*, answer, completions, trainer_state=None, **kwargs):
        assert trainer_state is None
        return equal(completions, answer)

    def one(answer, prompt, completion):
        return float(completion == answer and prompt != completion)

    def by_place(completion, answer, /):
        return float(completion == answer)

    def without_one(prompt, answer):
        return float(prompt == "1 + 1" and answer == "2")

    assert [score(function) for function in (last, by_keyword, one, by_place)] == [RIGHT] * 4
    assert score(without_one) == [1.0, 0.0]


def test_what_names_neither_completions_nor_a_completion():
    def lengths(completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    def other_spelling(completions_ids, answer):
        return [float(len(ids)) for ids in completions_ids]

    def of_prompts(prompts, **kwargs):
        return equal([text[-1] for text in prompts], kwargs["answer"])

    def of_anything(**kwargs):
        return equal(kwargs["completions"], kwargs["answer"])

    assert score(lengths) == score(other_spelling) == [1.0, 2.0]
    assert score(of_prompts) == [0.0, 0.0]
    assert score(of_anything) == RIGHT


def test_methods_partials_and_coroutines_keep_their_names():
    class Judge:
        def __call__(self, prompts, completions, answer):
            return equal(completions, answer)

    def graded(right, completions, answer):
        return [right * reward for reward in equal(completions, answer)]

    async def asked(prompts, completions, answer, **kwargs):
        return equal(completions, answer)

    assert score(Judge()) == score(asked) == RIGHT
    assert score(functools.partial(graded, 3.0)) == [3.0, 0.0]


@pytest.mark.parametrize(
    "function",
    [
        "def reward(completion, scale=1):\n    return scale",
        "def reward(completion, **columns):\n    return columns['scale']",
        "async def reward(completion, scale, answer):\n    return scale + 0 * len(answer)",
        "def reward(completions, scale=1):\n    return [scale] * len(completions)",
        "def reward(completions, **columns):\n    return [columns['scale']] * len(completions)",
    ],
)
def test_an_argument_that_a_config_writes_goes_before_a_column(tmp_path, function):
    (tmp_path / "own.py").write_text(function + "\n")
    item = Scorable("4", "2 + 2", (1,), {"scale": 2.0, "answer": "4"})
    assert score(f"{tmp_path / 'own.py'}:reward(scale=3)", [item]) == [3.0]


def test_completions_of_messages_are_messages_and_none_is_not_applicable():
    question = [{"role": "user", "content": "2 + 2?"}]

    def reward(completions, **kwargs):
        return [
            1.0 if completion[0] == {"role": "assistant", "content": "4"} else None
            for completion in completions
        ]

    def one(completion, prompt):
        return float(completion == "4" and prompt is question)

    items = [Scorable("4", question, (1,), {}), Scorable("5", question, (2,), {})]
    first, second = (result.reward for result in run_reward(reward, items))
    assert first == 1.0
    assert second != second  # NaN
    assert score(one, items) == RIGHT
    begun = Scorable("", [*question, {"role": "assistant", "content": "4"}], (1,), {})
    assert run_reward(reward, [begun])[0].reward == 1.0, (
        "the completion goes on with what the prompt has begun"
    )


ASKED, SAID, TOLD = ({"role": role, "content": role} for role in ("user", "assistant", "tool"))
RULES, SHOT = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "shown"}
TURNS = [SAID, TOLD, SAID]


@pytest.mark.parametrize(
    ("prompt", "chat"),
    [
        pytest.param(
            [RULES, ASKED, SHOT, ASKED], [RULES, ASKED, SHOT, ASKED, *TURNS], id="an example before"
        ),
        pytest.param([ASKED, {"role": "assistant", "content": "assi"}], [ASKED, *TURNS], id="begun"),
        pytest.param([ASKED], [ASKED, RULES, ASKED, *TURNS], id="reset adds"),
        pytest.param([ASKED], [{"role": "user", "content": "user, as changed"}, *TURNS], id="reset changes"),
        pytest.param([RULES, ASKED], [ASKED, *TURNS], id="an agent's own chat"),
    ],
)
def test_a_list_has_every_turn_of_a_chat_as_its_own_message(prompt, chat):
    items = [Scorable("all turns", prompt, (1,), {}, chat, 2), Scorable("4", prompt[:1], (1,), {})]
    found = []

    def reward(completions):
        found.extend(completions)
        return [1.0] * len(completions)

    assert score(reward, items) == [1.0, 1.0]
    assert found == [TURNS, [{"role": "assistant", "content": "4"}]]


def test_a_column_never_hides_the_completion():
    """Datasets of prompts often have a column with a completion to learn from."""
    columns = {"completion": "from the dataset", "completions": "likewise", "prompt": "likewise"}
    items = [Scorable("4", "2 + 2", (1,), columns)]

    def one(completion, prompt):
        return float((completion, prompt) == ("4", "2 + 2"))

    def several(completions, prompts, **kwargs):
        assert "completion" not in kwargs
        return [float(completions == ["4"] and prompts == ["2 + 2"])]

    assert score(one, items) == score(several, items) == [1.0]


@pytest.mark.parametrize(
    ("reward", "missing"),
    [
        (lambda prompts, completions, answer, **kwargs: 0, []),
        (lambda completion, answer, prompt: 0, []),
        (lambda text, answer=None, trainer_state=None: 0, []),
        (lambda completions, answr, trainer_state: 0, ["answr", "trainer_state"]),
        (lambda text, prompt, response: 0, ["response"]),
        (lambda *arguments, **kwargs: 0, []),
    ],
)
def test_a_required_parameter_that_nothing_supplies_is_named(reward, missing):
    assert RewardSignature.of(reward).missing(["answer"]) == missing


def test_verls_compute_score_is_called_as_verl_calls_it(tmp_path):
    """verl's dataset columns and functions work without changes."""
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "2 + 2?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": 0, "tools_kwargs": {"add": {"create_kwargs": {"a": 1}}}},
    }
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    (record,) = read_prompts(tmp_path / "train.jsonl")

    # Environments get the arguments of verl's tools by name.
    assert record.columns["tools_kwargs"] == {"add": {"create_kwargs": {"a": 1}}}

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
        assert (data_source, extra_info["index"]) == ("openai/gsm8k", 0)
        return float(solution_str == ground_truth)

    def detailed(data_source, solution_str, ground_truth, extra_info):
        is_right = solution_str == ground_truth
        return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": solution_str}

    items = [Scorable(text, record.prompt, (5,), record.columns) for text in ("4", "5")]
    assert not list(signature_problems(compute_score, [record], "rl.prompts"))
    assert score(compute_score, items) == RIGHT
    assert score(detailed, items) == [1.0, -1.0]
    assert [result.logged for result in run_reward(detailed, items)] == [
        {"acc": True, "pred": "4"},
        {"acc": False, "pred": "5"},
    ]
