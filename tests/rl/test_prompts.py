"""The order of questions: every one once per pass, another order each pass, resumable at any place."""

from vectorlm.rl.prompts import PromptOrder
from vectorlm.types import PromptRecord

QUESTIONS = [PromptRecord(f"q{index}") for index in range(7)]


def prompts(order, count):
    return [prompt_record.prompt for prompt_record in order.take(count)]


def test_every_question_once_per_pass_in_a_new_order():
    order = PromptOrder(QUESTIONS, seed=3)
    first, second = prompts(order, 7), prompts(order, 7)
    assert sorted(first) == sorted(second) == [prompt_record.prompt for prompt_record in QUESTIONS]
    assert first != second


def test_any_cut_gives_the_same_order():
    whole = prompts(PromptOrder(QUESTIONS, seed=3), 20)
    order = PromptOrder(QUESTIONS, seed=3)
    assert prompts(order, 5) + prompts(order, 1) + prompts(order, 14) == whole
    order.position = 6
    assert prompts(order, 14) == whole[6:]


def test_the_seed_decides():
    assert prompts(PromptOrder(QUESTIONS, seed=4), 20) != prompts(PromptOrder(QUESTIONS, seed=3), 20)
