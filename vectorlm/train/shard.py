"""Load a model and shard it over the ranks with FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.attention.varlen
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from vectorlm.errors import ConfigError
from vectorlm.ranks.topology import Topology
from vectorlm.train.settings import ModelSettings, Recomputation, stays_plain
from vectorlm.train.split import make_meshes, split_model

RESHARD_AFTER_FORWARD = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "NO_SHARD": False, "HYBRID_SHARD": True}
"""Whether a block frees its gathered weights between forward and backward, by strategy."""
DEFAULTS = ModelSettings()


def load_sharded(
    load: Callable[[bool], nn.Module],
    topology: Topology,
    settings: ModelSettings = DEFAULTS,
    share: Callable[[nn.Module], Collection[nn.Parameter]] = lambda model: (),
) -> nn.Module:
    """Load a model and shard it; all ranks call this.

    `load(is_empty)` loads the whole model, or only its structure on the meta device. With `low_cpu_mem_usage` only rank
    0 reads the weights, and sends the other ranks their shards. `share` takes the whole model, and returns the
    parameters in shared memory of a node's ranks; these parameters stay whole.
    """
    if not settings.loads_on_main(topology.world_size):
        model = load(False)
        return shard_model(model, topology, settings, share(model))
    model = load(not topology.is_main)
    # A separate group: objects sent over the default group or the engine's cannot be mistaken for weights.
    group = dist.new_group()
    sent: list[Any] = [_structure(model) if topology.is_main else None]
    dist.broadcast_object_list(sent, src=0, group=group)
    # The other ranks build the model from its config, but files may have more: a head despite tie_word_embeddings.
    mine = _structure(model)
    for name, parameter in sent[0].items():
        if parameter != mine.get(name):
            first, shape, dtype, requires_grad = parameter
            new = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad)
            _set(model, name, new if first == name else model.get_parameter(first))
    shared = share(model)
    weights = model.state_dict() if topology.is_main else {}
    shard_model(model, topology, settings, shared)
    if not topology.is_main:
        buffers = dict(model.named_buffers())
        device = "cpu" if settings.cpu_offload else topology.device
        model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
        for name, buffer in buffers.items():
            _set(model, name, buffer)
    places = {weight.data_ptr() for weight in shared}
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, DTensor) and tensor.data_ptr() in places:
            continue
        if topology.is_main:
            whole = weights[name].to(topology.device)
        else:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=topology.device)
        dist.broadcast(whole, src=0, group=group)
        if isinstance(tensor, DTensor):
            mesh, placements = tensor.device_mesh, tensor.placements
            whole = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
            tensor = tensor.to_local()
        tensor.copy_(whole)
    dist.destroy_process_group(group)
    return model


def _set(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, tensor)


def _structure(model: nn.Module) -> dict[str, tuple[str, torch.Size, torch.dtype, bool]]:
    """Return each parameter's first name, shape and dtype, and whether it is trained, by name."""
    firsts: dict[nn.Parameter, str] = {}
    return {
        name: (firsts.setdefault(weight, name), weight.shape, weight.dtype, weight.requires_grad)
        for name, weight in model.named_parameters(remove_duplicate=False)
    }


def shard_model(
    model: Any,
    topology: Topology,
    settings: ModelSettings = DEFAULTS,
    whole: Collection[nn.Parameter] = (),
) -> nn.Module:
    """Shard `model` in place: one FSDP group per transformer block, and one for the rest.

    ``FULL_SHARD`` gathers a block's weights for its forward and again for its backward; ``SHARD_GRAD_OP`` keeps them in
    between; ``NO_SHARD`` replicates them on every rank; ``HYBRID_SHARD`` shards within each node and replicates over
    nodes. Names of parameters do not change. With every strategy, `OptimizerStep` keeps a small model gathered for all
    micro-batches of a step. A model that `stays_plain` is only moved to the device. Parameters in `whole` are not
    sharded.

    Gradients are summed over ranks in fp32, also for bf16 weights. ``FULL_SHARD`` and ``SHARD_GRAD_OP`` add up the
    gradients of micro-batches in the dtype of the weights, unless the model stays gathered. The other strategies add
    them up in fp32. Sums in fp32 would double the memory of bf16 gradients and hardly help, because the passes
    themselves round more.
    """
    strategy = settings.sharding_strategy
    experts: list[nn.Module] = []
    if settings.model_parallel > 1:
        meshes = make_meshes(topology, settings)
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        mesh, experts = meshes.dense, split_model(inner, meshes, settings)
    else:
        shape = {
            "NO_SHARD": (topology.world_size, 1),
            "HYBRID_SHARD": (topology.num_nodes, topology.local_world_size),
        }.get(strategy, (topology.world_size,))
        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh(torch.device(topology.device).type, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy()
    is_cast = settings.computes_in_bf16(topology.is_cuda)
    if is_cast:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    # Only pinned memory is copied at full speed.
    offload = CPUOffloadPolicy(pin_memory=topology.is_cuda) if settings.cpu_offload else OffloadPolicy()
    if settings.use_activation_checkpointing:
        recompute(model, settings.use_activation_checkpointing, topology)
    blocks = transformer_blocks(model)
    if settings.compile:
        for block in blocks:
            # Compiling the method keeps the names of parameters, and does not compile FSDP's hooks.
            block.forward = torch.compile(block.forward, dynamic=True)  # type: ignore[method-assign]
    if stays_plain(topology.world_size, is_cast, settings.cpu_offload):
        return model.to(topology.device)
    for module in (*experts, *_copies_in_bf16(blocks), *reversed(blocks), model):
        fully_shard(
            module,
            mesh=meshes.experts if module in experts else mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=RESHARD_AFTER_FORWARD[strategy],
            ignored_params=set(whole),
        )
    return model


def _copies_in_bf16(blocks: list[nn.Module]) -> list[nn.Module]:
    """Return PEFT's trained copies of modules whose dtype is not the dtype of the adapters in the same block.

    An FSDP group needs one dtype. PEFT keeps adapters in fp32, and copies modules in the dtype of the model.
    """
    return [
        copied
        for block in blocks
        if len({weight.dtype for weight in block.parameters() if weight.requires_grad}) > 1
        for module in block.modules()
        if isinstance(copies := getattr(module, "modules_to_save", None), nn.ModuleDict)
        for copied in copies.values()
    ]


def recompute(model: Any, what: Recomputation, topology: Topology) -> None:
    """Recompute activations in the backward pass; `what` is `ModelSettings.use_activation_checkpointing`."""
    arguments: dict[str, Any] = {"use_reentrant": False}
    if what == "keep_attention":
        names = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
        kept = [getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default for name in names]
        kept.append(torch.ops.torch_attn._varlen_attn.default)
        arguments["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
    # Passed only if needed: older versions of transformers lack these arguments.
    more: dict[str, Any] = {}
    if what == "offload" and topology.is_cuda:
        more = {"offload": True}
    elif not isinstance(what, bool | str):
        more = {"every_n_layers": what}
    # transformers recomputes inside the blocks: no wrapper changes a parameter's name.
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments, **more)


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Find the repeated blocks of `model`: the modules that it declares unsplittable, else its longest module list."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
        blocks = max(lists, key=len, default=[])
    if not blocks:
        raise ConfigError(
            f"model of type {type(model).__name__} cannot be sharded: it has neither _no_split_modules nor a "
            "ModuleList of blocks. Use a transformers causal language model."
        )
    return blocks
