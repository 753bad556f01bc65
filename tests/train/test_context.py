"""Context parallelism: ranks that share a pass compute the same as one rank, and share one gradient."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from kit.families import ATTENTIVE, FAMILIES, RECURRENT, save_family
from kit.rank_processes import on_ranks, save_tiny_llama
from test_packing import assert_alike, random_rows, values_and_gradient

from vectorlm.algorithms.support import Support
from vectorlm.errors import ConfigError
from vectorlm.ranks.topology import Topology
from vectorlm.rl.models import disable_dropout
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.load import load_model
from vectorlm.train.lora import add_lora
from vectorlm.train.packing import ContextGroup, Rows, pack
from vectorlm.train.settings import ModelSettings
from vectorlm.train.shard import load_sharded

SETTINGS, LORA = ModelSettings(), {"r": 4, "target_modules": ["q_proj", "down_proj"]}


@dataclass(frozen=True)
class EveryThird:
    """A grammar that excludes a third of the vocabulary, except for the chosen tokens."""

    def bitmasks(self, rows):
        targets = rows.targets
        allowed = (torch.arange(48) % 3 != torch.arange(len(targets))[:, None] % 3).scatter(
            1, targets[:, None], True
        )
        bits = torch.nn.functional.pad(allowed, (0, 16)).view(-1, 2, 32).long() << torch.arange(32)
        return bits.sum(dim=2).to(torch.int32)


def alone_and_together(topology, folders, size, settings=SETTINGS, lora=False, **language_model):
    """Return, for each model, values and gradients of rows, computed by one rank and by `size` ranks."""
    topology = replace(topology, context_parallel=size)
    context, found = ContextGroup.of(topology), []
    for folder in folders:

        def load(is_empty, folder=folder):
            model = disable_dropout(load_model(folder, dtype=settings.dtype, is_empty=is_empty))
            return add_lora(model, LORA) if lora else model

        model = load_sharded(load, topology, settings)
        item = []
        for group in (None, context):
            computes = LanguageModel(model, 0.8, context=group, **language_model)
            assert computes.packs
            item.append(values_and_gradient(model, random_rows(), partial(computes, entropy="gradient")))
        *values, gradient = item[1]
        # FSDP averages over all ranks: one rank has the whole gradient, several have shares of it.
        item[1] = (*values, {name: size * value for name, value in gradient.items()})
        # The smallest pass has one token, which the first rank computes.
        nothing = Rows(torch.ones(1, 3).long(), torch.ones(1, 3).long(), torch.zeros(1, 3).bool(), (0,))
        computes(nothing).logprobs.sum().backward()
        found.append(item)
    return found


def assert_same(world_size, folders, size, tolerance=1e-5, num_nodes=1, **how):
    run = partial(alone_and_together, folders=folders, size=size, **how)
    for found in on_ranks(world_size, run, num_nodes=num_nodes):
        for alone, together in found:
            assert_alike(together, alone, tolerance)


@pytest.mark.slow
def test_two_ranks_say_of_every_kind_of_attention_what_one_says(tmp_path):
    names = ("Gemma 2", "Gemma 3", "Mixtral", "OPT", "gpt-oss", "Cohere 2")
    families = FAMILIES | ATTENTIVE
    assert_same(2, [save_family(families[name], tmp_path / name) for name in names], 2)


def refused(topology, folder):
    topology = replace(topology, context_parallel=2)
    with pytest.raises(ConfigError, match=r"context_parallel=2 .* recurrent layers"):
        LanguageModel(load_model(folder), context=ContextGroup.of(topology))


@pytest.mark.slow
def test_ranks_share_no_pass_of_a_model_with_recurrent_layers(tmp_path):
    on_ranks(2, refused, save_family(RECURRENT["LFM2"], tmp_path))


@pytest.mark.parametrize(
    "how",
    [
        {"support": Support(top_p=0.8, top_k=30, min_p=0.1), "grammar": EveryThird()},
        {"settings": ModelSettings(use_activation_checkpointing=True), "lora": True},
    ],
    ids=["cut distributions", "adapters, recomputed"],
)
def test_two_ranks_say_the_same_of(folder, how):
    assert_same(2, [folder], 2, **how)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "size"), [("HYBRID_SHARD", 2), ("NO_SHARD", 2), ("FULL_SHARD", 4)])
def test_four_ranks_say_the_same_with_heads_that_several_of_them_need(tmp_path, strategy, size):
    folder = save_tiny_llama(tmp_path / "model", num_heads=4, num_key_value_heads=2)
    how = {"settings": ModelSettings(sharding_strategy=strategy)}
    assert_same(4, [folder], size, num_nodes=2, **how)


def test_each_rank_has_every_second_token_and_the_places_in_it():
    rows = random_rows()
    whole = pack(rows)
    parts = [pack(rows, ContextGroup(None, rank, 2)) for rank in (0, 1)]
    ids = torch.stack([part.input_ids[0] for part in parts], dim=1).flatten()[: whole.num_tokens]
    assert torch.equal(ids, whole.input_ids[0])
    assert sum(len(part.places) for part in parts) == len(whole.places)
    for rank, part in enumerate(parts):
        assert torch.equal(part.places * 2 + rank, part.own(whole.places))


def test_rows_that_are_padded_are_refused(folder):
    with pytest.raises(ConfigError, match="context_parallel"):
        LanguageModel(load_model(folder), packs=False, context=ContextGroup(None, 0, 2))


def test_a_lone_rank_has_no_group():
    assert ContextGroup.of(Topology()) is None
