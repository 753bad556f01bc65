"""Trial exports before a run: they refuse a run whose export would fail at the end; other exports merge and sample."""

import json
import shutil
from dataclasses import replace

import peft
import pytest
import torch
from kit.families import FAMILIES, save_family
from kit.rank_processes import on_ranks, save_tiny_llama
from kit.rl_runs import config_of, save_files
from kit.sft_runs import make_config, train
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)

from vectorlm.algorithms.settings import PreferenceSettings
from vectorlm.cli import main
from vectorlm.errors import ConfigError
from vectorlm.runs.preflight import dry_run as module
from vectorlm.runs.preflight.dry_run import dry_run, rows_apart
from vectorlm.train.load import load_model
from vectorlm.train.lora import add_lora, unmatched_names

SHARED = "share one weight"
REFUSED = [
    (True, {"modules_to_save": ["lm_head"]}, SHARED),
    (True, {"modules_to_save": ["embed_tokens"]}, SHARED),
    (True, {"modules_to_save": ["embed_tokens", "lm_head"]}, SHARED),
    (True, {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}, SHARED),
    (True, {"target_modules": ["q_proj", "embed_tokens"]}, SHARED),
    (True, {"target_modules": ["lm_head"]}, SHARED),
    (False, {"target_modules": ["embed_tokens"], "use_dora": True}, "DoraEmbeddingVariant"),
    (False, {"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
    (False, {"lora_bias": True}, "no bias"),
]


@pytest.mark.parametrize(("tied", "options", "message"), REFUSED)
def test_adapters_without_a_way_out_are_refused_before_the_first_step(tmp_path, tied, options, message):
    save_tiny_llama(tmp_path / "model", tied=tied)
    with pytest.raises(ConfigError, match=message):
        dry_run(make_config(tmp_path, tmp_path / "run", lora_peft_config={"r": 2, **options}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run.yaml"]


PASSES = {
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "whole": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "dora": {"target_modules": ["q_proj"], "use_dora": True, "bias": "lora_only"},
}


@pytest.mark.parametrize(
    "name", ["whole", *(pytest.param(name, marks=pytest.mark.slow) for name in ("embeddings", "dora"))]
)
def test_adapters_that_pass_are_exported_merged_and_sampled(inputs, tmp_path, capsys, name):
    options = {"r": 2, "lora_alpha": 32, **PASSES[name]}
    on_ranks(2, train, make_config(inputs, tmp_path / "run", epochs=1, lora_peft_config=options))
    alone = tmp_path / "run" / "final-model"
    assert main(["export", str(alone), "--merge"]) == 0
    assert main(["sample", "--model", str(alone), "--engine", "hf", "--prompt", "abc"]) == 0
    capsys.readouterr()
    tokens = torch.arange(8)[None]
    base = AutoModelForCausalLM.from_pretrained(inputs / "model")
    start = base(tokens).logits
    expected = peft.PeftModel.from_pretrained(base, alone)(tokens).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final-model-merged")(tokens).logits
    # The difference is fp32 round-off: W x + B A x against (W + B A) x.
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-5)
    assert (merged - start).abs().max() > 1e-3


def fails(*_, **__):
    raise KeyError("modules_to_save.default.weight")


@pytest.mark.parametrize(
    ("owner", "name"),
    [(peft.PeftModel, "save_pretrained"), (PreTrainedTokenizerFast, "save_pretrained"), (module, "card_of")],
)
def test_whatever_the_end_of_a_run_calls_is_called_before_its_start(
    inputs, tmp_path, monkeypatch, owner, name
):
    config = make_config(inputs, tmp_path / "run", lora_peft_config={"r": 2})
    monkeypatch.setattr(owner, name, fails)
    with pytest.raises(ConfigError, match=r"could not be exported, merged or sampled from .*KeyError"):
        dry_run(config)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_a_lack_of_memory_is_not_blamed_on_the_config(inputs, tmp_path, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(module, "load_model", fail)
    with pytest.raises(type(error)) as raised:
        dry_run(make_config(inputs, tmp_path / "run"))
    assert raised.value is error


def test_a_folder_that_cannot_be_written_and_a_full_disk_are_refused(inputs, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"train_parameters\.output_dir="):
        dry_run(make_config(inputs, tmp_path / "a", output_dir=str(tmp_path / "file" / "run")))
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10_000}))
    with pytest.raises(ConfigError, match=r"train_parameters\.output_dir=.*10,000"):
        dry_run(make_config(inputs, tmp_path / "b"))


def test_check_and_run_dry_run(inputs, tmp_path, capsys):
    tied = save_tiny_llama(tmp_path / "model", tied=True)
    make_config(inputs, tmp_path / "run")
    options = [
        "--set",
        f"model={tied}",
        "--set",
        "train_parameters.lora_peft_config={target_modules: [lm_head]}",
    ]
    assert main(["check", str(tmp_path / "run.yaml"), *options]) == 2
    assert SHARED in capsys.readouterr().err


def run_tied(topology, config):
    with pytest.raises(ConfigError, match=SHARED):
        train(topology, config)


def test_every_rank_hears_of_it(inputs, tmp_path):
    tied = save_tiny_llama(tmp_path / "model", tied=True)
    config = make_config(inputs, tmp_path / "run", lora_peft_config={"modules_to_save": ["lm_head"]})
    # A run was killed during its trial export.
    (tmp_path / "run" / ".dry-run-abc" / "final-model").mkdir(parents=True)
    on_ranks(2, run_tied, replace(config, model=str(tied)))
    assert list((tmp_path / "run").iterdir()) == []


UNMATCHED = [
    {"target_modules": ["q_proj", "v_porj"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["lm_haed"]},
    {"target_modules": ["q_proj"], "rank_pattern": {"zzz": 2}},
    {"target_modules": ["q_proj"], "alpha_pattern": {"^q_proj": 100}},
    {"target_modules": ["q_proj"], "exclude_modules": ["zzz"]},
    {"target_modules": ["q_proj"], "exclude_modules": ".*zzz"},
    {"target_modules": ["q_proj"], "layers_to_transform": [0, 99]},
    {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": ["layers", "zzz"]},
]
MATCHED = [
    {"target_modules": "all-linear", "exclude_modules": ["o_proj"]},
    {"target_modules": r".*\.[qv]_proj", "exclude_modules": r".*\.0\..*"},
    {"target_modules": ["self_attn.q_proj", "v_proj"], "rank_pattern": {r"layers\.1\..*": 4}},
    {"target_modules": ["q_proj"], "alpha_pattern": {"q_proj": 100}, "layers_to_transform": 0},
    {"target_modules": ["q_proj"], "layers_to_transform": [0, 2], "layers_pattern": "layers"},
]


@pytest.mark.parametrize("options", UNMATCHED)
def test_names_of_adapters_that_no_layer_has_are_refused(inputs, tmp_path, options):
    wrong = next(
        name for name in ("v_porj", "lm_haed", "zzz", r"\^q_proj", "99") if name.strip("\\") in str(options)
    )
    with pytest.raises(ConfigError, match=rf"lora_peft_config=.*{wrong}"):
        dry_run(make_config(inputs, tmp_path / "run", lora_peft_config={"r": 2, **options}))


@pytest.mark.parametrize("options", MATCHED)
def test_names_of_adapters_that_layers_have_pass(inputs, tmp_path, options):
    notes = dry_run(make_config(inputs, tmp_path / "run", lora_peft_config={"r": 2, **options}))
    assert not any("lora_peft_config" in note for note in notes)


def test_names_that_peft_replaces_by_fused_experts_pass_and_other_names_do_not(tmp_path):
    model = load_model(save_family(FAMILIES["OLMoE"], tmp_path / "model"))
    options = {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj", "v_porj"]}
    assert [*unmatched_names(add_lora(model, options), options)] == ["target_modules 'v_porj'"]


@pytest.mark.parametrize(
    ("options", "is_still"),
    [
        ({"lora_alpha": 0}, True),
        ({"lora_dropout": 1.0}, True),
        ({"lora_alpha": 0, "modules_to_save": ["lm_head"]}, False),
        ({"lora_dropout": 0.5}, False),
    ],
)
def test_adapters_that_cannot_learn_are_named(inputs, tmp_path, options, is_still):
    options = {"r": 2, "target_modules": ["q_proj"], **options}
    notes = dry_run(make_config(inputs, tmp_path / "run", lora_peft_config=options))
    assert any("no weight will move" in note for note in notes) == is_still


def test_the_loss_of_a_router_that_is_left_out_is_named(inputs, tmp_path):
    def notes(asks, **settings):
        model = tmp_path / f"model-{asks}"
        shutil.copytree(inputs / "model", model, dirs_exist_ok=True)
        sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
        made = MixtralConfig(**sizes, **heads, output_router_logits=asks, router_aux_loss_coef=5.0)
        MixtralForCausalLM(made).save_pretrained(model)
        config = make_config(inputs, tmp_path / "run", **settings)
        return dry_run(replace(config, model=str(model)))

    assert not any("router" in note for note in notes(False))
    assert not any("router" in note for note in notes(True))
    left_out = notes(True, router_aux_loss_coef=0.0)
    assert any("router_aux_loss_coef in config.json) is not trained on" in note for note in left_out)


LONG = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 32}
SCALINGS = {
    "longrope": {"rope_type": "longrope", **LONG},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "default": {"rope_type": "default"},
}


@pytest.mark.parametrize("scaling", SCALINGS)
def test_the_length_from_which_rows_change_those_beside_them_is_found(scaling):
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        rope_parameters={"rope_theta": 10000.0, **SCALINGS[scaling]},
    )
    model = LlamaForCausalLM(config).eval()
    tokens = torch.arange(40)[None]

    def first(last):
        positions = torch.cat([torch.arange(9), torch.tensor([last])])[None]
        return model(input_ids=tokens[:, :10], position_ids=positions).logits[:, :9]

    differs = not torch.equal(first(20), first(39))
    assert differs == (scaling in ("longrope", "dynamic"))
    assert rows_apart(model, 40) == (32 if differs else None)
    assert rows_apart(model, 32) is None


def test_rows_that_change_those_beside_them_are_refused_in_rl_and_named_in_fine_tuning(inputs, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(inputs / "model", model)
    description = json.loads((model / "config.json").read_text())
    num_factors = description["hidden_size"] // description["num_attention_heads"] // 2
    factors = {"short_factor": [1.0] * num_factors, "long_factor": [4.0] * num_factors}
    description["rope_parameters"] = {"rope_theta": 10000.0, **SCALINGS["longrope"], **factors}
    (model / "config.json").write_text(json.dumps(description))
    config = make_config(inputs, tmp_path / "run", max_seq_len=40)
    config = replace(config, model=str(model))
    assert "longer than 32 tokens" in dry_run(config)[0]
    pairs = replace(config, preference=PreferenceSettings(loss="dpo"))
    with pytest.raises(ConfigError, match=r"train_parameters\.max_seq_len=40.*Use 32 at most"):
        dry_run(pairs)
    short = replace(pairs, train_parameters=replace(config.train_parameters, max_seq_len=32))
    assert not any("32" in note for note in dry_run(short))
    files = save_files(tmp_path / "rl")
    rl = replace(config_of(files, tmp_path / "rl-run"), model=str(model))
    with pytest.raises(ConfigError, match="Use 32 at most"):
        dry_run(replace(rl, train_parameters=replace(rl.train_parameters, max_seq_len=40)))
