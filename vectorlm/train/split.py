"""Split a model's layers over ranks: tensor and expert parallelism by transformers' own plans."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vectorlm.errors import ConfigError
from vectorlm.ranks.topology import Topology
from vectorlm.sampling.weights.lora_factors import is_lora_layer
from vectorlm.sampling.weights.model_tensors import checkpoint_name
from vectorlm.train.settings import ModelSettings

SUMMED = "replicated_with_grad_allreduce"
"""transformers' style of a layer whose whole weight every rank has, but applies only to its own heads."""

SPLIT_DIMS = {
    **dict.fromkeys(
        ("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise", "embedding_rowwise"), -2
    ),
    **dict.fromkeys(("rowwise", "rowwise_split_input", "rowwise_rep"), -1),
    "grouped_gemm": 0,
}
"""Dimension of a weight that each of transformers' styles splits; a bias is split like the rows of its weight."""
ADAPTED_STYLES = (
    "colwise",
    "colwise_gather_output",
    "colwise_rep",
    "rowwise",
    "rowwise_split_input",
    "rowwise_rep",
)
"""Styles of the layers that may have LoRA."""


@dataclass(frozen=True)
class Meshes:
    """The groups of ranks that split a model, and the meshes over which FSDP shards their parts."""

    dense: DeviceMesh
    """FSDP's mesh for everything but split experts."""
    experts: DeviceMesh
    """FSDP's mesh for split experts."""
    tensor: DeviceMesh | None
    """The ranks of a tensor-parallel group; None without one."""
    expert: DeviceMesh | None
    """The ranks of an expert-parallel group; None without one."""


def make_meshes(topology: Topology, settings: ModelSettings) -> Meshes:
    """Make the groups of ranks; neighbouring ranks split a model, and all ranks call this.

    An expert-parallel group may consist of several tensor-parallel groups. FSDP shards all weights but the experts over
    these groups, although they train on the same rows.
    """
    # Otherwise every export warns that gathering a weight that is both split and sharded takes two exchanges.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    tensor, group = settings.tensor_parallel, settings.model_parallel
    sizes = {"replicate": 1, "shard": topology.world_size // group}
    if settings.sharding_strategy == "HYBRID_SHARD":
        sizes = {"replicate": topology.num_nodes, "shard": topology.local_world_size // group}
    sizes |= {"between": group // tensor, "tensor": tensor}
    names = [name for name, size in sizes.items() if size > 1 or name == "shard"]
    mesh = init_device_mesh(
        torch.device(topology.device).type, tuple(sizes[name] for name in names), mesh_dim_names=tuple(names)
    )

    def joined(parts: Sequence[str], name: str) -> DeviceMesh:
        found = [part for part in parts if part in names]
        return mesh[found[0]] if len(found) == 1 else mesh[tuple(found)]._flatten(name)

    dense, experts = joined(("shard", "between"), "dense"), mesh["shard"]
    if "replicate" in names:
        dense, experts = (DeviceMesh._concatenate([mesh["replicate"], part]) for part in (dense, experts))
    return Meshes(
        dense,
        experts,
        mesh["tensor"] if tensor > 1 else None,
        joined(("between", "tensor"), "group") if settings.expert_parallel > 1 else None,
    )


def _plans_of(model: Any, settings: ModelSettings) -> tuple[dict[str, str], dict[str, str]]:
    """Return transformers' tensor plan and expert plan for a model, as far as `settings` use them."""
    tensor = dict(model.tp_plan) if settings.tensor_parallel > 1 else {}
    expert = dict(model.ep_plan) if settings.expert_parallel > 1 else {}
    # The expert plan has its own rules for the experts.
    return {name: style for name, style in tensor.items() if not _is_part(name, expert)}, expert


def _is_part(name: str, owners: dict[str, str]) -> bool:
    return any(name == owner or name.startswith(f"{owner}.") for owner in owners)


def why_not_split(model: Any, settings: ModelSettings) -> tuple[str, str, str] | None:
    """Return which setting does not fit a transformers model, the rule that it breaks, and the fix; None if all fit."""
    import transformers
    from transformers.distributed import tensor_parallel

    plans = dict(zip(("tensor_parallel", "expert_parallel"), _plans_of(model, settings), strict=True))
    for name, plan in plans.items():
        size = getattr(settings, name)
        if size == 1:
            continue
        if not hasattr(tensor_parallel, "apply_tensor_parallelism"):
            rule = f"needs transformers 5.19, and {transformers.__version__} splits models in another way"
            return name, rule, "Run `pip install transformers==5.19.0`, or use 1."
        # Some models have a plan only for their output layer.
        if not (plan.keys() - {"lm_head"}):
            rule = f"needs a plan of transformers for the model, and {type(model).__name__} has none"
            return name, rule, "Use 1."
        for key in plan:
            for module in _matching(model, [key]):
                if not _can_be_adapted(module, plan[key]):
                    rule = f"cannot adapt {key!r}, which ranks split ({name}={size})"
                    return "lora_peft_config", rule, f"Leave it out, or use {name}: 1."
        for weight_name, weight in model.named_parameters():
            style = None if ".lora_" in weight_name else _style_of(checkpoint_name(weight_name), plan)
            dim = SPLIT_DIMS.get(style or "")
            if dim is None or (weight.ndim == 1 and dim == -1):
                continue
            length = weight.shape[max(dim, -weight.ndim)]
            if length % (2 * size if style == "packed_colwise" else size):
                rule = f"must divide the weights of the model, and {weight_name} has a dimension of {length}"
                return name, rule, "Use 1."
    return None


def _style_of(weight: str, plan: dict[str, str]) -> str | None:
    """Return the style of a weight; plans name it or its module, with `*` for the number of a layer."""
    name = re.sub(r"\.\d+(?=\.|$)", ".*", weight)
    return plan.get(name, plan.get(name.rpartition(".")[0]))


def _can_be_adapted(module: Any, style: str) -> bool:
    """Return whether ranks can split a layer with its adapters, if it has any: LoRA on a linear layer."""
    if not {"base_layer", "modules_to_save"} & module._modules.keys():
        return True
    is_linear = is_lora_layer(module) and type(module.base_layer) is nn.Linear
    return is_linear and not module.lora_magnitude_vector and style in ADAPTED_STYLES


def split_model(model: Any, meshes: Meshes, settings: ModelSettings) -> list[nn.Module]:
    """Split the layers of `model` in place, before FSDP shards it; return the modules with split experts.

    Raises:
        ConfigError: transformers has no plan for the model, or a size does not divide a dimension of its weights.
    """
    from transformers.distributed.tensor_parallel import apply_expert_parallelism, apply_tensor_parallelism

    if (problem := why_not_split(model, settings)) is not None:
        name, rule, fix = problem
        raise ConfigError(f"train_parameters.{name}={getattr(settings, name, '…')}: {rule}. {fix}")
    tensor, expert = _plans_of(model, settings)
    shared = _shared_names(model)
    for names in shared:
        # If only one of its layers split a shared weight, the layers would no longer share it.
        owners = {name.rpartition(".")[0] for name in names}
        if not owners <= tensor.keys():
            tensor = {name: style for name, style in tensor.items() if name not in owners}
    summed = [name for name, style in tensor.items() if style == SUMMED]
    if meshes.tensor is not None:
        plan = {name: style for name, style in tensor.items() if style != SUMMED}
        apply_tensor_parallelism(model, meshes.tensor, _split_adapted(model, meshes.tensor, plan))
        for module in _matching(model, summed):
            _sum_gradients(module, meshes.tensor)
    if meshes.expert is not None:
        # All ranks of the group have the same rows, and each rank sends its part of the rows to the experts.
        apply_expert_parallelism(model, meshes.expert, meshes.expert, expert)
    for first, *others in shared:
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))
    whole = [
        name for name in expert if not any(name.startswith(f"{other}.") for other in expert if other != name)
    ]
    experts = list(_matching(model, whole))
    for module in experts:
        _copy_output(module)
    return experts


def _split_adapted(model: nn.Module, mesh: DeviceMesh, plan: dict[str, str]) -> dict[str, str]:
    """Split the linear layers that have LoRA, and return the rest of the plan.

    If ranks split the outputs of a layer, they split B in the same way; if they split its inputs, they split A. The
    other factor is whole on every rank, and gets the same gradient on all ranks.
    """
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    rest = dict(plan)
    for key, name in plan.items():
        layers = list(_matching(model, [key]))
        if not any(map(is_lora_layer, layers)):
            continue
        del rest[key]
        style = ALL_PARALLEL_STYLES[name]
        for layer in layers:
            parts: list[Any] = [layer]
            if is_lora_layer(layer):
                adapted: Any = layer
                factors = adapted.lora_B if name.startswith("colwise") else adapted.lora_A
                parts = [adapted.base_layer, *factors.values()]
            for part in parts:
                for weight in list(part._parameters):
                    style.shard_param(part, weight, mesh)
                style.install_forward(part, mesh)
    return rest


def _copy_output(module: Any) -> None:
    """Let a module return a copy of its output: in-place operations on a view lose FSDP's hook, and FSDP warns."""
    forward = module.forward

    def copied(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs).clone()

    module.forward = copied


def _shared_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [found for found in names.values() if len(found) > 1]


def _matching(model: nn.Module, patterns: Sequence[str]) -> Iterator[nn.Module]:
    """Yield the modules whose names match a key of a plan, where ``*`` is a number."""
    for pattern in patterns:
        wanted = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        yield from (module for name, module in model.named_modules() if wanted.fullmatch(name))


class _SumOfGradients(torch.autograd.Function):
    """The identity, whose gradient is summed over a group of ranks."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(gradient, group=ctx.mesh.get_group())
        return gradient, None


def _sum_gradients(module: Any, mesh: DeviceMesh) -> None:
    """Let a layer that sees only this rank's heads sum the gradients of its weights over the ranks.

    transformers 5.19 sums ``parameter.grad`` in a hook. If several micro-batches add up gradients, it sums the earlier
    ones again.
    """
    forward = module.forward

    def summed(*args: Any, **kwargs: Any) -> Any:
        own = dict(module._parameters)
        for name, weight in own.items():
            if weight is not None and weight.requires_grad and torch.is_grad_enabled():
                module._parameters[name] = _SumOfGradients.apply(weight, mesh)
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(own)

    module.forward = summed
