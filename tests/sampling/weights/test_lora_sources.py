import copy

import pytest
import torch
from kit.families import FAMILIES, save_family
from kit.rank_processes import on_ranks, save_tiny_llama
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from vectorlm.errors import ConfigError, WeightMismatch
from vectorlm.ranks.topology import Topology
from vectorlm.sampling.weights.arena import Arena, MappedArenas, plain_slots
from vectorlm.sampling.weights.inspection import checksum
from vectorlm.sampling.weights.lora_source import adapter_source, lora_weight_sets, merged_source
from vectorlm.sampling.weights.module_source import ModuleSource, manifest_of
from vectorlm.sampling.weights.plan import Layout

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OPTIONS = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "every linear layer": {"target_modules": "all-linear", "lora_alpha": 3},
    "rank-stabilised": {"target_modules": ALL_LINEAR, "use_rslora": True, "lora_alpha": 5},
    "patterns": {
        "target_modules": ALL_LINEAR,
        "rank_pattern": {"q_proj": 5, "layers.1.mlp.up_proj": 1},
        "alpha_pattern": {"k_proj": 32},
    },
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "a parameter": {"target_modules": ["q_proj"], "target_parameters": ["mlp.up_proj.weight"]},
    "DoRA": {"target_modules": ALL_LINEAR, "use_dora": True},
    "modules to save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    "PiSSA": {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": "pissa"},
}


def adapted(folder, options, seed=0):
    """Return a PEFT model whose trained tensors are all far from their initial values."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(**{"task_type": "CAUSAL_LM", "r": 2, **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.3)
    return model


def plain_merge(model):
    """Return PEFT's merged weights by name."""
    merged = copy.deepcopy(model).merge_and_unload()
    return {name: parameter.detach() for name, parameter in merged.named_parameters()}


def publish(source, path):
    """Publish in float32 into the arena at `path`; return the slots and the checksums."""
    num_bytes, slots = plain_slots(source.manifest(), lambda name: "float32")
    return slots, source.publish(Layout(path, num_bytes, slots), True)


def sent_by(source):
    """Return the tensors that a single rank sends, by name."""
    arena = Arena.create(1 << 20)
    slots, _ = publish(source, arena.path)
    return {slot.name: arena.view(slot) for slot in slots}


def publish_sharded(topology, folder, plans):
    """Publish every case of `plans` from a new model; return the checksums, and the parameters that changed."""
    all_sums, changed = [], []
    for options, source_of, path in plans:
        model = adapted(folder, options)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for block in model.base_model.model.model.layers:
            fully_shard(block)
        fully_shard(model)
        all_sums.append(publish(source_of(model, topology), path)[1])
        after = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
        changed += [name for name in before if not torch.equal(after[name], before[name])]
    return all_sums, changed


ADAPTERS = ["plain", "rank-stabilised", "patterns", "embedding and head"]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return the folder, and the tensors and checksums that two ranks published, by case and mode."""
    # 47 rows do not divide by two: head and embedding have a shorter last shard.
    folder = save_tiny_llama(tmp_path_factory.mktemp("sources") / "model", vocab_size=47)
    cases = [(name, merged_source) for name in OPTIONS] + [(name, adapter_source) for name in ADAPTERS]
    arenas = [Arena.create(1 << 20) for _ in cases]
    plans = [
        (OPTIONS[name], source_of, arena.path) for (name, source_of), arena in zip(cases, arenas, strict=True)
    ]
    results = on_ranks(2, publish_sharded, str(folder), plans)
    assert [changed for _, changed in results] == [[], []], "publishing changed the trainer's weights"
    found = {}
    for index, ((name, source_of), arena) in enumerate(zip(cases, arenas, strict=True)):
        manifest = source_of(adapted(folder, OPTIONS[name]), Topology()).manifest()
        _, slots = plain_slots(manifest, lambda name: "float32")
        sums = [sum(parts) % 2**64 for parts in zip(*(sums[index] for sums, _ in results), strict=True)]
        found[name, source_of] = {slot.name: arena.view(slot).clone() for slot in slots}, sums
    return folder, found


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_two_ranks_publish_what_peft_would_merge(published, name):
    folder, found = published
    sent, sums = found[name, merged_source]
    expected = plain_merge(adapted(folder, OPTIONS[name]))
    assert set(sent) == set(expected)
    for (weight, tensor), total in zip(sent.items(), sums, strict=True):
        # The two sides sum the same float32 products in different orders.
        torch.testing.assert_close(tensor, expected[weight], rtol=1e-5, atol=1e-6, msg=weight)
        assert total == checksum(tensor), weight


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTERS)
def test_two_ranks_publish_adapters_whose_product_is_what_peft_would_add(published, name):
    folder, found = published
    sent, sums = found[name, adapter_source]
    base = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    assert sums == [checksum(tensor) for tensor in sent.values()]
    for weight, merged in plain_merge(adapted(folder, OPTIONS[name])).items():
        layer = weight.removesuffix(".weight")
        added = torch.zeros_like(base[weight])
        if f"{layer}.lora_A" in sent:
            added = sent[f"{layer}.lora_B"] @ sent[f"{layer}.lora_A"]
            added = added.t() if layer.endswith("embed_tokens") else added
        torch.testing.assert_close(base[weight] + added, merged, rtol=1e-5, atol=1e-6, msg=weight)


def publish_experts(topology, folder, path):
    """Publish a model with adapters on its experts, sharded by expert; return the checksums."""
    model = adapted(folder, EXPERTS)
    for block in model.base_model.model.model.layers:
        fully_shard(block)
    fully_shard(model)
    return publish(merged_source(model, topology), path)[1]


EXPERTS = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


@pytest.mark.parametrize("family", ["Qwen3-MoE", "gpt-oss"])
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_adapters_of_experts_are_merged_as_peft_merges_them(tmp_path, family, world_size):
    """gpt-oss transposes the matrices of experts."""
    folder = str(save_family(FAMILIES[family], tmp_path / "model"))
    expected, arena = plain_merge(adapted(folder, EXPERTS)), Arena.create(1 << 24)
    _, slots = plain_slots(
        merged_source(adapted(folder, EXPERTS), Topology()).manifest(), lambda name: "float32"
    )
    results = on_ranks(world_size, publish_experts, folder, arena.path)
    assert {slot.name for slot in slots} == expected.keys()
    for slot, parts in zip(slots, zip(*results, strict=True), strict=True):
        sent = arena.view(slot)
        torch.testing.assert_close(sent, expected[slot.name], rtol=1e-5, atol=1e-6, msg=slot.name)
        assert sum(parts) % 2**64 == checksum(sent), slot.name


def adapted_gpt2(**options):
    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=8))
    return get_peft_model(base, LoraConfig(r=2, fan_in_fan_out=True, **options))


def test_weights_that_are_stored_transposed_are_merged_too():
    model = adapted_gpt2(target_modules=["c_attn", "wte"])
    torch.nn.init.normal_(model.base_model.model.transformer.h[0].attn.c_attn.lora_B.default.weight)
    sent = sent_by(merged_source(model.base_model.model.transformer.h, Topology()))
    expected = plain_merge(model)["transformer.h.0.attn.c_attn.weight"]
    torch.testing.assert_close(sent["0.attn.c_attn.weight"], expected, rtol=1e-5, atol=1e-6)


def test_trained_biases_are_published_as_the_layers_own():
    model = adapted_gpt2(target_modules=["c_attn"], bias="lora_only")
    layer = model.base_model.model.transformer.h[0].attn.c_attn
    torch.nn.init.normal_(layer.base_layer.bias)
    assert layer.base_layer.bias.requires_grad
    name = "transformer.h.0.attn.c_attn.bias"
    assert torch.equal(sent_by(merged_source(model, Topology()))[name], plain_merge(model)[name])


def test_several_active_adapters_are_merged_together_and_disabled_ones_not_at_all(folder):
    model = adapted(folder, OPTIONS["plain"])
    model.add_adapter("second", LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    merged = copy.deepcopy(model).merge_and_unload(adapter_names=["default", "second"])
    sent = sent_by(merged_source(model, Topology()))
    for name, expected in merged.named_parameters():
        torch.testing.assert_close(sent[name], expected, rtol=1e-5, atol=1e-6, check_dtype=False, msg=name)
    with pytest.raises(ConfigError, match="several active adapters"):
        adapter_source(model, Topology())
    base = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    with model.disable_adapter():
        sent = sent_by(merged_source(model, Topology()))
        assert all(torch.equal(sent[name], base[name]) for name in base)
        assert [
            weight_set.name for weight_set in lora_weight_sets(model, Topology(), MappedArenas(), "adapter")
        ] == ["base"]


def test_modules_that_replace_others_are_not_sent_while_the_adapter_is_off(folder):
    base = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    model = adapted(folder, OPTIONS["modules to save"])
    with model.disable_adapter():
        sent = sent_by(merged_source(model, Topology()))
    assert all(torch.equal(sent[name], base[name]) for name in base)


def test_a_head_keeps_the_table_that_it_shared_with_a_replaced_embedding(tmp_path):
    folder = save_tiny_llama(tmp_path / "model", tied=True)
    model = adapted(folder, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]})
    head = model.get_output_embeddings().weight.detach()
    sent = sent_by(ModuleSource(model, Topology()))
    assert torch.equal(sent["lm_head.weight"], head)
    assert not torch.equal(sent["model.embed_tokens.weight"], head)


def test_the_names_of_an_adapted_model_are_those_of_its_base(tmp_path):
    folder = save_tiny_llama(tmp_path / "model", tied=True)
    plain = manifest_of(AutoModelForCausalLM.from_pretrained(folder))
    assert manifest_of(adapted(folder, OPTIONS["patterns"])) == plain
    assert manifest_of(adapted(folder, {"target_modules": ["q_proj"], "modules_to_save": ["norm"]})) == plain


REFUSED = [
    ("adapter", {"use_dora": True}, "use_dora=True is beyond vLLM's LoRA layers"),
    ("adapter", {"bias": "lora_only"}, "bias='lora_only' is beyond vLLM's LoRA layers"),
    ("adapter", {"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] .*lora_mode: merged"),
    ("adapter", {"target_parameters": ["mlp.up_proj.weight"]}, "target_parameters=.*lora_mode: merged"),
    ("adapter", {"r": 513}, "r=513 is beyond vLLM's largest adapter rank of 512"),
    ("adapter", {"trainable_token_indices": [1]}, r"trainable_token_indices=\[1\] changes the model"),
    ("merged", {"lora_bias": True}, "lora_bias=True changes the model"),
    ("merged", {"trainable_token_indices": [1]}, r"trainable_token_indices=\[1\] changes the model"),
    ("merged", {"target_modules": ["lm_head"]}, "'lm_head' cannot be merged"),
]


@pytest.mark.parametrize(("mode", "options", "message"), REFUSED)
def test_options_beyond_a_mode_are_refused_by_name_with_the_way_out(tmp_path, mode, options, message):
    folder = save_tiny_llama(tmp_path / "model", tied=True)
    model = adapted(folder, {"target_modules": ["q_proj"], **options})
    with pytest.raises(ConfigError, match=message):
        (adapter_source if mode == "adapter" else merged_source)(model, Topology())


def test_adapters_merged_into_the_trainers_own_weights_are_refused(folder):
    model = adapted(folder, OPTIONS["plain"])
    model.merge_adapter()
    for source_of in (adapter_source, merged_source):
        with pytest.raises(WeightMismatch, match="unmerge_adapter"):
            source_of(model, Topology())
