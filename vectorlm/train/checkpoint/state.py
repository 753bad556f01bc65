"""Checkpoints: the complete state of a run, from which a killed run continues bit for bit."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from vectorlm.ranks.wait import report_wait
from vectorlm.sampling.weights.boxes import Box, boxes_of
from vectorlm.sampling.weights.model_tensors import without_wrappers
from vectorlm.train.checkpoint import folder
from vectorlm.types import TrainedModel

DIGESTS = "files.json"
"""Name of the file with the digests of all files of a checkpoint."""

# Frozen weights come from the model's folder; a LoRA checkpoint holds only the adapters.
_OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)


class CheckpointStore:
    """The checkpoints in a folder, ``step-00000040/`` and so on; keeps the newest ones and the best one.

    A checkpoint holds the shards of the weights and of the optimizer's state, each rank's random generators and loop
    state, and the digest of every file. It gets its final name when all ranks have written. `save` and `load` are
    collective.

    Args:
        path: The folder; it need not exist.
        identity: Facts about the run that each checkpoint records, as JSON values.
        num_kept: Number of newest checkpoints to keep, >= 1.
        best_step: Returns the step of the best checkpoint, which is kept too, or None.
        model_parallel: Number of neighbouring ranks that split a model, as in `Topology`.
    """

    def __init__(
        self,
        path: str | Path,
        identity: Mapping[str, Any],
        num_kept: int = 2,
        best_step: Callable[[], int | None] = lambda: None,
        model_parallel: int = 1,
    ) -> None:
        self._path, self._identity = Path(path), identity
        self._num_kept, self._best_step = num_kept, best_step
        self._model_parallel = model_parallel

    def save(self, step: int, models: Mapping[str, TrainedModel], loop: dict[str, Any]) -> Path:
        """Write the checkpoint of `step` and return its folder; `loop` is this rank's state (tensors, plain values).

        Raises:
            CheckpointError: It cannot be written.
        """
        target, rank = folder.folder_of(self._path, step), dist.get_rank()
        work = folder.unfinished(target)
        with folder.naming(target, "write"), report_wait(f"writing the checkpoint {target}", is_on=rank == 0):
            if rank == 0:
                folder.begin(target, "step-*")
            dist.barrier()
            states = {name: state_of(model) for name, model in models.items()}
            dcp.save(tree_map(_in_boxes, states), checkpoint_id=work / "shards")
            fresh = [name for name, model in models.items() if _is_fresh(model)]
            torch.save({"loop": loop, "rng": capture_rng(), "fresh": fresh}, work / f"rank-{rank}.pt")
            best = self._best_step() if rank == 0 else None
            if rank == 0:
                identity = {**self._identity, "format": folder.FORMAT, "best_step": best}
                (work / "identity.json").write_text(json.dumps(identity, indent=2))
            dist.barrier()
            # torch does not verify its files when it reads them.
            written = _digests(work, _files(work))
            if rank == 0:
                (work / DIGESTS).write_text(json.dumps(written, indent=2))
                folder.finish(target)
                for old in folder.steps_in(self._path)[: -self._num_kept]:
                    if old != best:
                        folder.retire(folder.folder_of(self._path, old))
            dist.barrier()
        return target

    def is_finished(self, step: int) -> bool:
        """Return whether the run of this checkpoint has written its final model."""
        return (folder.folder_of(self._path, step) / "finished").exists()

    def load(self, step: int, models: Mapping[str, TrainedModel]) -> dict[str, Any]:
        """Restore models, optimizers and random generators of `step`; return the saved `loop`.

        The number of ranks may differ: a new rank keeps its random generators and gets rank 0's `loop`. Ranks that
        split a model get the generators of the first of them, because they must drop out the same numbers.

        Raises:
            CheckpointError: The checkpoint cannot be read, or a file has changed.
        """
        source, rank = folder.folder_of(self._path, step), dist.get_rank()
        with folder.naming(source, "read"), report_wait(f"reading the checkpoint {source}", is_on=rank == 0):
            _require_as_written(source)
            states = {name: state_of(model) for name, model in models.items()}
            paths = dcp.FileSystemReader(source / "shards").read_metadata().planner_data
            written = {path[:4] for path in paths.values()}
            for name, state in states.items():
                # torch makes up a state for weights without a gradient, for which the optimizer has saved none.
                by_weight = state.get("optimizer", {}).get("state", {})
                for weight in list(by_weight):
                    if (name, "optimizer", "state", weight) not in written:
                        del by_weight[weight]
            states = _read(states, source)
            first = rank - rank % self._model_parallel
            files = {number: source / f"rank-{number}.pt" for number in {rank, first}}
            of_ranks = {
                number: torch.load(file, weights_only=True) for number, file in files.items() if file.exists()
            }
            saved = of_ranks.get(rank) or torch.load(source / "rank-0.pt", weights_only=True)
        for name, model in models.items():
            set_state(model, states[name])
        for name in saved["fresh"]:
            optimizer = models[name].optimizer
            assert optimizer is not None
            optimizer.state.clear()
        if first in of_ranks:
            restore_rng(of_ranks[first]["rng"])
        return saved["loop"]


def load_weights(path: Path, model: nn.Module) -> None:
    """Load the policy's weights from the checkpoint `path`; all ranks call this, or a single process.

    For a model with adapters, only the trained tensors are loaded.

    Raises:
        CheckpointError: The checkpoint cannot be read, or a file has changed.
    """
    with folder.naming(path, "read"):
        _require_as_written(path)
        weights = get_model_state_dict(model, options=_OPTIONS)
        state = {"policy": {"model": _without_frozen(weights, model)}}
        with warnings.catch_warnings():
            # A single process without ranks is intended.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            state = _read(state, path)
        set_model_state_dict(model, state["policy"]["model"], options=_OPTIONS)


class _Boxes(torch.Tensor):
    """A DTensor whose shard has several blocks of the whole tensor, as torch's checkpoints write and read it.

    torch would treat the shard as one block, and read wrong values back in another layout. This is a tensor, because
    torch finds only tensors in a state.
    """

    tensor: DTensor
    _shard: torch.Tensor
    _boxes: Sequence[Box]

    @staticmethod
    def __new__(cls, tensor: DTensor) -> _Boxes:
        # It has no memory: `_shard` holds the values.
        made: _Boxes = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, tensor.shape, dtype=tensor.dtype, device=tensor.device
        )
        made.tensor, made._shard = tensor, tensor.to_local().detach()
        made._boxes = boxes_of(tensor.shape, tensor.device_mesh, tensor.placements)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of a tensor that is only written or read")

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._shard)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.place), torch.Size(box.lengths)) for box in self._boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(box.of(self._shard) for box in self._boxes if box.place == tuple(index.offset or ()))


def _in_boxes(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    boxes = boxes_of(value.shape, value.device_mesh, value.placements)
    return _Boxes(value) if len(boxes) > 1 else value


def _read(states: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return `states` with the values of the checkpoint `path`; tensors are overwritten."""
    read = tree_map(_in_boxes, states)
    dcp.load(read, checkpoint_id=path / "shards")
    plain: dict[str, Any] = tree_map(lambda value: value.tensor if isinstance(value, _Boxes) else value, read)
    return plain


def _require_as_written(path: Path) -> None:
    written = json.loads((path / DIGESTS).read_text())
    present = _digests(path, sorted({*written, *_files(path)} - {DIGESTS, "finished"}))
    if spoiled := [name for name in present if written.get(name) != present[name]]:
        raise ValueError(f"{', '.join(spoiled)} has changed since it was written")


def _files(path: Path) -> list[str]:
    """Return the names of all files below `path`."""
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def _digests(path: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the digests of the files below `path` on every rank; each rank reads its share."""
    if not dist.is_initialized():
        return folder.digests(path, names)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shares: list[Any] = [None] * world_size
    dist.all_gather_object(shares, folder.digests(path, sorted(names)[rank::world_size]))
    return {name: digest for share in shares for name, digest in share.items()}


def state_of(trained: TrainedModel) -> dict[str, Any]:
    """Return a model's state for a checkpoint; `set_state` restores it."""
    if trained.optimizer is None:
        return {"model": get_model_state_dict(trained.model)}
    is_fresh = _is_fresh(trained)
    weights, optimizer_state = get_state_dict(trained.model, trained.optimizer, options=_OPTIONS)
    if is_fresh:
        # torch has made a step to create the state; it would count in Adam's bias correction.
        trained.optimizer.state.clear()
    return {"model": _without_frozen(weights, trained.model), "optimizer": optimizer_state}


def _without_frozen(weights: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return `weights` without frozen weights: torch removes only the first of several names of a weight."""
    named = model.named_parameters(remove_duplicate=False)
    frozen = {without_wrappers(name) for name, weight in named if not weight.requires_grad}
    return {name: weight for name, weight in weights.items() if name not in frozen}


def set_state(trained: TrainedModel, state: dict[str, Any]) -> None:
    """Restore model and optimizer from `state_of`; of the optimizer's arguments, restore only the learning rate."""
    if trained.optimizer is None:
        set_model_state_dict(trained.model, state["model"])
        return
    arguments = [{**group, "params": None} for group in trained.optimizer.param_groups]
    states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(trained.model, trained.optimizer, **states, options=_OPTIONS)
    for group, given in zip(trained.optimizer.param_groups, arguments, strict=True):
        group |= {name: value for name, value in given.items() if name not in ("params", "lr")}


def _is_fresh(trained: TrainedModel) -> bool:
    """Return whether the optimizer has not made a step yet."""
    return trained.optimizer is not None and not trained.optimizer.state


def capture_rng() -> dict[str, Any]:
    """Return the states of the random generators of Python, NumPy, torch and CUDA, as tensors and plain values."""
    version, words, spare = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    inner = numpy_state["state"]
    return {
        "python": [version, list(words), spare],
        "numpy": numpy_state | {"state": inner | {"key": inner["key"].tolist()}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Restore all random generators from `capture_rng`."""
    version, words, spare = state["python"]
    random.setstate((version, tuple(words), spare))
    key = np.array(state["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state(state["numpy"] | {"state": state["numpy"]["state"] | {"key": key}})
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
