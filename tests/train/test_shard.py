import shutil

import pytest
import torch
from kit.rank_processes import on_ranks
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from vectorlm.algorithms.logprobs import token_logprobs
from vectorlm.errors import ConfigError
from vectorlm.sampling.weights.model_tensors import reshard
from vectorlm.train.checkpoint.export import gather_weights
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.load import load_model
from vectorlm.train.lora import add_lora
from vectorlm.train.optimizer_step import OptimizerStep
from vectorlm.train.packing import Rows
from vectorlm.train.settings import ModelSettings
from vectorlm.train.shard import load_sharded, shard_model, transformer_blocks

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")


TINY_LLAMA = {"tied": True}


def gradient(model, rows):
    """Mean loss and gradients by name for `rows`, by the rule that FSDP averages over ranks."""
    tokens = torch.arange(rows * 8).view(rows, 8) % 48
    loss = -token_logprobs(model(input_ids=tokens, use_cache=False).logits, tokens).sum() / (rows * 7)
    loss.backward()
    whole = {
        name: parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        for name, parameter in model.named_parameters()
    }
    return loss.item(), whole


def gradients_by_strategy(topology, folder):
    found = {}
    for strategy in STRATEGIES:
        for activation_checkpointing in (False, True):
            settings = ModelSettings(
                sharding_strategy=strategy, use_activation_checkpointing=activation_checkpointing
            )
            model = shard_model(load_model(folder), topology, settings)
            found[strategy, activation_checkpointing] = gradient(model, 2)
    offloaded = shard_model(load_model(folder), topology, ModelSettings(cpu_offload=True))
    return found | {"offloaded": gradient(offloaded, 2)}


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_strategy_checkpointing_and_offload_leave_loss_gradients_and_names_unchanged(
    world_size, folder
):
    expected_loss, expected = gradient(load_model(folder), 2)
    for found in on_ranks(world_size, gradients_by_strategy, folder):
        assert len(found) == 9
        for key, (loss, gradients) in found.items():
            assert loss == pytest.approx(expected_loss, rel=1e-6), key
            # fp32 round-off of sums taken in another order
            torch.testing.assert_close(
                gradients, expected, rtol=1e-5, atol=1e-7, msg=lambda text, key=key: f"{key} {text}"
            )


def placements(topology, folder):
    found = {}
    for strategy in STRATEGIES:
        model = shard_model(load_model(folder), topology, ModelSettings(sharding_strategy=strategy))
        local = sum(parameter.to_local().numel() for parameter in model.parameters())
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        found[strategy] = local / sum(parameter.numel() for parameter in model.parameters()), tied
    return found


def test_sharding_strategies_hold_their_share_of_the_weights_and_keep_tied_embeddings_tied(folder):
    for found in on_ranks(2, placements, folder):
        assert {name: share for name, (share, _) in found.items()} == {
            "FULL_SHARD": 0.5,
            "SHARD_GRAD_OP": 0.5,
            "NO_SHARD": 1.0,
            "HYBRID_SHARD": 0.5,
        }
        assert all(tied for _, tied in found.values())


def hybrid(topology, folder):
    model = shard_model(load_model(folder), topology, ModelSettings(sharding_strategy="HYBRID_SHARD"))
    local = sum(parameter.to_local().numel() for parameter in model.parameters())
    return local / sum(parameter.numel() for parameter in model.parameters()), *gradient(model, 2)


def test_hybrid_shards_within_a_node_and_leaves_loss_and_gradients_unchanged(folder):
    expected_loss, expected = gradient(load_model(folder), 2)
    for share, loss, gradients in on_ranks(4, hybrid, folder, num_nodes=2):
        assert share == 0.5
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        # fp32 round-off of sums taken in another order
        torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-7)


def half_precision(topology, folder, settings, lora):
    def load(is_empty):
        model = load_model(folder, dtype=settings.dtype, is_empty=is_empty)
        return add_lora(model, {"r": 2, "target_modules": ["q_proj"]}) if lora else model

    model = load_sharded(load, topology, settings)
    tokens = torch.arange(16).view(2, 8)
    logits = model(input_ids=tokens, use_cache=False).logits
    loss = -token_logprobs(logits, tokens).sum() / 14
    loss.backward()
    trained, frozen, gradients = set(), set(), set()
    for parameter in model.parameters():
        (trained if parameter.requires_grad else frozen).add(parameter.dtype)
        if parameter.grad is not None:
            gradients.add(parameter.grad.dtype)
    return loss.item(), trained, frozen, gradients, logits.dtype


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("settings", "lora", "trained", "frozen"),
    [
        (ModelSettings(use_mp=True), False, torch.float32, None),
        (ModelSettings(dtype="bfloat16"), False, torch.bfloat16, None),
        (ModelSettings(dtype="bfloat16"), True, torch.float32, torch.bfloat16),
        (ModelSettings(dtype="bfloat16", cpu_offload=True), True, torch.float32, torch.bfloat16),
    ],
)
def test_half_precision_of_weights_or_of_computing_alone(folder, world_size, settings, lora, trained, frozen):
    expected, _ = gradient(load_model(folder), 2)
    for found in on_ranks(world_size, half_precision, folder, settings, lora):
        loss, *dtypes, computed = found
        assert dtypes == [{trained}, {frozen} - {None}, {trained}]
        assert computed == torch.bfloat16
        assert loss == pytest.approx(expected, rel=1e-2)  # bf16 has 8 bits of mantissa


def filled_from_main(topology, folder, lora, settings):
    weights = {}

    def load(is_empty):
        assert is_empty is not topology.is_main
        model = load_model(folder, is_empty=is_empty)
        if lora:
            torch.manual_seed(topology.rank)
            model = add_lora(model, {"r": 2, "target_modules": ["q_proj"]})
        weights.update({} if is_empty else model.state_dict())
        return model

    model = load_sharded(load, topology, ModelSettings(**settings))
    with torch.no_grad():
        logits = model(input_ids=torch.arange(8)[None], use_cache=False).logits
    reshard(model)
    whole = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    return whole, weights, logits


@pytest.mark.parametrize(
    ("lora", "settings"),
    [
        (False, {}),
        (True, {"low_cpu_mem_usage": True}),
        (False, {"cpu_offload": True}),
        (False, {"sharding_strategy": "NO_SHARD"}),
        (False, {"sharding_strategy": "HYBRID_SHARD"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("has_own_head", [False, True])
def test_ranks_that_start_empty_get_their_shards_from_rank_0(folder, tmp_path, lora, settings, has_own_head):
    if has_own_head:
        # As some merges leave it: the config ties the head, and the file has another one.
        folder = shutil.copytree(folder, tmp_path / "merged")
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = 2 * tensors["model.embed_tokens.weight"]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (first, weights, first_logits), (second, _, second_logits) = on_ranks(
        2, filled_from_main, folder, lora, settings
    )
    assert first.keys() == second.keys()
    assert has_own_head is any("lm_head" in name for name in first)
    for name in first:
        assert torch.equal(first[name], weights[name])
        assert torch.equal(second[name], weights[name])
    expected = load_model(folder)(input_ids=torch.arange(8)[None]).logits
    torch.testing.assert_close(first_logits, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(first_logits, second_logits)


def resharded(topology, folder):
    model = shard_model(load_model(folder), topology, ModelSettings(sharding_strategy="SHARD_GRAD_OP"))
    with torch.no_grad():
        model(input_ids=torch.arange(8)[None], use_cache=False)
    scored_groups = [
        name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)
    ]
    reshard(model)
    return scored_groups, [type(parameter) for parameter in model.parameters()], gather_weights(model)


def test_after_a_forward_alone_reshard_gives_the_parameters_back_as_shards(folder):
    for scored_groups, types, _ in on_ranks(2, resharded, folder):
        assert scored_groups
        assert set(types) == {DTensor}


def shards_between_passes(topology, folder):
    model = shard_model(load_model(folder), topology)
    step = OptimizerStep(model, torch.optim.SGD(model.parameters()), None, 1.0, topology)
    tokens = torch.arange(8)[None]
    step.backward(model(input_ids=tokens, labels=tokens, use_cache=False).loss, is_last=False)
    return [isinstance(entry, DTensor) and entry.grad is not None for entry in model.parameters()]


@pytest.mark.parametrize(("world_size", "are_shards"), [(1, True), (2, False)])
def test_only_several_ranks_keep_a_small_model_whole_between_passes(folder, world_size, are_shards):
    for found in on_ranks(world_size, shards_between_passes, folder):
        assert set(found) == {are_shards}


def test_blocks_are_found_without_a_declaration_and_their_absence_is_an_error():
    stack = torch.nn.Module()
    stack.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    stack.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    assert transformer_blocks(stack) == list(stack.layers)
    with pytest.raises(ConfigError, match="Linear"):
        transformer_blocks(torch.nn.Linear(2, 2))


RECOMPUTATIONS = (False, True, 2, "keep_attention", "offload")


def gradients_by_recomputation(topology, folder):
    found = []
    for what in RECOMPUTATIONS:
        settings = ModelSettings(use_activation_checkpointing=what)
        model = load_sharded(lambda is_empty: load_model(folder, is_empty=is_empty), topology, settings)
        computes = LanguageModel(model)
        calls = []
        for block in transformer_blocks(model):
            block.mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        ids = torch.arange(2 * 8).view(2, 8)
        rows = Rows(ids, torch.ones_like(ids), torch.ones_like(ids).cumsum(1) > 1, (0, 1))
        loss = computes.logprobs(rows).sum()
        loss.backward()
        gradients = [entry.grad.full_tensor() for entry in model.parameters()]
        found.append((len(calls), loss.detach(), *gradients))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_computed_again_has_the_same_bits(folder, world_size):
    for found in on_ranks(world_size, gradients_by_recomputation, folder):
        # Of three blocks; every second one begins with the first.
        assert [num_calls for num_calls, *_ in found] == [3, 6, 5, 6, 6]
        for _, *numbers in found[1:]:
            torch.testing.assert_close(numbers, list(found[0][1:]), rtol=0, atol=0)
