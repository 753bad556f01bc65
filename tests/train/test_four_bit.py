"""A base in 4 bits (AWQ, GPTQ): its weights, unsupported settings, a run with it, and the saved files."""

import json

import pytest
import torch
from kit.families import FAMILIES, save_family
from kit.four_bit import save_four_bit
from kit.rank_processes import on_ranks
from kit.rl_runs import config_of, lines, save_files
from safetensors.torch import load_file, save_file

from vectorlm.cli import main
from vectorlm.cli.export import export, find_source
from vectorlm.errors import ConfigError
from vectorlm.runs.config.load import load_config
from vectorlm.runs.preflight.memory import plan_of_config
from vectorlm.runs.preflight.settings import setting_problems
from vectorlm.runs.reinforcement import reinforce
from vectorlm.sampling.weights.model_size import read_model_size
from vectorlm.train.load import load_model


@pytest.fixture
def plain(tmp_path):
    return save_family(FAMILIES["Qwen2"], tmp_path / "plain")


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_the_weights_are_the_nearest_of_sixteen(plain, tmp_path, method):
    """With a wrong order of numbers, a wrong zero point or a wrong scale, the weights would be further off."""
    model = load_model(save_four_bit(plain, tmp_path / "model", method))
    expected, empty = load_model(plain), load_model(tmp_path / "model", is_empty=True)
    assert [*empty.state_dict()] == [*model.state_dict()] == [*expected.state_dict()]
    for name, weight in expected.state_dict().items():
        found = model.state_dict()[name]
        if "_proj.weight" not in name:
            torch.testing.assert_close(found, weight.bfloat16().float(), rtol=0, atol=0)
            continue
        groups, read = weight.view(len(weight), -1, 32), found.view(len(weight), -1, 32)
        largest = groups.abs().amax(-1, keepdim=True) / 7
        spread = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
        # AWQ's zero points are rounded too.
        step = spread if method == "awq" else largest / 2
        assert ((read - groups).abs() <= 1.05 * step).all(), name
        assert all(len(row.unique()) <= 16 for group in read for row in group)
    assert model.config.name_or_path == str(tmp_path / "model")
    assert "quantization_config" not in model.config.to_dict()
    assert read_model_size(tmp_path / "model") == read_model_size(plain)


@pytest.mark.parametrize(
    ("method", "options", "text"),
    [
        ("gptq", {"desc_act": True}, "desc_act"),
        ("gptq", {"sym": False}, "sym"),
        ("gptq", {"bits": 8}, "bits"),
        ("gptq", {"dynamic": {"-:.*": {}}}, "dynamic"),
        ("awq", {"version": "gemv"}, "version"),
        ("awq", {"zero_point": False}, "zero_point"),
        ("awq", {"lm_head": True}, "lm_head"),
        ("gptq", {"bits": None}, "bits"),
    ],
)
def test_a_layout_that_is_not_read_is_refused_by_name(plain, tmp_path, method, options, text):
    folder = save_four_bit(plain, tmp_path / "model", method, **options)
    with pytest.raises(ConfigError, match=f"quantization_config.{text} "):
        load_model(folder)


def test_only_files_that_the_index_names_are_read(plain, tmp_path):
    """vLLM reads no other files, and a leftover file could have other weights."""
    folder = save_four_bit(plain, tmp_path / "model", "awq")
    expected, whole = load_model(folder).state_dict(), folder / "model.safetensors"
    tensors = load_file(whole)
    halves = [dict(list(tensors.items())[start::2]) for start in (0, 1)]
    files = {f"model-{number}-of-2.safetensors": half for number, half in enumerate(halves)}
    for name, half in files.items():
        save_file(half, folder / name, {"format": "pt"})
    names = {name: file for file, half in files.items() for name in half}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    save_file(
        {name: tensor + 1 for name, tensor in tensors.items()}, folder / "old.safetensors", {"format": "pt"}
    )
    whole.unlink()
    for name, weight in load_model(folder).state_dict().items():
        assert torch.equal(weight, expected[name]), name
    for broken in (b"", b"version https://git-lfs"):
        (folder / "model-1-of-2.safetensors").write_bytes(broken)
        with pytest.raises(ConfigError, match="cannot be loaded"):
            load_model(folder)


@pytest.mark.parametrize(
    ("method", "part"),
    [(method, part) for method in ("awq", "gptq") for part in ("scales", "qzeros", "qweight")]
    + [("gptq", "g_idx")],
)
def test_a_damaged_layer_is_refused(plain, tmp_path, method, part):
    """The damage is a tensor of another shape, a missing tensor, or groups in another order."""
    folder = save_four_bit(plain, tmp_path / "model", method)
    whole = load_file(folder / "model.safetensors")
    name = f"model.layers.0.self_attn.q_proj.{part}"
    for broken in (None, whole[name].flip(0)[:-1].contiguous()):
        tensors = {other: tensor for other, tensor in whole.items() if other != name}
        if broken is not None:
            tensors[name] = broken
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        # vLLM ignores GPTQ's zero points, and its groups if they consist of adjacent inputs.
        if method == "gptq" and (part == "qzeros" or (part == "g_idx" and broken is None)):
            load_model(folder)
        else:
            with pytest.raises(ConfigError, match=r"q_proj|lacks"):
                load_model(folder)


TEXT = """\
model: model
train_parameters: {output_dir: run, max_seq_len: 16, optimizer: {lr: 0.01}, lora_peft_config: {r: 4}}
engine: {dtype: bfloat16}
evaluation: {prompts: [a]}
dataset: {train_bs: 4, eval_bs: 4, train_ds: data, eval_ds: data}
"""


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ([], []),
        (["train_parameters.lora_peft_config=null"], ["train_parameters.lora_peft_config"]),
        (["train_parameters.quantization=nf4"], ["train_parameters.quantization", "model"]),
        (["train_parameters.share_base=true", "train_parameters.dtype=bfloat16"], ["model"]),
        (["engine.dtype=float32"], ["engine.dtype"]),
        (["engine.dtype=auto"], ["engine.dtype"]),
        (["engine.dtype=auto", "train_parameters.dtype=bfloat16"], []),
        (["engine.quantization=int8"], ["engine.quantization"]),
        (["engine.lora_mode=merged"], ["engine.lora_mode"]),
        (["engine.inference=transformers"], ["engine.lora_mode"]),
        (["engine.sleep=all"], ["engine.sleep"]),
        (["engine.sleep=kv_cache"], []),
        (
            ["train_parameters.exact=true"],
            ["train_parameters.exact", "engine.dtype", "train_parameters.exact"],
        ),
        (["train_parameters.lora_peft_config={r: 4, bias: all}"], ["train_parameters.lora_peft_config.bias"]),
        (["evaluation.prompts=null", "engine.dtype=auto"], []),
        (
            [
                "evaluation.prompts=null",
                "engine.dtype=auto",
                "train_parameters.lora_peft_config={r: 4, use_dora: true}",
            ],
            ["train_parameters.lora_peft_config.use_dora"],
        ),
    ],
)
def test_what_a_base_in_4_bits_cannot_be_used_with_is_refused(plain, tmp_path, monkeypatch, overrides, keys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vectorlm.runs.preflight.settings.is_installed", lambda name: name != "bitsandbytes")
    save_four_bit(plain, tmp_path / "model", "awq")
    (tmp_path / "my.yaml").write_text(TEXT)
    texts = list(setting_problems(load_config("my.yaml", overrides), 2))
    assert [text.partition("=")[0] for text in texts] == keys


def test_the_memory_plan_counts_4_bits_for_the_engine(plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_four_bit(plain, tmp_path / "model", "gptq")
    (tmp_path / "my.yaml").write_text(TEXT)
    engine = plan_of_config(load_config("my.yaml"), 1).demand.engine
    assert 0.5 < engine.bytes_in_blocks < 0.6
    assert not engine.is_packed


@pytest.mark.parametrize(
    ("described", "keys"),
    [
        ({"quantization_config": {"quant_method": ["awq"]}}, []),
        ({"quantization_config": {"quant_method": {}}}, []),
        ({"quantization_config": ["awq"]}, []),
        ({"quantization_config": {"quant_method": "GPTQ"}}, ["model", "rl.teacher.model"]),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4, "zero_point": True}},
            ["model", "rl.teacher.model"],
        ),
        ({"num_experts": 4}, ["model", "rl.teacher.model"]),
    ],
)
def test_every_model_of_a_run_is_checked_whatever_its_config_says(tmp_path, described, keys):
    files = save_files(tmp_path)
    (files / "model").rename(files / "plain")
    folder = save_four_bit(files / "plain", files / "model", "awq")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **described}))
    overrides = [
        f"rl.teacher={{model: {folder}, kind: full}}",
        "train_parameters.lora_peft_config={r: 8}",
        "engine.dtype=bfloat16",
    ]
    texts = setting_problems(config_of(files, tmp_path / "run", overrides=overrides), 1)
    assert [
        text.partition("=")[0] for text in texts if "4 bits" in text or "quantization_config" in text
    ] == keys


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "method"), [(2, "awq"), (1, "gptq")])
def test_a_run_saves_adapters_that_sample_and_merge(tmp_path, capsys, world_size, method):
    files = save_files(tmp_path)
    (files / "model").rename(files / "plain")
    save_four_bit(files / "plain", files / "model", method)
    overrides = [
        "engine.dtype=bfloat16",
        "train_parameters.lora_peft_config={r: 8, target_modules: all-linear}",
        "train_parameters.optimizer.lr=1e-2",
        "rl.kl_coef=0.01",
        "rl.keep_adapters={every: 1, last: 2}",  # The engine samples from its base, too.
    ]
    on_ranks(world_size, run, config_of(files, tmp_path / "run", overrides=overrides))
    gaps = [
        entry["sampler/logprob_gap_mean"]
        for entry in lines(tmp_path / "run/metrics.jsonl")
        if "sampler/logprob_gap_mean" in entry
    ]
    assert gaps
    assert max(gaps) < 0.02
    export(find_source(tmp_path / "run/checkpoints"), tmp_path / "merged", merges=True, dtype=None)
    layer, factors = (
        "model.layers.1.self_attn.q_proj",
        load_file(tmp_path / "run/final-model/adapter_model.safetensors"),
    )
    a, b = (factors[f"base_model.model.{layer}.lora_{entry}.weight"] for entry in "AB")
    expected = load_model(files / "model").get_parameter(f"{layer}.weight") + b @ a
    merged = load_model(tmp_path / "merged")
    torch.testing.assert_close(merged.get_parameter(f"{layer}.weight"), expected, rtol=0, atol=1e-6)
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    capsys.readouterr()
    assert main(["sample", "--model", str(tmp_path / "run/final-model"), "--prompt", "aaa"]) == 0
    assert "> aaa" in capsys.readouterr().out


def run(topology, config):
    reinforce(config, topology)
