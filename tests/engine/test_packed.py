"""Completions survive being made into arrays and back, with the corners that ragged data has."""

import numpy as np
import pytest
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from vectorlm.backends.vllm.backend import finished
from vectorlm.backends.vllm.request_outputs import PackedOutputs, pack_request_outputs
from vectorlm.engine.packed import FINISH_REASONS, PackedCompletions, Ragged
from vectorlm.types import Completion


def outputs():
    """Three prompts with two, one and no completions."""
    scored = [
        {4: Logprob(-0.5, 1, "d"), 9: Logprob(-1.25, 2, None)},
        {7: Logprob(-2.0, None, "é"), 4: Logprob(-0.125, 1, "")},
    ]
    first = [
        CompletionOutput(0, "dé", [4, 7], -2.5, scored, finish_reason="stop", stop_reason="x"),
        CompletionOutput(1, "", [], 0.0, [], finish_reason="length"),
    ]
    second = [CompletionOutput(0, "\ud800 three", (1, 2, 3), None, None, finish_reason=None)]
    prompt_logprobs = [None, {5: Logprob(-3.0, 3, "e")}]
    return [
        RequestOutput("0", "ab", [3, 5], prompt_logprobs, first, True, num_cached_tokens=2),
        RequestOutput("1", None, [8], None, second, False),
        RequestOutput("2", None, [], None, [], True),
    ]


def packed_outputs(*versions):
    return PackedCompletions.pack([finished(*each) for each in zip(outputs(), versions, strict=True)])


def test_completions_come_back_as_they_were():
    packed = PackedCompletions.from_arrays(packed_outputs([[5, 6], []], [[6, 6, 6]], []).arrays())
    (stopped, empty), (unscored,), none = packed.unpack()
    assert stopped == Completion((3, 5), (4, 7), (-0.5, -2.0), (5, 6), "dé", "stop")
    assert empty == Completion((3, 5), (), (), (), "", "length")
    assert unscored == Completion((8,), (1, 2, 3), (), (6, 6, 6), "\ud800 three", None)
    assert none == []


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("last", range(4))
def test_a_slice_of_the_prompts_is_that_slice_of_the_whole(first, last):
    packed = packed_outputs([[1, 1], []], [[1, 1, 1]], [])
    assert packed.unpack(first, last) == packed.unpack()[first:last]


def test_nothing_packs_to_nothing():
    assert PackedCompletions.from_arrays(PackedCompletions.pack([]).arrays()).unpack() == []


def test_request_outputs_come_back_equal_in_every_field():
    back = PackedOutputs.from_arrays(pack_request_outputs(outputs()).arrays()).unpack()
    for ours, theirs in zip(back, outputs(), strict=True):
        for completion in theirs.outputs:
            completion.token_ids = list(completion.token_ids)
        assert vars(ours) == vars(theirs)


def test_the_flat_kind_of_logprobs_stays_flat():
    flat = FlatLogprobs()
    flat.append({4: Logprob(-0.5, 1, "d")})
    output = RequestOutput("0", None, [1], None, [CompletionOutput(0, "d", [4], -0.5, flat)], True)
    (back,) = PackedOutputs.from_arrays(pack_request_outputs([output]).arrays()).unpack()
    assert isinstance(back.outputs[0].logprobs, FlatLogprobs)
    assert back.outputs[0].logprobs == flat


def test_every_finish_reason_of_vllm_has_a_code():
    from vllm.v1.engine import FINISH_REASON_STRINGS

    assert set(FINISH_REASON_STRINGS) <= set(FINISH_REASONS)


def test_ragged_rows_keep_none_apart_from_empty():
    rows = Ragged.of([[1, 2], None, [], [3]], np.int32).rows()
    assert [None if row is None else row.tolist() for row in rows] == [[1, 2], None, [], [3]]
    assert Ragged.of_texts(["ü", None, ""]).texts() == ["ü", None, ""]
