"""A frozen base that ranks read in place from an engine's parameters, without vLLM."""

import copy
import gc

import pytest
import torch
from kit.rank_processes import on_ranks
from swaps_here import Model, swap_of

from vectorlm.errors import ChecksumMismatch, ConfigError, EngineError, HandleRefused, WeightMismatch
from vectorlm.ranks.topology import Topology

PRIVATE = {"down.weight", "scale", "steps"}
"""Tensors that are not shared: a transposed weight, and buffers."""


class Frozen(Model):
    def get_input_embeddings(self):
        return self.table


def frozen(tied=False, seed=0):
    torch.manual_seed(seed)
    return Frozen(tied).requires_grad_(False)


def sharing(model, transport, topology=None, lora_mode="adapter", **engine_args):
    """Return a swap whose engines have the weights of `model`, and this rank's engine."""
    topology = topology or Topology()
    swap, engine = swap_of(topology, transport, lora_mode=lora_mode, **engine_args)
    for worker in engine.workers if engine is not None else ():
        tensors = {**dict(model.named_parameters()), "scale": model.scale, "steps": model.steps}
        worker.load_weights((name, tensor.detach().clone()) for name, tensor in tensors.items())
    return swap, engine


def places(model):
    return {name: tensor.data_ptr() for name, tensor in model.named_parameters()}


@pytest.mark.parametrize("transport", ["push", "bucketed"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_frozen_weights_become_views_and_keep_their_bits(transport, tied):
    model = frozen(tied)
    before, ids = copy.deepcopy(model), torch.tensor([[1, 5, 3]])
    swap, engine = sharing(model, transport, tied=tied)
    shared = swap.share(model)
    assert torch.equal(model(ids), before(ids))
    names = {name for name, tensor in model.named_parameters() if tensor in set(shared.parameters)}
    assert names == set(places(model)) - PRIVATE
    assert (model.head.weight is model.table.weight) == tied
    assert shared.num_bytes == sum(model.get_parameter(name).nbytes for name in names)
    assert shared.num_private_bytes == model.down.weight.nbytes
    # The memory belongs to the engine: the model reads what the engine writes, but not the other way round.
    (worker,) = engine.workers
    worker.gate_up.data[0, 0] = 77.0
    assert model.gate.weight[0, 0] == 77.0
    model.norm.bias[2] = -5.0
    assert worker.norm[1, 2] != -5.0
    with pytest.raises(WeightMismatch, match="written to its frozen base"):
        swap._shared.require_intact(model, None)


def on_a_rank(topology, transport):
    source = frozen()
    model = source if topology.is_main else frozen().to("meta")
    model.scale, model.steps = source.scale.clone(), source.steps.clone()
    swap, _ = sharing(source, transport, topology)
    shared = swap.share(model)
    whole = {name: tensor for name, tensor in model.named_parameters() if not tensor.is_meta}
    expected = dict(frozen().named_parameters())
    return sorted(whole), all(torch.equal(whole[name], expected[name]) for name in whole), shared.num_bytes


@pytest.mark.parametrize("transport", ["push", "bucketed"])
def test_a_rank_without_weights_reads_them_in_the_engine(transport):
    (all_names, is_main_equal, size), (names, is_equal, size_there) = on_ranks(2, on_a_rank, transport)
    assert is_main_equal
    assert is_equal
    assert size == size_there > 0
    assert set(names) == set(all_names) - PRIVATE


@pytest.mark.parametrize(
    ("expected", "text", "options"),
    [
        (HandleRefused, "2 workers", {"num_workers": 2}),
        (HandleRefused, "float16", {"dtype": torch.float16}),
        (ConfigError, "enable_lora", {"lora_mode": "merged"}),
    ],
    ids=["two workers", "another dtype", "merged"],
)
def test_an_engine_that_stores_its_weights_otherwise_is_refused(expected, text, options):
    model = frozen()
    before = places(model)
    swap, _ = sharing(model, "push", **options)
    with pytest.raises(expected, match=text):
        swap.share(model)
    assert places(model) == before


def test_an_engine_with_other_weights_is_refused_and_named():
    model = frozen()
    before = places(model)
    swap, engine = sharing(model, "push")
    engine.workers[0].down.data[1, 1] += 1.0
    with pytest.raises(ChecksumMismatch, match=r"down\.weight"):
        swap.share(model)
    assert places(model) == before
    # Nothing is shared, and the engine still takes updates of the base.
    swap.update(model, 0, "refuse", ("push",))
    assert engine.differs_from(model) == []


def test_while_a_model_shares_the_base_its_engine_takes_no_other_and_keeps_its_weights_awake():
    model, other = frozen(), frozen(seed=1)
    swap, engine = sharing(model, "push")
    swap.share(model)
    with pytest.raises(WeightMismatch, match="shares its base"):
        swap.update(other, 0, "refuse", ("push",))
    with pytest.raises(EngineError, match="cannot sleep"):
        swap.require_own_weights()
    del model
    gc.collect()
    swap.require_own_weights()
    swap.update(other, 1, "refuse", ("push",))
    assert engine.differs_from(other) == []
