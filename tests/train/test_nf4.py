"""Adapters on a base in 4 bits (NF4): computed, sent, saved and exported numbers."""

import json

import pytest
import torch
from kit.rank_processes import on_ranks, save_tiny_llama
from kit.rl_runs import config_of, lines, save_files
from kit.tensors import full
from torch.distributed.checkpoint import FileSystemReader

from vectorlm.cli.export import export, find_source
from vectorlm.packages import is_installed
from vectorlm.runs.config.load import load_config
from vectorlm.runs.preflight import settings as preflight_settings
from vectorlm.runs.preflight.settings import setting_problems
from vectorlm.runs.reinforcement import reinforce
from vectorlm.sampling.contract import WeightSet
from vectorlm.sampling.transport import pull_obstacle
from vectorlm.sampling.weights.module_source import ModuleSource
from vectorlm.train.checkpoint.state import CheckpointStore
from vectorlm.train.load import load_model, quantize_blocks, round_blocks
from vectorlm.train.lora import add_lora
from vectorlm.train.recorder import num_multiplied
from vectorlm.train.shard import shard_model
from vectorlm.types import TrainedModel

needs_bitsandbytes = pytest.mark.skipif(not is_installed("bitsandbytes"), reason="needs bitsandbytes")
LORA = {"r": 4, "target_modules": "all-linear"}


def build(topology, folder, *, is_quantized):
    model = load_model(folder)
    if is_quantized:
        quantize_blocks(model, topology.device)
    else:
        round_blocks(model)
    torch.manual_seed(1)
    return shard_model(add_lora(model, LORA), topology)


def learn(model, optimizer):
    tokens = torch.arange(8)[None]
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    gradients = [full(entry.grad).clone() for entry in model.parameters() if entry.requires_grad]
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), gradients


def optimizer_of(model):
    return torch.optim.AdamW([entry for entry in model.parameters() if entry.requires_grad], lr=1e-2)


def compare(topology, folder, path):
    """Return losses and gradients of an NF4 model and an equal plain one, sent rows, and whether training resumes."""
    found = []
    for is_quantized in (True, False):
        model = build(topology, folder, is_quantized=is_quantized)
        optimizer = optimizer_of(model)
        found.append([learn(model, optimizer) for _ in range(2)])
        if is_quantized:
            source = ModuleSource(model, topology)
            shapes = {entry.name: entry.shape for entry in source.manifest()}
            assert "quantised" in pull_obstacle([WeightSet("base", source)], ["pull"], topology)
            sent = {
                name: (entry.first_row, entry.rows if entry.change is None else entry.change(entry.rows))
                for name, (entry,) in source.writes.items()
            }
            store = CheckpointStore(path, {})
            store.save(2, {"policy": TrainedModel(model, optimizer)}, {})
            after = learn(model, optimizer)
            again = build(topology, folder, is_quantized=True)
            restored = optimizer_of(again)
            store.load(2, {"policy": TrainedModel(again, restored)})
            goes_on = learn(again, restored)[0] == after[0]
    return found, shapes, {name: (first, rows.clone()) for name, (first, rows) in sent.items()}, goes_on


@needs_bitsandbytes
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_engine_is_sent_the_numbers_that_the_trainer_computes_with(tmp_path, world_size):
    # A row has 36 numbers, and a block of 64 numbers with one scale crosses its end.
    folder = save_tiny_llama(tmp_path / "model", hidden_size=36)
    plain = load_model(folder)
    rounded = load_model(folder)
    round_blocks(rounded)
    wanted = dict(rounded.named_parameters())
    ranks = on_ranks(world_size, compare, folder, tmp_path / "checkpoints")
    for (quantized, like), shapes, sent, goes_on in ranks:
        assert goes_on
        assert shapes == {name: tuple(entry.shape) for name, entry in wanted.items()}
        for (loss, gradients), (loss_like, gradients_like) in zip(quantized, like, strict=True):
            assert loss == pytest.approx(loss_like, abs=1e-5)
            # After a step of Adam, fp32 sums in another order differ by this much.
            torch.testing.assert_close(gradients, gradients_like, rtol=1e-3, atol=1e-5)
        for name, (first, rows) in sent.items():
            assert torch.equal(rows, wanted[name][first : first + len(rows)])
    for name, whole in wanted.items():
        assert sum(len(sent[name][1]) for _, _, sent, _ in ranks) == len(whole)
        is_moved = not torch.equal(whole, plain.get_parameter(name))
        assert is_moved == ("proj" in name)
    (shards,) = (tmp_path / "checkpoints").glob("*/shards")
    held = FileSystemReader(shards).read_metadata().state_dict_metadata
    assert all("lora_" in name or "param_groups" in name for name in held)


@needs_bitsandbytes
def test_weights_in_4_bits_count_for_the_speed_as_in_32_bits(tmp_path):
    folder = save_tiny_llama(tmp_path / "model", hidden_size=36)
    counts = [
        num_multiplied(add_lora(model, LORA))
        for model in (load_model(folder), quantize_blocks(load_model(folder), "cpu"))
    ]
    assert counts[0] == counts[1]


@needs_bitsandbytes
@pytest.mark.slow
def test_a_run_samples_from_its_own_numbers_and_exports_them_merged(tmp_path):
    """vLLM runs on two ranks: as with a base in fp32, the gap is fp32 round-off."""
    files = save_files(tmp_path)
    overrides = [
        "train_parameters.quantization=nf4",
        "train_parameters.lora_peft_config={r: 8, target_modules: all-linear}",
        "train_parameters.optimizer.lr=1e-2",
        "rl.kl_coef=0.01",
    ]
    config = config_of(files, tmp_path / "run", overrides=overrides)
    on_ranks(2, run, config)
    gaps = [
        entry["sampler/logprob_gap_max"]
        for entry in lines(tmp_path / "run/metrics.jsonl")
        if "sampler/logprob_gap_max" in entry
    ]
    assert gaps
    assert max(gaps) < 1e-5
    export(find_source(tmp_path / "run/checkpoints"), tmp_path / "merged", merges=True, dtype=None)
    merged = load_model(tmp_path / "merged")
    base = load_model(files / "model")
    round_blocks(base)
    from safetensors.torch import load_file

    factors = load_file(tmp_path / "run/final-model/adapter_model.safetensors")
    layer = "model.layers.1.mlp.up_proj"
    a, b = (factors[f"base_model.model.{layer}.lora_{entry}.weight"] for entry in "AB")
    expected = base.get_parameter(f"{layer}.weight") + 8 / 8 * b @ a
    torch.testing.assert_close(merged.get_parameter(f"{layer}.weight"), expected, rtol=0, atol=1e-6)


def run(topology, config):
    reinforce(config, topology)


TEXT = """\
model: model
train_parameters: {output_dir: run, max_seq_len: 16, optimizer: {lr: 0.01}, quantization: nf4}
dataset: {train_bs: 4, eval_bs: 4, train_ds: data, eval_ds: data}
"""
TRAIN = "train_parameters"
ADAPTED = f"{TRAIN}.lora_peft_config={{r: 4}}"
SAMPLER = f"{TRAIN}.sampler={{prompts: [a]}}"


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ([ADAPTED], []),
        ([ADAPTED, SAMPLER], []),
        ([], ["quantization"]),
        ([ADAPTED, f"{TRAIN}.cpu_offload=true"], ["cpu_offload"]),
        ([ADAPTED, f"{TRAIN}.low_cpu_mem_usage=true"], ["low_cpu_mem_usage"]),
        ([ADAPTED, SAMPLER, "engine.lora_mode=merged"], ["engine.lora_mode"]),
        ([ADAPTED, SAMPLER, "engine.inference=transformers"], ["engine.lora_mode"]),
        ([f"{TRAIN}.lora_peft_config={{r: 4, use_dora: true}}"], ["lora_peft_config.use_dora"]),
    ],
)
@pytest.mark.parametrize("is_here", [True, False])
def test_what_a_base_in_4_bits_cannot_do_is_refused_by_name(tmp_path, monkeypatch, overrides, keys, is_here):
    monkeypatch.chdir(tmp_path)
    save_tiny_llama(tmp_path / "model")
    (tmp_path / "my.yaml").write_text(TEXT)
    monkeypatch.setattr(preflight_settings, "is_installed", lambda name: is_here)
    texts = list(setting_problems(load_config("my.yaml", overrides), 2))
    missing = [] if is_here else ["quantization"]
    assert [entry.removeprefix(f"{TRAIN}.").partition("=")[0] for entry in texts] == missing + keys
    if not is_here:
        assert "pip install 'vectorlm[qlora]'" in texts[0]


@pytest.mark.parametrize("more", [{"quantization_config": {"bits": 4}}, {"num_experts": 4}])
def test_a_model_that_is_quantised_already_or_has_experts_is_refused(tmp_path, monkeypatch, more):
    monkeypatch.chdir(tmp_path)
    save_tiny_llama(tmp_path / "model")
    described = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps({**described, **more}))
    (tmp_path / "my.yaml").write_text(TEXT)
    monkeypatch.setattr(preflight_settings, "is_installed", lambda name: True)
    (text,) = setting_problems(load_config("my.yaml", [ADAPTED]), 1)
    assert text.startswith("model='model'")
