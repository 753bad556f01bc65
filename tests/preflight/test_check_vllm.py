"""`vectorlm check` knows the installed vLLM's names and values without importing it."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from vectorlm.config import load_config
from vectorlm.errors import ConfigError
from vectorlm.packages import fields_of
from vectorlm.preflight.settings import check_config
from vectorlm.preflight.vllm import _RANGES

SAMPLER = "train_parameters.sampler={sample_frequency: 2, prompts: [a]}"
PLACE = "train_parameters.sampler"
RL = (
    "rl={algorithm: grpo, max_steps: 4, prompts: [a], prompts_per_step: 2, group_size: 2, rewards: {countdown: 1}, "
    "sampling_params: {max_tokens: 4}}"
)


@pytest.fixture
def path(write_config):
    """A config whose model and datasets exist."""
    Path("models/tiny").mkdir(parents=True)
    Path("models/tiny/config.json").write_text(json.dumps({"vocab_size": 40}))
    for split in ("train", "eval"):
        Path("data", split).mkdir(parents=True)
        Path("data", split, "dataset_info.json").write_text("{}")
    return write_config()


def problems(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(path, [SAMPLER, *overrides]), 1, ["countdown"])
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        (
            f"{PLACE}.sampling_params.temprature=1",
            "is not a sampling parameter of vLLM. Did you mean 'temperature'?",
        ),
        (f"{PLACE}.sampling_params.temperature=-1", "must be from 0 to 2. Use 1.0."),
        (f"{PLACE}.sampling_params.top_p=1.5", "must be above 0 and at most 1. Use 1.0."),
        (f"{PLACE}.sampling_params.max_tokens='8'", "must be an integer, or null."),
        (f"{PLACE}.sampling_params.ignore_eos=1", "must be true or false."),
        (f"{PLACE}.sampling_params.n=0", "must be at least 1. Use 1."),
        (f"{PLACE}.sampling_params.seed=2361183241434822606848", "must be an integer of 64 bits."),
        (
            f"{PLACE}.engine.max_modle_len=64",
            "is not an argument of vLLM's engine. Did you mean 'max_model_len'?",
        ),
        (f"{PLACE}.engine.max_num_seqs=many", "must be an integer, or null."),
        (f"{PLACE}.engine.enforce_eager=1", "must be true or false."),
    ],
)
def test_a_wrong_name_or_value_is_refused_with_its_place(path, override, text):
    found = problems(path, override)
    assert text in found
    assert found.startswith(override.partition("=")[0])
    assert f"(--set {override})" in found


def test_the_sampling_parameters_of_rollouts_are_checked_too(path):
    assert "rl.sampling_params.topp=0.5 is not a sampling parameter" in problems(
        path, RL, "rl.sampling_params.topp=0.5"
    )


def test_what_vllm_knows_passes_and_other_engines_have_arguments_of_their_own(path):
    known = [
        f"{PLACE}.sampling_params={{temperature: 0, max_tokens: null, stop: [a], logit_bias: {{1: 2.0}}, seed: 3}}",
        f"{PLACE}.engine={{max_model_len: 64, start_timeout_s: 60, tensor_parallel_size: 1, dtype: float32}}",
    ]
    with pytest.raises(ConfigError, match=r"engine\.dtype='float32' is set in another place"):
        check_config(load_config(path, [SAMPLER, *known]), 1, ["countdown"])
    check_config(
        load_config(path, [SAMPLER, known[0], known[1].replace(", dtype: float32", "")]), 1, ["countdown"]
    )
    other = [f"{PLACE}.inference=mine.py:Engine", f"{PLACE}.engine.max_modle_len=64"]
    check_config(load_config(path, [SAMPLER, *other]), 1, ["countdown"])


def test_the_names_and_ranges_are_vllms_own():
    from vllm import EngineArgs, SamplingParams

    assert set(fields_of("sampling_params.py", "SamplingParams")) == public(SamplingParams.__struct_fields__)
    arguments = [each.name for each in dataclasses.fields(EngineArgs)]
    assert set(fields_of("engine/arg_utils.py", "EngineArgs")) == public(arguments)
    edges = (-3, -2.5, -2, -1, -0.5, 0, 0.5, 1, 1.5, 2, 2.5, 7, float("inf"), float("nan"))
    kinds = fields_of("sampling_params.py", "SamplingParams")
    for name, (holds, _, _) in _RANGES.items():
        for value in edges:
            if "int" in kinds[name] and not isinstance(value, int):
                continue
            # Its seeds are refused in the sampler alone.
            if name != "seed":
                assert holds(value) == accepts(SamplingParams, name, value), (name, value)


def public(names):
    return {name for name in names if not name.startswith("_")}


def accepts(kind, name, value):
    more = {"n": 1} if name != "n" else {}
    try:
        kind(**{"temperature": 1.0, "max_tokens": 64, **more, name: value})
    # Its own kind of error.
    except Exception:
        return False
    return True


def test_a_tokenizer_larger_than_the_embeddings_is_refused(path):
    tokens = {"model": {"vocab": {"a": 0, "b": 39}}, "added_tokens": [{"id": 40}]}
    Path("models/tiny/tokenizer.json").write_text(json.dumps(tokens))
    assert "has embeddings for 40 tokens, and its tokenizer has a token 40" in problems(path)
    description = json.loads(Path("models/tiny/config.json").read_text())
    # A model for text and images has a part for text, which says it.
    in_parts = {"text_config": {"vocab_size": description["vocab_size"]}, **description, "vocab_size": None}
    Path("models/tiny/config.json").write_text(json.dumps(in_parts))
    assert "has embeddings for 40 tokens, and its tokenizer has a token 40" in problems(path)
    tokens["added_tokens"] = []
    Path("models/tiny/tokenizer.json").write_text(json.dumps(tokens))
    check_config(load_config(path, [SAMPLER]), 1, ["countdown"])


def test_neither_torch_nor_vllm_is_loaded(path):
    code = (
        "import sys; from vectorlm.cli import main; status = main(sys.argv[1:]); "
        "print(status, sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, "check", path, "--set", SAMPLER]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.stdout.endswith("0 []\n"), ended.stderr
