"""The Countdown problems and their reference solutions."""

import sys
from itertools import permutations, product
from pathlib import Path

import pytest

from vectorlm.errors import DatasetError
from vectorlm.rl.rewards.countdown import countdown_reward

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from countdown_problems import CountdownProblem, CountdownRules, generate_problems, solve


def test_a_problem_reads_as_prompt_and_completion():
    problem = CountdownProblem((3, 5, 8), 6, "3+8-5")
    assert problem.prompt == "Using the numbers 3, 5, 8 make 6."
    assert problem.completion == " <answer>3+8-5</answer>"
    assert problem.key == CountdownProblem((8, 3, 5), 6, "8-5+3").key


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
    """Every whole number from 0 that three numbers reach, by evaluating both shapes of expression as Python."""
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


def test_the_solver_prefers_plain_expressions_in_the_order_asked():
    assert solve((3, 5, 8))[6] == "3+8-5"
    assert solve((8, 5, 3))[6] == "8+3-5"
    assert solve((3, 5, 8))[16] == "3+5+8"
    assert solve((3, 5, 8))[4] == "8/(5-3)"
