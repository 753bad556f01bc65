import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from kit.rank_processes import on_ranks, save_tiny_llama
from kit.tensors import full
from peft import LoraConfig
from safetensors.torch import load_file
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoTokenizer

import vectorlm
from vectorlm.errors import CheckpointError
from vectorlm.train.checkpoint import export
from vectorlm.train.checkpoint.export import export_model
from vectorlm.train.load import load_model, load_tokenizer
from vectorlm.train.lora import add_lora
from vectorlm.train.settings import ModelSettings
from vectorlm.train.shard import shard_model


def change_and_export(topology, model_dir, path):
    model = shard_model(load_model(model_dir), topology)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
    export_model(model, load_tokenizer(model_dir), path)
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def export_adapter(topology, model_dir, path, options):
    torch.manual_seed(1)
    model = shard_model(add_lora(load_model(model_dir), {"r": 2, **options}), topology)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.5)
    vectorlm.save_model(model, path, model_dir)
    return model(input_ids=torch.arange(8)[None], use_cache=False).logits.detach()


def assert_loads_as(expected, model_dir, path):
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(load_model(model_dir), path)
    # The difference is fp32 round-off: the sharded forward runs the same kernels on gathered copies.
    torch.testing.assert_close(loaded(input_ids=torch.arange(8)[None]).logits, expected, rtol=1e-5, atol=1e-6)


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
        assert not (tmp_path / name / "model.safetensors").exists()


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
    # No tensor is split: the largest has 48 x 32 fp32 numbers, which is 6 KB, plus a header.
    assert all(piece.stat().st_size < 25_000 for piece in pieces)
    assert (path / "model.safetensors.index.json").is_file()
    found = AutoModelForCausalLM.from_pretrained(path)
    assert all(torch.equal(item, trained[name]) for name, item in found.named_parameters())
    assert found.generation_config.max_new_tokens == 7
    assert "message.content" in (path / "chat_template.jinja").read_text()


def test_adapters_name_their_base_by_a_path_that_holds_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tiny_llama(tmp_path / "llama")
    on_ranks(1, export_adapter, "llama", tmp_path / "final-model", {"target_modules": ["q_proj"]})
    options = json.loads((tmp_path / "final-model" / "adapter_config.json").read_text())
    assert options["base_model_name_or_path"] == str(tmp_path / "llama")
    # PEFT's card is a template that names the base model by its path.
    assert not (tmp_path / "final-model" / "README.md").exists()


def save_in_every_layout(topology, model_dir, root):
    """Add the same amount to a model of each layout and save it; return the names of the layouts."""

    def changed():
        model = load_model(model_dir)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.25)
        return model

    hybrid = ModelSettings(sharding_strategy="HYBRID_SHARD")
    models = {
        "plain": changed(),
        "fsdp2": shard_model(changed(), topology),
        "hybrid": shard_model(changed(), topology, hybrid),
        "in bf16": fully_shard(changed(), mp_policy=MixedPrecisionPolicy(torch.bfloat16)),
        "ddp": torch.nn.parallel.DistributedDataParallel(changed()),
        "compiled ddp": torch.compile(torch.nn.parallel.DistributedDataParallel(changed())),
        "compiled blocks": changed(),
    }
    layers = models["compiled blocks"].model.layers
    layers[0] = torch.compile(layers[0])
    # After this pass, FSDP2 keeps the root's parameters whole, and in bf16 here.
    with torch.no_grad():
        models["in bf16"](input_ids=torch.arange(8)[None])
    for name, model in models.items():
        vectorlm.save_model(model, root / name)
    return list(models)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "tied", "num_tensors"), [(1, False, 30), (2, True, 29)])
def test_an_own_loop_saves_the_trainers_weights_bit_for_bit_in_every_layout(
    tmp_path, world_size, tied, num_tensors
):
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_dir, root = save_tiny_llama(tmp_path / "llama", tied=tied), tmp_path / "saved"
    expected = {name: item.detach() + 0.25 for name, item in load_model(model_dir).named_parameters()}
    names = on_ranks(world_size, save_in_every_layout, model_dir, root)[0]
    for name in names:
        found, info = AutoModelForCausalLM.from_pretrained(root / name, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert (found.lm_head.weight is found.model.embed_tokens.weight) == tied
        for item, parameter in found.named_parameters():
            assert parameter.dtype == torch.float32
            assert torch.equal(parameter, expected[item]), (name, item)
        with safe_open(root / name / "model.safetensors", "pt") as file:
            assert len(list(file.keys())) == num_tensors, name
        assert AutoTokenizer.from_pretrained(root / name)("abc").input_ids == [2, 3, 4]
        assert (root / name / "generation_config.json").is_file()
    assert sorted(path.name for path in root.iterdir()) == sorted(names)


def test_what_a_folder_of_adapters_does_not_hold_is_refused_and_the_weights_are_kept(tmp_path):
    model = add_lora(load_model(save_tiny_llama(tmp_path / "llama")), {"target_modules": ["q_proj"]})
    norm = model.base_model.model.model.norm.weight.requires_grad_(True)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        vectorlm.save_model(model, tmp_path / "mine")
    assert any(torch.equal(item, norm) for item in load_file(tmp_path / ".mine.weights.safetensors").values())
    norm.requires_grad_(False)
    # PEFT notes no base for an adapter that is added to another one.
    model.add_adapter("second", LoraConfig(target_modules=["k_proj"]))
    vectorlm.save_model(model, tmp_path / "mine")
    assert (tmp_path / "mine" / "second" / "adapter_model.safetensors").exists()


def test_a_lone_process_saves_without_a_process_group_and_leaves_other_paths_alone(tmp_path):
    model_dir = save_tiny_llama(tmp_path / "llama")
    (tmp_path / ".other.unfinished").mkdir()
    (tmp_path / "mine-weights.safetensors").write_text("the user's")
    vectorlm.save_model(load_model(model_dir), tmp_path / "mine")
    assert not dist.is_initialized()
    assert (tmp_path / ".other.unfinished").is_dir(), "another program is writing there"
    assert (tmp_path / "mine-weights.safetensors").read_text() == "the user's"
    assert torch.equal(load_model(tmp_path / "mine").lm_head.weight, load_model(model_dir).lm_head.weight)


def test_a_generation_config_is_saved_as_the_model_came_with_it(tmp_path):
    """Some models ship contradictory settings, which transformers can read but refuses to write."""
    model_dir = save_tiny_llama(tmp_path / "llama")
    shipped = {"do_sample": False, "temperature": 0.9, "top_p": 0.6}
    (Path(model_dir) / "generation_config.json").write_text(json.dumps(shipped))
    model = load_model(model_dir)
    with pytest.raises(ValueError, match="temperature"):
        model.generation_config.save_pretrained(tmp_path)
    vectorlm.save_model(model, tmp_path / "mine")
    assert shipped.items() <= json.loads((tmp_path / "mine/generation_config.json").read_text()).items()
    assert load_model(tmp_path / "mine").generation_config.top_p == 0.6


@pytest.mark.parametrize(
    ("named", "expected"), [(1, [0, 1]), ([3, 1], [0, 1, 3]), (0, 0), ([1, 0], [1, 0]), (None, [0])]
)
def test_an_exported_model_ends_a_text_where_the_runs_engines_did(tmp_path, named, expected):
    model_dir = save_tiny_llama(tmp_path / "llama")
    (Path(model_dir) / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    model = load_model(model_dir)
    model.generation_config.eos_token_id = named
    vectorlm.save_model(model, tmp_path / "mine")
    assert load_model(tmp_path / "mine").generation_config.eos_token_id == expected


def test_an_export_that_fails_leaves_the_weights(tmp_path, monkeypatch):
    model_dir = save_tiny_llama(tmp_path / "llama", tied=True)
    model = load_model(model_dir)
    with monkeypatch.context() as patched:
        patched.setattr(type(load_tokenizer(model_dir)), "save_pretrained", lambda *_: {}["no such file"])
        with pytest.raises(CheckpointError, match=r"KeyError.*\.mine\.weights\.safetensors"):
            vectorlm.save_model(model, tmp_path / "mine")
    kept = load_file(tmp_path / ".mine.weights.safetensors")
    assert all(torch.equal(kept[name], item) for name, item in model.named_parameters())
    assert not (tmp_path / "mine").exists()
    vectorlm.save_model(model, tmp_path / "mine")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["llama", "mine"]


@pytest.mark.parametrize(
    ("tokenizer", "cause"), [("no/such/folder", "OSError"), (None, "NotADirectoryError")]
)
def test_the_weights_are_kept_where_the_tokenizer_is_gone_or_the_folder_cannot_be_made(
    tmp_path, tokenizer, cause
):
    model = load_model(save_tiny_llama(tmp_path / "llama"))
    (tmp_path / ".mine.unfinished").write_text("in the way")
    with pytest.raises(CheckpointError, match=rf"(?s){cause}.*\.mine\.weights\.safetensors"):
        vectorlm.save_model(model, tmp_path / "mine", tokenizer)
    kept = load_file(tmp_path / ".mine.weights.safetensors")
    assert all(torch.equal(kept[name], item) for name, item in model.named_parameters())


def test_what_cannot_be_saved_is_refused_with_what_to_pass(tmp_path):
    model = load_model(save_tiny_llama(tmp_path / "llama"))
    wrapper = torch.nn.Module()
    wrapper.lm = model
    with pytest.raises(TypeError, match="Module"):
        vectorlm.save_model(wrapper, tmp_path / "mine")
    wrapper._modules["_fsdp_wrapped_module"] = model
    with pytest.raises(TypeError, match="fully_shard"):
        vectorlm.save_model(wrapper, tmp_path / "mine")
    model.config.name_or_path = str(tmp_path)
    with pytest.warns(UserWarning, match="no tokenizer is saved"):
        vectorlm.save_model(model, tmp_path / "mine")


def save_where_one_cannot(topology, model_dir, path):
    path.write_text("a file is in the way")
    dist.barrier()
    with pytest.raises(CheckpointError, match="cannot be written"):
        vectorlm.save_model(load_model(model_dir), path / "mine")


def test_every_rank_hears_that_rank_0_could_not_save(tmp_path):
    on_ranks(2, save_where_one_cannot, save_tiny_llama(tmp_path / "llama"), tmp_path / "file")


def test_an_exported_tokenizer_names_the_class_that_it_came_with(folder, tmp_path):
    source = shutil.copytree(folder, tmp_path / "source")
    path = source / "tokenizer_config.json"
    came = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("is_local", "local_files_only"):
        came.pop(name, None)
    path.write_text(json.dumps(came))
    tokenizer = load_tokenizer(source)
    tokenizer.chat_template = "{{ messages }}"
    export_model(load_model(source), tokenizer, tmp_path / "model")
    saved = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert saved["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not {"is_local", "local_files_only"} & saved.keys()
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template == "{{ messages }}"
