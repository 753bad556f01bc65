"""What a run could not do at its end is refused before its start, and what passes is exported, merged and sampled."""

import peft
import pytest
import torch
from rank_processes import on_ranks, save_tiny_llama
from sft_runs import make_config, train
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from vectorlm.cli import main
from vectorlm.errors import ConfigError
from vectorlm.preflight import rehearsal
from vectorlm.preflight.rehearsal import rehearse

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
        rehearse(make_config(tmp_path, tmp_path / "run", lora_peft_config={"r": 2, **options}))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model", "run.yaml"]


PASSES = {
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "whole": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "dora": {"target_modules": ["q_proj"], "use_dora": True, "bias": "lora_only"},
}


@pytest.mark.parametrize(("name", "world_size"), [("dora", 1), *((name, 2) for name in PASSES)])
def test_adapters_that_pass_are_exported_merged_and_sampled(inputs, tmp_path, capsys, name, world_size):
    options = {"r": 2, "lora_alpha": 32, **PASSES[name]}
    on_ranks(world_size, train, make_config(inputs, tmp_path / "run", epochs=1, lora_peft_config=options))
    alone = tmp_path / "run" / "final-model"
    assert main(["export", str(alone), "--merge"]) == 0
    assert main(["sample", "--model", str(alone), "--engine", "hf", "--prompt", "abc"]) == 0
    capsys.readouterr()
    tokens = torch.arange(8)[None]
    base = AutoModelForCausalLM.from_pretrained(inputs / "model")
    start = base(tokens).logits
    expected = peft.PeftModel.from_pretrained(base, alone)(tokens).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final-model-merged")(tokens).logits
    # fp32 round-off: W x + B A x and (W + B A) x
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-5)
    assert (merged - start).abs().max() > 1e-3


def fails(*_, **__):
    raise KeyError("modules_to_save.default.weight")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (peft.PeftModel, "save_pretrained"),
        (PreTrainedTokenizerFast, "save_pretrained"),
        (rehearsal, "card_of"),
    ],
)
def test_whatever_the_end_of_a_run_calls_is_called_before_its_start(
    inputs, tmp_path, monkeypatch, owner, name
):
    config = make_config(inputs, tmp_path / "run", lora_peft_config={"r": 2})
    monkeypatch.setattr(owner, name, fails)
    with pytest.raises(ConfigError, match=r"could not be exported, merged or sampled from .*KeyError"):
        rehearse(config)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_a_lack_of_memory_is_not_blamed_on_the_config(inputs, tmp_path, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(rehearsal, "load_model", fail)
    with pytest.raises(type(error)) as raised:
        rehearse(make_config(inputs, tmp_path / "run"))
    assert raised.value is error


def test_a_folder_that_cannot_be_written_and_a_full_disk_are_refused(inputs, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"train_parameters\.output_dir=.* cannot take the exported model"):
        rehearse(make_config(inputs, tmp_path / "a", output_dir=str(tmp_path / "file" / "run")))
    monkeypatch.setattr(rehearsal.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10_000}))
    with pytest.raises(ConfigError, match="with 10,000 bytes left, and the exported model takes"):
        rehearse(make_config(inputs, tmp_path / "b"))


def test_check_and_run_rehearse(inputs, tmp_path, capsys):
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
    from dataclasses import replace

    tied = save_tiny_llama(tmp_path / "model", tied=True)
    config = make_config(inputs, tmp_path / "run", lora_peft_config={"modules_to_save": ["lm_head"]})
    # A run was killed while it rehearsed.
    (tmp_path / "run" / ".rehearsal-abc" / "final-model").mkdir(parents=True)
    on_ranks(2, run_tied, replace(config, model=str(tied)))
    assert list((tmp_path / "run").iterdir()) == []
