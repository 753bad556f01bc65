import json
import os
import shutil
from functools import partial

import pytest
import torch
from kit.families import FAMILIES, save_family
from kit.rank_processes import save_tiny_llama
from safetensors.torch import load_file, save_file

from vectorlm.errors import ConfigError
from vectorlm.packages import is_installed
from vectorlm.train.load import load_model, load_tokenizer

EMPTY = partial(load_model, is_empty=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("llama"), tied=True)


def test_a_model_saved_in_bf16_is_trained_in_fp32_with_tied_embeddings_as_one_parameter(model_dir, tmp_path):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_empty_model_has_no_weights_but_real_buffers_and_the_same_names(model_dir):
    empty, full = load_model(model_dir, is_empty=True), load_model(model_dir)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert empty.lm_head.weight is empty.model.embed_tokens.weight
    assert [name for name, _ in empty.named_parameters()] == [name for name, _ in full.named_parameters()]
    buffers = dict(full.named_buffers())
    assert buffers
    torch.testing.assert_close(dict(empty.named_buffers()), buffers, rtol=0, atol=0)


def test_a_checkpoint_that_lacks_a_tensor_is_refused(model_dir, tmp_path):
    weights = load_file(model_dir / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"model\.norm\.weight"):
        load_model(tmp_path)


def test_a_folder_that_transformers_cannot_read_is_named(model_dir, tmp_path):
    folder = shutil.copytree(model_dir, tmp_path / "broken")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    os.truncate(folder / "model.safetensors", 9_000)
    for load, what in ((load_tokenizer, "tokenizer"), (load_model, "model")):
        with pytest.raises(ConfigError, match=rf"{what} in .*/broken'"):
            load(folder)
    (folder / "config.json").write_text('{"model_type": "lama"}')
    with pytest.raises(ConfigError, match=r"/broken'.*`lama`"):
        EMPTY(folder)


@pytest.mark.parametrize("load", [load_model, EMPTY])
def test_attention_scores_that_the_model_caps_are_capped(load, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = save_family(FAMILIES["Gemma 2"], tmp_path)
    assert load(folder).config._attn_implementation == "eager"
    if load is load_model:
        # The scores are large, which makes the cap of 50 matter; torch's kernel does not apply it.
        ours, uncapped = (
            load(folder),
            AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa"),
        )
        for model in (ours, uncapped):
            for name, parameter in model.named_parameters():
                parameter.data.mul_(30 if "q_proj" in name or "k_proj" in name else 1)
        tokens = torch.arange(2, 20)[None]
        assert (ours(tokens).logits - uncapped(tokens).logits).abs().max() > 1e-2


def test_flash_attention_without_a_cuda_device_is_torch_s_attention(model_dir, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert load_model(model_dir, flash_attention=True).config._attn_implementation == "sdpa"


@pytest.mark.skipif(is_installed("flash_attn"), reason="needs a machine without it")
@pytest.mark.parametrize("load", [load_model, EMPTY])
def test_flash_attention_without_its_package_names_the_package_and_the_setting(model_dir, monkeypatch, load):
    monkeypatch.setattr("vectorlm.train.load._attention", lambda *_: "flash_attention_2")
    with pytest.raises(ConfigError, match=r"use_flash_attention .* flash-attn"):
        load(model_dir)


def test_a_tokenizer_without_a_padding_token_is_saved_as_it_was_read(model_dir, tmp_path):
    load_tokenizer(model_dir).save_pretrained(tmp_path)
    for folder in (model_dir, tmp_path):
        assert "pad_token" not in json.loads((folder / "tokenizer_config.json").read_text())
