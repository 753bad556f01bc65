import pytest
from config_texts import FULL

from vectorlm.config import load_config
from vectorlm.errors import ConfigError
from vectorlm.preflight.settings import check_consistency


def error_text(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        check_consistency(load_config(path, overrides))
    return str(caught.value)


def test_ignore_indices_must_agree(write_config):
    path = write_config(FULL, ("dataset:\n  ignore_index: -100", "dataset:\n  ignore_index: -1"))
    assert error_text(path) == (
        "dataset_preprocess.ignore_index=-100 must equal dataset.ignore_index=-1, or the loss would count "
        "hidden tokens. Use -1. (my.yaml:60)"
    )


def test_overlap_must_be_shorter_than_a_chunk(write_config):
    base = ["train_parameters.max_seq_len=32", "dataset_preprocess.add_bos_eos_tokens=true"]
    assert error_text(write_config(FULL), *base, "dataset_preprocess.overlap=30") == (
        "dataset_preprocess.overlap=30 must be below the chunk length 30 (max_seq_len=32 less BOS and EOS). "
        "Use 3, for example. (--set dataset_preprocess.overlap=30)"
    )
    check_consistency(load_config("my.yaml", [*base, "dataset_preprocess.overlap=29"]))


def test_a_chunk_without_bos_and_eos_is_two_tokens_longer(write_config):
    overrides = ["train_parameters.max_seq_len=32", "dataset_preprocess.overlap=31"]
    check_consistency(load_config(write_config(FULL), overrides))
    assert error_text("my.yaml", *overrides, "dataset_preprocess.overlap=32") == (
        "dataset_preprocess.overlap=32 must be below the chunk length 32 (max_seq_len=32). "
        "Use 4, for example. (--set dataset_preprocess.overlap=32)"
    )


def test_a_chunk_must_have_room_beside_bos_and_eos(write_config):
    overrides = [
        "train_parameters.max_seq_len=2",
        "dataset_preprocess.add_bos_eos_tokens=true",
        "dataset_preprocess.overlap=1",
    ]
    assert error_text(write_config(FULL), *overrides) == (
        "dataset_preprocess.overlap=1 must be below the chunk length 0 (max_seq_len=2 less BOS and EOS). "
        "Raise max_seq_len. (--set dataset_preprocess.overlap=1)"
    )


def test_overlap_does_not_matter_without_packing(write_config):
    overrides = ["dataset_preprocess.packing_type=null", "dataset_preprocess.overlap=99999"]
    check_consistency(load_config(write_config(FULL), overrides))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model", "model"),
        ("dtype", "train_parameters.sampler.vllm_dtype"),
        ("gpu_memory_utilization", "train_parameters.sampler.gpu_memory_utilization"),
    ],
)
def test_an_engine_argument_with_a_setting_of_its_own_is_refused(write_config, name, place):
    path = write_config(FULL, ("      max_model_len: 512", f"      {name}: x"))
    assert error_text(path) == (
        f"train_parameters.sampler.engine.{name}='x' is set in another place. "
        f"Set '{place}' instead. (my.yaml:47)"
    )
