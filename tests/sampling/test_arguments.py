"""Arguments that an engine refuses, with advice, before its sampler process gets any of them."""

import warnings

import numpy as np
import psutil
import pytest
import torch
from kit.rank_processes import on_ranks
from transformers import AutoTokenizer

import vectorlm
from vectorlm.data.prompts import as_list
from vectorlm.errors import EngineError, RankMismatch
from vectorlm.ranks.engine_ranks import comparable, require_equal
from vectorlm.sampling.arguments import merge, same_on_ranks

TWO_RANKS = vectorlm.Topology(world_size=2, local_world_size=2)
MESSAGE = {"role": "user", "content": "ab"}


def say_a(prompt, version):
    return "a"


@pytest.mark.parametrize(
    "prompts",
    [
        {"input_ids": [[2, 3]], "attention_mask": [[1, 1]]},
        MESSAGE,
        {"prompt": "ab"},
        [MESSAGE],
        [5, 6, 7],
        np.array([5, 6, 7]),
        torch.tensor([5, 6, 7]),
    ],
)
def test_a_prompt_that_lacks_its_list_is_refused(prompts):
    with pytest.raises(TypeError):
        as_list(prompts)


def test_the_answer_of_a_tokenizer_is_no_list_of_prompts(folder):
    encoded = AutoTokenizer.from_pretrained(folder)(["abc", "abd"])
    with pytest.raises(TypeError, match="BatchEncoding"):
        as_list(encoded)
    assert as_list(encoded["input_ids"]) == [[2, 3, 4], [2, 3, 5]]


def test_a_wrong_number_of_sampling_parameters_is_refused_without_a_sampler():
    with vectorlm.FakeEngine(say_a) as engine:
        with pytest.raises(ValueError, match="sampling_params"):
            engine.sample(["a", "b"], [{"seed": 1}])
        assert engine.sample(["a"], [{"seed": 1}])[0][0].text == "a"


def test_a_handle_of_a_closed_engine_says_so():
    with vectorlm.FakeEngine(say_a) as engine:
        asked, left = engine.submit(["a"]), engine.submit(["a"])
        answers = asked.result()
    assert asked.result() == answers
    assert left.done()
    with pytest.raises(EngineError, match=r"^the engine is closed\.$"):
        left.result()


def start_with_own_arguments(topology):
    """Start engines whose arguments differ by rank; return the error of a call."""
    with vectorlm.FakeEngine(lambda prompt, version: "a", topology=topology) as engine:
        assert engine.sample(["a"])[0][0].text == "a"
    with vectorlm.FakeEngine(say_a, topology=topology, num_steps=4 + topology.rank // 2) as engine:
        try:
            engine.sample(["a"])
        except RankMismatch as error:
            return str(error)


def test_engines_with_other_arguments_are_refused_on_every_rank():
    for text in on_ranks(4, start_with_own_arguments, num_nodes=2):
        assert "ranks 2, 3 " in text
        assert "num_steps=5 instead of 4" in text


def test_every_rank_may_have_a_device_of_its_own():
    settings = vectorlm.EngineSettings(inference="transformers")
    devices = [{"device": f"cuda:{rank}", "max_num_seqs": 4} for rank in range(2)]
    require_equal([comparable(same_on_ranks(settings, arguments)) for arguments in devices])


def refusal(topology, prompt, params=None):
    with vectorlm.FakeEngine(say_a, topology=topology) as engine, pytest.raises(RankMismatch) as caught:
        engine.sample([prompt], params)
    return str(caught.value)


def part_ways(topology):
    """Return the errors of a long array, a temperature and a torch version that differ by rank."""
    from vectorlm.sampling import arguments

    # numpy shortens the printed array in the middle.
    array = np.arange(3000)
    array[1500] += topology.rank
    texts = [refusal(topology, array), refusal(topology, "a" * 100, {"temperature": 0.5 + topology.rank})]
    own_version = arguments.versions_of_rank() | {"torch": f"2.{topology.rank}"}
    arguments.versions_of_rank = lambda: own_version
    return [*texts, refusal(topology, "a")]


def test_what_differs_between_ranks_is_shown_with_both_values():
    for of_array, of_temperature, of_version in on_ranks(2, part_ways):
        assert "rank 1 differs from rank 0" in of_array
        assert "'temperature': 1.5" in of_temperature
        assert "'temperature': 0.5" in of_temperature
        assert "torch='2.1' instead of '2.0'" in of_version


def test_an_unknown_argument_is_refused_before_vllm_starts(folder):
    with pytest.raises(TypeError, match="'max_model_len'"):
        vectorlm.SamplingEngine(folder, max_model_length=64)
    with pytest.raises(TypeError, match="Did you mean 'log_path'"):
        vectorlm.SamplingEngine(folder, logpath=None)
    with pytest.raises(TypeError, match="Did you mean 'timeout_s'"):
        vectorlm.SamplingEngine(folder, vectorlm.EngineSettings(engine_args={"timeouts": 1}))


def test_settings_and_keywords_make_the_same_engine():
    given = vectorlm.EngineSettings(
        timeout_s=7.0, lora_mode="auto", engine_args={"max_model_len": 64, "seed": 1}
    )
    merged = merge(
        given, {"verify_updates": False, "seed": 2, "enable_lora": True}, vectorlm.SamplingEngine.__init__
    )
    expected = {"max_model_len": 64, "seed": 2, "enable_lora": True, "dtype": "auto"}
    assert merged.engine_args == expected | {"gpu_memory_utilization": 0.35}
    assert (merged.timeout_s, merged.verify_updates, merged.lora_mode) == (7.0, False, "adapter")
    assert merge(merged, {}, vectorlm.SamplingEngine.__init__) == merged


@pytest.mark.slow
def test_an_engine_shows_what_it_is_and_a_second_one_is_warned_of():
    scripted = {"inference": "vectorlm.sampling.backends.scripted:Scripted", "answers": ["a"]}
    with vectorlm.SamplingEngine("model", **scripted) as first:
        what = f"SamplingEngine of 'model' with {scripted['inference']}"
        assert repr(first) == f"<{what}: version -1, sampler process {first._channel.pid}>"
        with pytest.warns(UserWarning, match="another engine"):
            vectorlm.SamplingEngine("model", **scripted).close()
    assert repr(first) == f"<{what}: closed>"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        vectorlm.SamplingEngine("model", **scripted).close()


@pytest.mark.slow
def test_an_engine_that_could_not_be_built_ends_its_process_and_is_not_counted(tmp_path):
    failed = vectorlm.SamplingEngine(tmp_path, inference="transformers")
    for _ in range(2):
        with pytest.raises(EngineError, match=r"config\.json"):
            failed.sample("a")
    assert not psutil.pid_exists(failed._channel.pid)
    scripted = {"inference": "vectorlm.sampling.backends.scripted:Scripted", "answers": ["a"]}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        vectorlm.SamplingEngine("model", **scripted).close()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"quantization": "awq"}, "quantization"),
        ({"quantization": "fp8_per_tensor"}, "quantization"),
        ({"quantization": "int8", "dtype": "float32"}, "dtype"),
        ({"quantization": "int8", "transport": "pull"}, "transport"),
        ({"quantization": "int8", "inference": "transformers"}, "inference"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"data_parallel_size": 2, "inference": "server", "topology": TWO_RANKS}, "data_parallel_size"),
    ],
)
def test_an_engine_that_cannot_be_updated_or_compared_is_refused_by_value(folder, arguments, name):
    with pytest.raises(ValueError, match=f"{name}={arguments[name]!r}"):
        vectorlm.SamplingEngine(str(folder), **arguments)
