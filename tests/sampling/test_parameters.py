import numpy as np
import pytest

from vectorlm.errors import EngineError
from vectorlm.runs.preflight.sampling import PARAMETERS, sampling_problems
from vectorlm.sampling.backends.generation import NAMES, Parameters, read_parameters


def test_what_is_not_named_has_vllms_default():
    vllm = pytest.importorskip("vllm")
    theirs = vllm.SamplingParams()
    ours = read_parameters(None)
    left_out = {"stop", "stop_token_ids"}  # vLLM has empty lists in place of None.
    for name in set(NAMES) - left_out:
        assert getattr(ours, name) == getattr(theirs, name), name


WRONG_TYPES = [
    {"seed": 1e5},
    {"seed": True},
    {"logprobs": 1.5},
    {"prompt_logprobs": float("nan")},
    {"logit_bias": [1]},
    {"repetition_detection": 3},
    {"logprob_token_ids": {}},
    {"allowed_token_ids": b"ab"},
    {"n": 2.0},
    {"stop_token_ids": ["a"]},
    {"max_tokens": "3"},
]


@pytest.mark.parametrize("given", WRONG_TYPES, ids=lambda given: next(iter(given)))
def test_a_value_of_another_type_than_vllm_declares_is_refused(given):
    """vLLM accepts most of these values, and some end its engine."""
    vllm = pytest.importorskip("vllm")
    from vectorlm.sampling.backends.vllm.shim import make_sampling_params

    with pytest.raises(EngineError, match="sampling_params"):
        make_sampling_params(given)
    try:
        theirs = vllm.SamplingParams(**given)
    except Exception:
        return
    with pytest.raises(EngineError, match="sampling_params"):
        make_sampling_params(theirs)


VALUES = {
    "n": (0, 1, 2.0, True),
    "temperature": (-0.1, 0, 1, 2.0, 2.1, float("nan"), float("inf"), "1", None),
    "top_p": (0, 0.1, 1, 1.5, None),
    "top_k": (-2, -1, 0, 5, 0.5),
    "min_p": (-0.1, 0, 1.0, 2),
    "presence_penalty": (-2.1, -2, 2, 3),
    "frequency_penalty": (-2.1, -2, 2, 3),
    "repetition_penalty": (0, 0.1, float("inf")),
    "seed": (2**63, -(2**63), 0, 1.5, None),
    "max_tokens": (0, 1, "3", None),
    "min_tokens": (-1, 0, 17),
    "logprobs": (-2, -1, 0, 1.5, None),
    "prompt_logprobs": (-2, -1, 0, None),
    "stop": ("a", "", ["a"], ["a", ""], [1], None),
    "stop_token_ids": ([1], ["a"], [1.5], None),
    "ignore_eos": (True, 1),
    "skip_special_tokens": (False, "no"),
    "include_stop_str_in_output": (True, 0),
}


def test_what_the_check_of_a_config_refuses_is_what_vllm_refuses():
    pytest.importorskip("vllm")
    from vectorlm.sampling.backends.vllm.shim import make_sampling_params

    def is_refused(given):
        try:
            make_sampling_params(given)
        except EngineError:
            return True
        return False

    cases = [{name: value} for name, values in VALUES.items() for value in values]
    cases += [{"min_tokens": 4, "max_tokens": 3}, {"n": 2, "temperature": 0}, {"n": 1, "temperature": 0}]
    wrong = [given for given in cases if bool(list(sampling_problems(given))) != is_refused(given)]
    assert wrong == []
    assert VALUES.keys() == {name for name, parameter in PARAMETERS.items() if parameter.type is not None}


def test_values_of_the_right_types_make_vllms_own_parameters():
    vllm = pytest.importorskip("vllm")
    from vectorlm.sampling.backends.vllm.shim import make_sampling_params

    given = {
        "temperature": 0,
        "logit_bias": {3: 1.0},
        "stop": "a",
        "extra_args": {"a": 1},
        "seed": np.int64(3),
    }
    made = make_sampling_params(given)
    expected = vllm.SamplingParams(**{**given, "seed": 3})
    expected.output_kind = made.output_kind
    assert made == expected
    assert make_sampling_params(expected) == expected
    structured = make_sampling_params({"structured_outputs": {"regex": "[ab]+"}}).structured_outputs
    assert structured.regex == "[ab]+"


def test_a_parameter_that_cannot_be_honoured_is_named():
    with pytest.raises(EngineError, match="'logit_bias'"):
        read_parameters({"logit_bias": {3: 1.0}})
    with pytest.raises(EngineError, match="'presence_penalty'"):
        read_parameters({"presence_penalty": 1.0})
    assert read_parameters({"presence_penalty": 0.0, "n": 2}) == Parameters(n=2)
    with pytest.raises(EngineError, match="'temprature'"):
        read_parameters({"temprature": 1.0})
    with pytest.raises(EngineError, match="sampling_params"):
        read_parameters(1.0)


def test_one_stop_string_may_stand_alone():
    assert read_parameters({"stop": "ab"}).stop_strings == ("ab",)
    assert read_parameters({"stop": ["a", "b"]}).stop_strings == ("a", "b")
    assert read_parameters({}).stop_strings == ()


@pytest.mark.parametrize("stop", ["", ["a", ""]])
def test_an_empty_stop_string_is_refused(stop):
    with pytest.raises(EngineError, match="stop="):
        read_parameters({"stop": stop})


WRONG_VALUES = {"n": 0, "temperature": -1, "top_p": 0, "top_k": -2, "min_p": 1.5, "repetition_penalty": 0}
WRONG_VALUES |= {"max_tokens": 0, "min_tokens": 17}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_a_value_out_of_range_is_refused_by_its_name(name):
    with pytest.raises(EngineError, match=name):
        read_parameters({name: WRONG_VALUES[name]})
