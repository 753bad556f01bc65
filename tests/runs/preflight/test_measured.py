"""The memory plan compared with torch's allocations in whole optimizer steps of small models, on one rank and two."""

from dataclasses import replace

import pytest
import torch
from kit.allocated import most_allocated
from kit.families import Family, save_family
from kit.rank_processes import on_ranks
from kit.vision_models import KINDS, picture, save_vlm

from vectorlm.data.images import image_tokens_of, picture_of
from vectorlm.rl.models import disable_dropout
from vectorlm.runs.config.load import load_config
from vectorlm.runs.preflight import memory
from vectorlm.runs.preflight.memory import plan_of_config
from vectorlm.train import settings
from vectorlm.train.images import weights_of_parts
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.load import load_model, load_tokenizer
from vectorlm.train.lora import add_lora
from vectorlm.train.optimizer_step import OptimizerStep
from vectorlm.train.optimizers import make_optimizer
from vectorlm.train.packing import ContextGroup, Rows
from vectorlm.train.shard import load_sharded

CONFIG = """
model: {model}
train_parameters: {{output_dir: run, max_seq_len: 256, optimizer: {{lr: 1.0e-3}}}}
dataset: {{train_bs: 2, eval_bs: 2, train_ds: data, eval_ds: data}}
"""
MODELS = {
    "deep": Family(
        "LlamaConfig",
        "six blocks",
        {
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 512,
        },
    ),
    "wide": Family("Qwen2Config", "a large vocabulary", {"hidden_size": 96, "vocab_size": 4096}),
    "fused": Family(
        "Phi3Config", "fused projections", {"hidden_size": 192, "intermediate_size": 512, "vocab_size": 1024}
    ),
    "experts": Family(
        "MixtralConfig",
        "eight experts",
        {
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_hidden_layers": 4,
            "vocab_size": 512,
            "num_local_experts": 8,
            "sliding_window": None,
        },
    ),
}
LORA = "lora_peft_config={r: 8, target_modules: all-linear}"
WAYS = {
    1: (
        (None, ()),
        (None, ("use_mp=true",)),
        (0, ("use_activation_checkpointing=true",)),
        (0, (LORA,)),
    ),
    2: (
        (None, ()),
        (0, ()),
        (0, ("use_activation_checkpointing=2", "context_parallel=2")),
        (0, ("use_activation_checkpointing=keep_attention",)),
        (0, ("sharding_strategy=NO_SHARD",)),
    ),
}
"""By number of ranks: the size up to which a model is gathered once, in bytes, and changes of train_parameters."""
COPIES = "lora_peft_config={r: 8, target_modules: all-linear, modules_to_save: [lm_head, embed_tokens]}"
ON_EXPERTS = (
    "lora_peft_config={r: 8, target_modules: [q_proj], "
    "target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]}"
)
# Two chunks of logits.
PADDED = ("pack_rows=false", "max_seq_len=1200")
MORE = {
    1: (
        ("wide", (COPIES,)),
        ("wide", PADDED),
        ("wide", (*PADDED, "use_mp=true")),
        ("deep", ("lora_peft_config={r: 8, target_modules: all-linear, modules_to_save: [mlp]}",)),
        ("experts", (ON_EXPERTS,)),
        ("experts", (ON_EXPERTS, "use_activation_checkpointing=true")),
        ("experts", ("optimizer.name=muon",)),
    ),
    2: (
        ("wide", (COPIES,)),
        ("wide", (COPIES, "sharding_strategy=NO_SHARD")),
        ("experts", (ON_EXPERTS,)),
        ("experts", ("optimizer.name=muon",)),
    ),
}
"""By number of ranks: a model that is not gathered once, and changes of train_parameters."""


def most_held(topology, folder, train, has_pictures=False):
    """Return the peak number of bytes, beyond the weights, of two optimizer steps with two passes each."""
    topology = replace(topology, context_parallel=train.model.context_parallel)

    def load(is_empty):
        model = disable_dropout(load_model(folder, is_empty=is_empty))
        for weight in weights_of_parts(model, train.model.freeze):
            weight.requires_grad_(False)
        return model if train.lora_peft_config is None else add_lora(model, train.lora_peft_config)

    model = load_sharded(load, topology, train.model)
    optimizer = make_optimizer(train.optimizer, model, is_cuda=False)
    is_cast = train.model.computes_in_bf16(is_cuda=False)
    optimizer_step = OptimizerStep(model, optimizer, None, 1.0, topology, computes_in_bf16=is_cast)
    tokens = image_tokens_of(load_tokenizer(folder)) if has_pictures else None
    context, packs = ContextGroup.of(topology), train.model.pack_rows
    computes = LanguageModel(model, context=context, image_tokens=tokens, packs=packs)

    def rows_of(step):
        if tokens is not None:
            return pictured_rows(tokens, train.max_seq_len + 1, step)
        # A pass does not compute the last token of a row.
        ids = torch.randint(48, (2, train.max_seq_len + 1), generator=torch.Generator().manual_seed(0))
        return Rows(ids, torch.ones_like(ids), torch.ones_like(ids).cumsum(1) > 1, (0, 1))

    def two_steps():
        for step in range(2):
            for is_last in (False, True):
                rows = rows_of(2 * step + is_last)
                optimizer_step.backward(-computes.logprobs(rows).sum() / 1000, is_last)
            optimizer_step.finish(1)

    return most_allocated(two_steps)


def pictured_rows(tokens, length, step):
    """Return two rows of images, each after one token; `step` selects the images."""
    ids, images = [], []
    num = length // (1 + len(tokens.expansion(picture_of(picture("r", (128, 128))))))
    for row in range(2):
        shown = [picture_of(picture((step, row, place), (128, 128))) for place in range(num)]
        expanded, placed = tokens.expand([5, tokens.placeholder] * len(shown), shown)
        ids.append(expanded + [5] * (length - len(expanded)))
        images.append(placed)
    ids = torch.tensor(ids)
    return Rows(ids, torch.ones_like(ids), torch.ones_like(ids).cumsum(1) > 1, (0, 1), images=images)


def measure(topology, cases):
    found = []
    for limit, folder, train in cases:
        settings.GATHER_ONCE_BYTES = limit
        found.append(most_held(topology, folder, train))
    return found


def planned(config, world_size):
    """Return the planned bytes of one rank without its weights."""
    names = ("gradients", "optimizer state", "gathered weights", "activations", "images")
    rows = [row.training for row in plan_of_config(config, world_size).rows if row.name in names]
    return sum(rows) // world_size


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_plan_is_near_what_is_allocated(tmp_path, monkeypatch, world_size):
    path = tmp_path / "my.yaml"
    cases = {}
    folders = {name: save_family(family, tmp_path / name) for name, family in MODELS.items()}
    ways = [(name, *way) for name in MODELS for way in WAYS[world_size]]
    for name, limit, changes in (*ways, *((name, 0, changes) for name, changes in MORE[world_size])):
        path.write_text(CONFIG.format(model=folders[name]))
        limit = settings.GATHER_ONCE_BYTES if limit is None else limit
        config = load_config(path, [f"train_parameters.{change}" for change in changes])
        with monkeypatch.context() as patch:
            patch.setattr(settings, "GATHER_ONCE_BYTES", limit)
            expected = planned(config, world_size)
        cases[f"{name} {limit} {changes}"] = (limit, folders[name], config.train_parameters), expected
    measured = zip(*on_ranks(world_size, measure, [case for case, _ in cases.values()]), strict=True)
    ratios = {
        name: [one / expected for one in peaks]
        for (name, (_, expected)), peaks in zip(cases.items(), measured, strict=True)
    }
    # Recomputed blocks, context parallelism and adapters are planned less exactly.
    limits = {name: 0.15 if name.endswith("()") else 0.2 for name in ratios}
    far = {
        name: case_ratios
        for name, case_ratios in ratios.items()
        if max(abs(one - 1) for one in case_ratios) > limits[name]
    }
    assert far == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "change",
    [
        *("freeze=[vision]", "freeze=[]"),
        "lora_peft_config={target_modules: all-linear, exclude_modules: [lm_head]}",
    ],
)
def test_the_plan_counts_pixels_and_the_vision_model(tmp_path, monkeypatch, kind, change):
    folder, path = save_vlm(kind, tmp_path / "model"), tmp_path / "my.yaml"
    tokens = image_tokens_of(load_tokenizer(folder))
    num = int((pictured_rows(tokens, 257, 0).input_ids == tokens.image_token).sum())
    assert num > 200
    monkeypatch.setattr(memory, "_image_tokens", lambda *_: num)
    path.write_text(CONFIG.format(model=folder))
    config = load_config(path, [f"train_parameters.{change}"])
    (found,) = on_ranks(1, most_held, folder, config.train_parameters, True)
    assert found / planned(config, 1) == pytest.approx(1, abs=0.15)
