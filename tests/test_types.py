"""Completions and rollouts: tuples for readers, bytes between processes, arrays for batches."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest

from vectorlm.rl.rollout import Rollout
from vectorlm.sampling.contract import RequestOutput
from vectorlm.sampling.messages import pack, unpack
from vectorlm.types import Completion, PromptRecord

ONE = Completion((5, 6), (7, 8, 9), (-0.1, -2.5, -1e-9), (3, 3, 4), "text", "stop")
BARE = Completion((5, 6), (), (), (), "", None)


def across(*completions):
    return unpack(pack([RequestOutput("0", list(completions))], as_request_outputs=False))[0]


@pytest.mark.parametrize("completion", [ONE, BARE])
def test_a_completion_is_the_same_after_it_crossed(completion):
    (found,) = across(completion)
    assert "token_ids" not in vars(found), "no Python object for each token, until somebody reads one"
    assert found == completion
    assert hash(found) == hash(completion)
    assert repr(found) == repr(completion)
    assert all(type(token) is int for token in found.token_ids)
    assert all(type(logprob) is float for logprob in found.sampler_logprobs)
    assert replace(found, text="x").token_ids == completion.token_ids
    assert pickle.loads(pickle.dumps(found)) == copy.deepcopy(found) == copy.copy(found) == completion
    with pytest.raises(AttributeError, match="tokens"):
        found.tokens  # noqa: B018


def test_numbers_of_any_kind_cross():
    given = Completion([np.int64(5)], np.array([7, 8]), np.float32([-0.5, -1]), [1, 1], "", "stop")
    assert across(given) == [Completion((5,), (7, 8), (-0.5, -1.0), (1, 1), "", "stop")]


def test_a_rollout_of_many_turns_is_the_same_after_it_crossed():
    (first, second) = across(ONE, replace(ONE, finish_reason="length"))
    rollout = (
        Rollout.from_completion(PromptRecord("q"), first).continued((1, 2), " reply ", second).rewarded(0.5)
    )
    plain = Rollout.from_completion(PromptRecord("q"), ONE)
    plain = plain.continued((1, 2), " reply ", replace(ONE, finish_reason="length")).rewarded(0.5)
    found = pickle.loads(pickle.dumps(rollout))
    assert found == plain
    assert (found.turn_places, found.num_policy_tokens) == ([(0, 3), (5, 8)], 6)
    assert found.sampled_versions.tolist() == [3, 3, 4, 3, 3, 4]
    assert found.numbers("policy_mask").tolist() == [*[True] * 3, *[False] * 2, *[True] * 3]
    assert all(type(value) is bool for value in found.policy_mask)


def test_a_completion_without_log_probabilities_makes_a_rollout_with_zeros():
    (found,) = across(replace(ONE, sampler_logprobs=()))
    assert Rollout.from_completion(PromptRecord("q"), found).sampler_logprobs == (0.0,) * 3
