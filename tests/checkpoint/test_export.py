import errno
import json

import pytest
import torch
from rank_processes import on_ranks, save_tiny_llama
from transformers import LlamaForCausalLM

from vectorlm.checkpoint import export, folder
from vectorlm.checkpoint.export import export_model
from vectorlm.errors import CheckpointError
from vectorlm.lora.load import add_lora
from vectorlm.train.load import load_model, load_tokenizer
from vectorlm.train.shard import shard_model


def change_and_export(topology, model_dir, path):
    model = shard_model(load_model(model_dir), topology)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
    export_model(model, load_tokenizer(model_dir), path)
    return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("tied", "num_tensors"), [(False, 30), (True, 29)])
def test_the_final_model_loads_with_transformers_and_equals_the_trained_one(tmp_path, tied, num_tensors):
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_dir, path = save_tiny_llama(tmp_path / "llama", tied=tied), tmp_path / "run" / "final-model"
    trained = on_ranks(2, change_and_export, model_dir, path)[0]
    found, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter, trained[name]), name
    assert (found.lm_head.weight is found.model.embed_tokens.weight) == tied
    with safe_open(path / "model.safetensors", "pt") as file:
        assert len(list(file.keys())) == num_tensors
    assert json.loads((path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert AutoTokenizer.from_pretrained(path)("abc").input_ids == [2, 3, 4]
    assert [entry.name for entry in path.parent.iterdir()] == ["final-model"]


def fail_while_exporting(topology, model_dir, path):
    def fail(*_):
        raise RuntimeError("disk full")

    export.folder.finish = fail
    with pytest.raises(RuntimeError, match="disk full"):
        change_and_export(topology, model_dir, path)
    export.folder.finish = folder.finish


def test_an_export_that_fails_leaves_the_older_model_whole(tmp_path):
    model_dir, path = save_tiny_llama(tmp_path / "llama"), tmp_path / "final-model"
    on_ranks(1, change_and_export, model_dir, path)
    before = (path / "model.safetensors").read_bytes()
    on_ranks(1, fail_while_exporting, path, path)
    assert (path / "model.safetensors").read_bytes() == before
    on_ranks(1, change_and_export, path, path)
    assert (path / "model.safetensors").read_bytes() != before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["final-model", "llama"]


def export_adapter(topology, model_dir, path, options):
    torch.manual_seed(1)
    model = shard_model(add_lora(load_model(model_dir), {"r": 2, **options}), topology)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.5)
    export_model(model, load_tokenizer(model_dir), path)
    return model(input_ids=torch.arange(8)[None], use_cache=False).logits.detach()


def assert_loads_as(expected, model_dir, path):
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(load_model(model_dir), path)
    # fp32 round-off: the sharded forward runs the same kernels on gathered copies
    torch.testing.assert_close(loaded(input_ids=torch.arange(8)[None]).logits, expected, rtol=1e-5, atol=1e-6)


def test_of_a_model_with_adapters_the_adapters_alone_are_written(tmp_path):
    model_dir, path = save_tiny_llama(tmp_path / "llama"), tmp_path / "final-model"
    expected = on_ranks(2, export_adapter, model_dir, path, {"target_modules": ["q_proj"]})[0]
    assert_loads_as(expected, model_dir, path)
    assert (path / "adapter_model.safetensors").stat().st_size < 10_000
    assert not (path / "model.safetensors").exists()


def export_all(topology, model_dir, root, cases):
    return [export_adapter(topology, model_dir, root / name, options) for name, options in cases.items()]


def test_whatever_the_options_the_final_adapter_loads_with_peft_and_equals_the_trained_model(tmp_path):
    cases = {
        "patterns": {
            "target_modules": ["q_proj", "up_proj"],
            "rank_pattern": {"q_proj": 5},
            "use_rslora": True,
        },
        "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
        "whole": {"target_modules": ["q_proj"], "modules_to_save": ["norm", "lm_head"]},
        "embedding": {"target_modules": ["embed_tokens", "v_proj"]},
        "pissa": {"target_modules": ["o_proj"], "init_lora_weights": "pissa"},
    }
    model_dir = save_tiny_llama(tmp_path / "llama")
    for name, expected in zip(cases, on_ranks(2, export_all, model_dir, tmp_path, cases)[0], strict=True):
        assert_loads_as(expected, model_dir, tmp_path / name)


def export_in_pieces(topology, model_dir, path):
    export.MAX_SHARD = "20KB"
    return change_and_export(topology, model_dir, path)


def test_a_large_model_is_written_in_several_files_with_all_that_belongs_to_it(tmp_path):
    from transformers import AutoModelForCausalLM

    model_dir, path = save_tiny_llama(tmp_path / "llama"), tmp_path / "final-model"
    generation = json.loads((model_dir / "generation_config.json").read_text()) | {"max_new_tokens": 7}
    (model_dir / "generation_config.json").write_text(json.dumps(generation))
    trained = on_ranks(2, export_in_pieces, model_dir, path)[0]
    pieces = sorted(path.glob("*.safetensors"))
    assert len(pieces) > 2
    # A tensor is never cut: the largest, of 48 x 32 numbers in fp32, takes 6 KB, and a header some more.
    assert all(piece.stat().st_size < 25_000 for piece in pieces)
    assert (path / "model.safetensors.index.json").is_file()
    found = AutoModelForCausalLM.from_pretrained(path)
    assert all(torch.equal(each, trained[name]) for name, each in found.named_parameters())
    assert found.generation_config.max_new_tokens == 7
    assert "message.content" in (path / "chat_template.jinja").read_text()


def test_adapters_name_their_base_by_a_path_that_holds_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tiny_llama(tmp_path / "llama")
    on_ranks(1, export_adapter, "llama", tmp_path / "final-model", {"target_modules": ["q_proj"]})
    options = json.loads((tmp_path / "final-model" / "adapter_config.json").read_text())
    assert options["base_model_name_or_path"] == str(tmp_path / "llama")
    # peft's own card is a template with the path as the name of the base model.
    assert not (tmp_path / "final-model" / "README.md").exists()


def export_to_a_full_disk(topology, model_dir, path):
    def write(self, work, **_):
        (work / "half").write_text("a half")
        raise OSError(errno.ENOSPC, "No space left on device")

    LlamaForCausalLM.save_pretrained = write
    with pytest.raises(CheckpointError) as raised:
        change_and_export(topology, model_dir, path)
    return str(raised.value)


def test_a_full_disk_is_named_and_takes_no_more_room(tmp_path):
    model_dir, path = save_tiny_llama(tmp_path / "llama"), tmp_path / "run" / "final-model"
    (text,) = on_ranks(1, export_to_a_full_disk, model_dir, path)
    assert text == (
        f"the model {path} cannot be written (OSError: [Errno 28] No space left on device). No half of it is left: "
        "once the disk can be written to, the same command writes it."
    )
    assert list(path.parent.iterdir()) == []
