import shutil

import pytest
import torch
from kit.rank_processes import on_ranks
from kit.tensors import full, local
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vectorlm.algorithms.logprobs import token_logprobs
from vectorlm.errors import ConfigError
from vectorlm.sampling.weights.model_tensors import reshard
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
    """Return mean loss and gradients by name for `rows`; FSDP averages over ranks."""
    tokens = torch.arange(rows * 8).view(rows, 8) % 48
    loss = -token_logprobs(model(input_ids=tokens, use_cache=False).logits, tokens).sum() / (rows * 7)
    loss.backward()
    whole = {name: full(parameter.grad) for name, parameter in model.named_parameters()}
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


@pytest.fixture(scope="module", params=[1, 2], ids="{} ranks".format)
def seen(request, folder):
    """Return the results of this file's functions on every rank, by function."""
    rows = on_ranks(request.param, look_at_all, folder)
    return {function: [row[place] for row in rows] for place, function in enumerate(LOOKS)}


def look_at_all(topology, folder):
    return [function(topology, folder) for function in LOOKS]


@pytest.mark.slow
def test_every_strategy_checkpointing_and_offload_leave_loss_gradients_and_names_unchanged(folder, seen):
    expected_loss, expected = gradient(load_model(folder), 2)
    for found in seen[gradients_by_strategy]:
        assert len(found) == 9
        for key, (loss, gradients) in found.items():
            assert loss == pytest.approx(expected_loss, rel=1e-6), key
            # The difference is fp32 round-off of sums in another order.
            torch.testing.assert_close(
                gradients, expected, rtol=1e-5, atol=1e-7, msg=lambda text, key=key: f"{key} {text}"
            )


def placements(topology, folder):
    found = {}
    for strategy in STRATEGIES:
        model = shard_model(load_model(folder), topology, ModelSettings(sharding_strategy=strategy))
        held = sum(local(parameter).numel() for parameter in model.parameters())
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        found[strategy] = held / sum(parameter.numel() for parameter in model.parameters()), tied
    return found


def test_sharding_strategies_hold_their_share_of_the_weights_and_keep_tied_embeddings_tied(seen):
    share = 1 / len(seen[placements])
    for found in seen[placements]:
        shares = {name: share for name, (share, _) in found.items()}
        assert shares == dict.fromkeys(STRATEGIES, share) | {"NO_SHARD": 1.0}
        assert all(tied for _, tied in found.values())


def hybrid(topology, folder):
    model = shard_model(load_model(folder), topology, ModelSettings(sharding_strategy="HYBRID_SHARD"))
    held = sum(local(parameter).numel() for parameter in model.parameters())
    return held / sum(parameter.numel() for parameter in model.parameters()), *gradient(model, 2)


def test_hybrid_shards_within_a_node_and_leaves_loss_and_gradients_unchanged(folder):
    expected_loss, expected = gradient(load_model(folder), 2)
    for share, loss, gradients in on_ranks(4, hybrid, folder, num_nodes=2):
        assert share == 0.5
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        # The difference is fp32 round-off of sums in another order.
        torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-7)


HALVES = [
    (ModelSettings(use_mp=True), False, torch.float32, None),
    (ModelSettings(dtype="bfloat16"), False, torch.bfloat16, None),
    (ModelSettings(dtype="bfloat16"), True, torch.float32, torch.bfloat16),
    (ModelSettings(dtype="bfloat16", cpu_offload=True), True, torch.float32, torch.bfloat16),
]
"""Model settings, whether adapters are trained, and the dtypes of trained and of frozen weights."""


def half_precision(topology, folder):
    found = []
    for settings, lora, *_ in HALVES:

        def load(is_empty, settings=settings, lora=lora):
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
        found.append((loss.item(), logits.dtype, trained, frozen, gradients))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_half_precision_of_weights_or_of_computing_alone(folder, world_size):
    expected, _ = gradient(load_model(folder), 2)
    for found in on_ranks(world_size, half_precision, folder):
        for (loss, computed, *dtypes), (*_, trained, frozen) in zip(found, HALVES, strict=True):
            assert dtypes == [{trained}, {frozen} - {None}, {trained}]
            assert computed == torch.bfloat16
            assert loss == pytest.approx(expected, rel=1e-2)  # bf16 has 8 bits of mantissa


def copies_beside_adapters(topology, folder):
    def load(is_empty):
        model = load_model(folder, dtype="bfloat16", is_empty=is_empty)
        return add_lora(model, {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["mlp"]})

    model = load_sharded(load, topology)
    model(input_ids=torch.arange(16).view(2, 8), use_cache=False).logits.sum().backward()
    return {
        name.rpartition(".layers.0.")[2]: parameter.grad.dtype
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and ".layers.0." in name
    }


def test_a_block_may_have_trained_weights_of_two_dtypes(folder):
    for found in on_ranks(2, copies_beside_adapters, folder):
        assert found["self_attn.q_proj.lora_A.default.weight"] == torch.float32
        assert found["mlp.modules_to_save.default.up_proj.weight"] == torch.bfloat16


FILLED = [
    (False, {}),
    (True, {"low_cpu_mem_usage": True}),
    (False, {"cpu_offload": True}),
    (False, {"sharding_strategy": "NO_SHARD"}),
    (False, {"sharding_strategy": "HYBRID_SHARD"}),
]


def filled_from_main(topology, folder):
    found = []
    for lora, settings in FILLED:
        weights = {}

        def load(is_empty, lora=lora, weights=weights):
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
        whole = {name: full(parameter) for name, parameter in model.named_parameters()}
        found.append((whole, weights, logits))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("has_own_head", [False, True])
def test_ranks_that_start_empty_get_their_shards_from_rank_0(folder, tmp_path, has_own_head):
    if has_own_head:
        # Some merges save this: the config ties the head, but the file has a different one.
        folder = shutil.copytree(folder, tmp_path / "merged")
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = 2 * tensors["model.embed_tokens.weight"]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    expected = load_model(folder)(input_ids=torch.arange(8)[None]).logits
    for found in zip(*on_ranks(2, filled_from_main, folder), strict=True):
        (first, weights, first_logits), (second, _, second_logits) = found
        assert first.keys() == second.keys()
        assert has_own_head is any("lm_head" in name for name in first)
        for name in first:
            assert torch.equal(first[name], weights[name])
            assert torch.equal(second[name], weights[name])
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
    return scored_groups, [type(parameter) for parameter in model.parameters()]


def test_after_a_forward_alone_reshard_gives_the_parameters_back_as_shards(seen):
    for scored_groups, types in seen[resharded]:
        assert scored_groups
        # A single rank trains the plain model.
        assert set(types) == {DTensor if len(seen[resharded]) > 1 else torch.nn.Parameter}


def shards_between_passes(topology, folder):
    model = shard_model(load_model(folder), topology)
    step = OptimizerStep(model, torch.optim.SGD(model.parameters()), None, 1.0, topology)
    tokens = torch.arange(8)[None]
    step.backward(model(input_ids=tokens, labels=tokens, use_cache=False).loss, is_last=False)
    return [isinstance(entry, DTensor) for entry in model.parameters()]


def test_a_small_model_stays_whole_between_passes(seen):
    assert not any(any(found) for found in seen[shards_between_passes])


class Copied(TorchDispatchMode):
    """A mode that counts the numbers that FSDP2 copies between shards and whole tensors."""

    def __init__(self):
        super().__init__()
        self.num_copied = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.copy_.default, torch.ops.fsdp.chunk_cat.default):
            self.num_copied += sum(x.numel() for x in tree_leaves(args[0]))
        return func(*args, **(kwargs or {}))


def train_in_bf16(topology, folder):
    """Return norms, weights and copied shares of two steps of three passes, without and with a bf16 copy per step."""
    found = []
    tokens = torch.randint(0, 48, (6, 12), generator=torch.Generator().manual_seed(0))
    for copies in (False, True):
        model = shard_model(load_model(folder), topology, ModelSettings(use_mp=True))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = OptimizerStep(model, optimizer, None, 1.0, topology, computes_in_bf16=copies)
        norms, copied = [], []
        for number in range(2):
            for index, rows in enumerate(tokens.chunk(3)):
                with Copied() as counts:
                    loss = model(input_ids=rows, labels=rows, use_cache=False).loss
                    step.backward(loss, is_last=index == 2)
                copied.append(counts.num_copied / sum(parameter.numel() for parameter in model.parameters()))
            norms.append(step.finish(number)["grad_norm"])
        found.append((norms, [full(parameter) for parameter in model.parameters()], copied))
    return found


def test_one_rank_in_bf16_copies_a_small_model_once_a_step_and_finds_the_same_bits(folder):
    ((apart, once),) = on_ranks(1, train_in_bf16, folder)
    assert apart[0] == once[0]
    assert all(torch.equal(a, b) for a, b in zip(apart[1], once[1], strict=True))
    assert min(apart[2]) > 3
    # These are the passes between the first and the last.
    assert once[2][1] == once[2][4] == 0


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
        gradients = [full(entry.grad) for entry in model.parameters()]
        found.append((len(calls), loss.detach(), *gradients))
    return found


LOOKS = gradients_by_strategy, placements, resharded, shards_between_passes, gradients_by_recomputation


def test_what_is_computed_again_has_the_same_bits(seen):
    for found in seen[gradients_by_recomputation]:
        # The model has three blocks; recomputing every second block begins with the first.
        assert [num_calls for num_calls, *_ in found] == [3, 6, 5, 6, 6]
        for _, *numbers in found[1:]:
            torch.testing.assert_close(numbers, list(found[0][1:]), rtol=0, atol=0)
