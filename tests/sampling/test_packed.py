"""Packing of answers for the ranks: every field survives, and a rank may read a part of them."""

import numpy as np
import pytest
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from vectorlm.errors import EngineError
from vectorlm.sampling import contract as contracts
from vectorlm.sampling.backends.vllm.backend import finished
from vectorlm.sampling.contract import FINISH_REASONS
from vectorlm.sampling.messages import pack, unpack
from vectorlm.types import Completion


def outputs():
    """Return the outputs of three prompts with two, one and no completions."""
    scored = [{4: Logprob(-0.5, 1, "d"), 9: Logprob(-1.25, 2, None)}, {7: Logprob(-2.0, None, "é")}]
    first = [
        CompletionOutput(0, "dé", [4, 7], -2.5, scored, finish_reason="stop", stop_reason="x"),
        CompletionOutput(1, "", [], 0.0, [], finish_reason="length"),
    ]
    second = [CompletionOutput(0, "\ud800 three", (1, 2, 3), None, None, finish_reason=None)]
    theirs = [
        RequestOutput(
            "0", "ab", [3, 5], [None, {5: Logprob(-3.0, 3, "e")}], first, True, num_cached_tokens=2
        ),
        RequestOutput("1", None, [8], None, second, False),
        RequestOutput("2", None, [], None, [], True),
    ]
    return [finished(*pair) for pair in zip(theirs, ([[5, 6], []], [[6, 6, 6]], []), strict=True)]


def test_completions_come_back_as_they_were():
    packed = pack(outputs(), as_request_outputs=False)
    assert packed.dtype == np.uint8
    assert unpack(packed) == [list(output.completions) for output in outputs()]
    assert unpack(packed)[0][0] == Completion((3, 5), (4, 7), (-0.5, -2.0), (5, 6), "dé", "stop")
    assert unpack(pack([], as_request_outputs=False)) == []


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("last", range(4))
def test_a_slice_of_the_prompts_is_that_slice_of_the_whole(first, last):
    packed = pack(outputs(), as_request_outputs=False)
    assert unpack(packed, first, last) == unpack(packed)[first:last]


def test_numbers_of_any_kind_become_pythons_own():
    odd = Completion(
        np.array([3, 5]), np.array([4]), np.array([-0.5], np.float32), np.array([6]), "d", "stop"
    )
    ((found,),) = unpack(pack([contracts.RequestOutput("0", [odd])], as_request_outputs=False))
    assert found == Completion((3, 5), (4,), (-0.5,), (6,), "d", "stop")
    assert [type(numbers[0]) for numbers in (found.token_ids, found.sampler_logprobs, found.versions)] == [
        int,
        float,
        int,
    ]


def test_vllms_own_objects_come_back_equal_in_every_field():
    back = unpack(pack(outputs(), as_request_outputs=True))
    assert [vars(output) for output in back] == [vars(output.raw) for output in outputs()]
    with pytest.raises(EngineError, match="generate"):
        pack([contracts.RequestOutput("0", [])], as_request_outputs=True)


def test_every_finish_reason_of_vllm_is_known():
    from vllm.v1.engine import FINISH_REASON_STRINGS

    assert set(FINISH_REASON_STRINGS) <= set(FINISH_REASONS)
