import itertools
import math
import statistics
from collections import Counter

import pytest

from vectorlm.rl.evaluation.grade import grade
from vectorlm.types import RewardResult


def results(rewards, votes=None):
    votes = votes or [[None] * len(group) for group in rewards]
    return [
        [RewardResult(reward, logged={"answer": vote}) for reward, vote in zip(*pair, strict=True)]
        for pair in zip(rewards, votes, strict=True)
    ]


def test_a_question_counts_once_with_the_mean_of_its_answers():
    # The means are 0.5, 1 and 0: their mean is 0.5 and their standard deviation 0.5, over three questions.
    found = grade(results([[1.0, 0.0], [1.0, 1.0], [0.0]]))
    assert (found.mean, found.accuracy, found.num_questions, found.num_unscored) == (0.5, 0.5, 3, 0)
    assert found.mean_error == pytest.approx(0.5 / math.sqrt(3))


def test_only_a_reward_of_one_is_a_right_answer():
    found = grade(results([[0.1], [1.0], [2.0], [0.1]]))
    assert found.mean == pytest.approx(0.8)
    assert found.accuracy == 0.25
    # One answer of four is right: sqrt(p (1 - p) / (n - 1)).
    assert found.accuracy_error == pytest.approx(math.sqrt(0.25 * 0.75 / 3))


@pytest.mark.parametrize("name", ["reward", "acc"])
@pytest.mark.parametrize(
    ("value", "is_right"),
    [(0.6 + 0.3 + 0.1, True), (1 + 2**-52, True), (1.0000001, False), (0.999999, False), (math.nan, False)],
)
def test_one_is_one_in_float32_as_training_has_it(name, value, is_right):
    graded = RewardResult(value) if name == "reward" else RewardResult(0.0, logged={"acc": value})
    assert graded.is_right is is_right
    assert not any(RewardResult(value, logged={"acc": acc}).is_right for acc in (None, "1"))


def test_acc_says_which_answers_are_right_where_the_function_logs_it():
    graded = [
        RewardResult(reward, logged={"acc": acc}) for reward, acc in ((0.95, True), (1.0, False), (0.0, 1.0))
    ]
    found = grade([graded], (3,))
    assert (found.accuracy, found.pass_at) == (pytest.approx(2 / 3), {3: 1.0})
    assert found.mean == pytest.approx(0.65)


def test_an_answer_without_a_reward_counts_nowhere():
    found = grade(results([[math.nan, 1.0], [math.nan], [0.0]]))
    assert (found.mean, found.num_questions, found.num_unscored) == (0.5, 2, 2)


def test_one_question_has_no_standard_error_and_none_no_mean():
    assert grade(results([[1.0]])).mean == 1.0
    assert math.isnan(grade(results([[1.0]])).mean_error)
    assert math.isnan(grade(results([[math.nan]])).mean)


def test_pass_at_k_is_the_share_of_the_choices_of_k_answers_with_a_right_one():
    answers = [[1.0, 0.0, 0.0, 1.0, 0.5], [0.0, 0.0, 0.0, 1.0, math.nan], [0.0] * 6]
    found = grade(results(answers)).pass_at
    assert list(found) == [2, 4]
    for k, value in found.items():
        shares = [
            statistics.fmean(1.0 in chosen for chosen in itertools.combinations(scored, k))
            for scored in ([reward for reward in options if not math.isnan(reward)] for options in answers)
        ]
        assert value == pytest.approx(statistics.fmean(shares))
    # A judge that failed once does not remove the metric.
    assert grade(results([[1.0, 0.0], [0.0, math.nan]])).pass_at == {2: 1.0}
    assert grade(results([[1.0], [0.0]])).pass_at == {}
    assert grade([]).pass_at == {}


def votes_won(chosen):
    """Return the share of right answers among those with the most votes; a right answer is a capital letter."""
    counts = Counter(vote for vote in chosen if vote is not None)
    most = [answer for answer, count in counts.items() if count == max(counts.values())]
    return sum(answer.isupper() for answer in most) / len(most) if most else 0.0


@pytest.mark.parametrize(
    "votes", ["AAbbc", "Abcde", "AABbb", "aabb", "A", "abbbA", "AABBccd", "A.b.", "...", "..A.aa"], ids=str
)
def test_maj_at_k_is_the_mean_over_the_choices_of_k_answers(votes):
    answers = [None if vote == "." else vote for vote in votes]
    rewards = [float(vote.isupper()) for vote in votes]
    ks = range(1, len(votes) + 1)
    # The second question covers questions whose answers have no vote.
    found = grade(results([rewards, [1.0] * 9], [answers, ["Z"] * 9]), ks).majority_at
    assert list(found) == list(ks)
    for k in ks:
        share = statistics.fmean(map(votes_won, itertools.combinations(answers, k)))
        assert found[k] == pytest.approx((share + 1) / 2)


def test_without_an_answer_that_was_logged_nothing_is_voted_on_and_k_may_be_named():
    found = grade(results([[1.0, 0.0, 0.0]]), (1, 3, 5))
    assert found.majority_at == {}
    assert found.pass_at == {1: pytest.approx(1 / 3), 3: 1.0}
    # An answer without a reward has no vote.
    assert grade(results([[1.0, math.nan, math.nan]], [["a", "b", "b"]]), (1,)).majority_at == {1: 1.0}
