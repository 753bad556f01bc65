"""Find, compare and restore the tensors that an engine's model holds besides its parameters and buffers.

vLLM's level-2 sleep discards all memory of the model. It saves the registered buffers and copies them back, and an
update brings the parameters. Nothing restores a tensor that is a plain attribute, and checksums of the parameters do
not show the loss.
"""

from __future__ import annotations

import copyreg
import functools
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from vectorlm.errors import ChangedBySleep
from vectorlm.sampling.weights.inspection import checksums, row_sums
from vectorlm.sampling.weights.plan import shortened

COPIED_BYTES = 64 << 20
"""Host memory for copies; the smallest tensors are copied first, because then most tensors can be restored."""

ROW_BYTES = 4096
"""Bytes in a row of a checksum."""

LEAVES = (str, bytes, int, float, complex, type, types.ModuleType, types.BuiltinFunctionType)
NOT_FOLLOWED = ("vllm.config", "torch.fx", "torch._dynamo", "torch._inductor", "torch._functorch")
"""Modules of classes whose objects hold none of the model's memory, but lead to many others."""
OF_C = {types.MethodType: ("__self__", "__func__"), functools.partial: ("func", "args", "keywords")}
"""Attributes of classes that are written in C."""
MODULE_DICTS = ("_parameters", "_buffers", "_modules")


class UnlistedTensors:
    """The memory of a model that neither vLLM nor an update brings back after a sleep."""

    def __init__(self, model: torch.nn.Module, brought: Any = ()) -> None:
        """Sum all of this memory, and copy the smallest pieces to the host.

        Args:
            model: Its weights are awake.
            brought: Containers of other tensors that somebody brings back, or that lose their content on purpose.
        """
        others = (tensor for _, tensor in held_tensors(brought))
        known = {
            storage.data_ptr()
            for tensor in (*model.parameters(), *model.buffers(), *others)
            if (storage := _storage_of(tensor)) is not None
        }
        self._bytes: dict[str, torch.Tensor] = {}
        """By name: all bytes of a piece of memory."""
        # Beside a model on CUDA, a sleep does not touch the host.
        devices = {parameter.device for parameter in model.parameters()}
        for name, tensor in held_tensors(model):
            storage = _storage_of(tensor)
            if storage is not None and storage.device in devices and storage.data_ptr() not in known:
                known.add(storage.data_ptr())
                self._bytes[name] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self._sums = self._checksums()
        self._copies: dict[str, torch.Tensor] = {}
        left = COPIED_BYTES
        for name, content in sorted(self._bytes.items(), key=lambda item: len(item[1])):
            if (left := left - len(content)) < 0:
                break
            self._copies[name] = content.to("cpu", copy=True)

    def restore(self) -> list[str]:
        """Write the copies over memory whose bits have changed; return the names of its tensors.

        Raises:
            ChangedBySleep: Memory without a copy has changed; the text names the tensors.
        """
        found = self._checksums()
        changed = [name for name, total in self._sums.items() if found[name] != total]
        if lost := [name for name in changed if name not in self._copies]:
            raise ChangedBySleep(
                f"sleep lost {len(lost)} tensors of the engine's model that are neither parameters nor buffers, and "
                f"no copy of them exists (copies take {COPIED_BYTES >> 20} MiB at most): {shortened(lost)}. The engine "
                "can no longer be used. Build a new one, and let only its KV cache sleep."
            )
        with torch.inference_mode():
            for name in changed:
                self._bytes[name].copy_(self._copies[name])
        return changed

    def _checksums(self) -> dict[str, tuple[int, int]]:
        """Return two checksums by name: of the whole rows, and of the bytes that are left."""
        parts = []
        for content in self._bytes.values():
            end = len(content) // ROW_BYTES * ROW_BYTES
            parts += [(row_sums(content[:end].view(-1, ROW_BYTES)), 0), (row_sums(content[end:]), 0)]
        sums = checksums(parts)
        return dict(zip(self._bytes, zip(sums[::2], sums[1::2], strict=True), strict=True))


def held_tensors(root: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor that `root` or an object below it holds, by its shortest path of attributes."""
    queue, seen = deque([("", root)]), {id(root): root}
    while queue:
        path, value = queue.popleft()
        if isinstance(value, torch.Tensor):
            yield path, value
        for name, part in _parts_of(value):
            # Kept in `seen`, because no later object may get the same id.
            is_proxy = type(part) in weakref.ProxyTypes  # It may raise, whatever is asked of it.
            if id(part) not in seen and not is_proxy and not isinstance(part, LEAVES):
                seen[id(part)] = part
                queue.append((f"{path}{name}" if path else name.removeprefix("."), part))


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, by the text that leads from the object to it."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in list(value.items()))
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if cell != types.CellType():
                yield f".{name}", cell.cell_contents
    if str(type(value).__module__).startswith(NOT_FOLLOWED):
        return
    # pickle's own list of a class's slots.
    names = (*OF_C.get(type(value), ()), *copyreg._slotnames(type(value)))  # type: ignore[attr-defined]
    yield from ((f".{name}", getattr(value, name)) for name in names if hasattr(value, name))
    for name, part in list(getattr(value, "__dict__", {}).items()):
        if name in MODULE_DICTS and isinstance(value, torch.nn.Module):
            yield from ((f".{own}", tensor) for own, tensor in part.items())
        else:
            yield f".{name}", part


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the memory of a tensor; None if it has none, as on the meta device and in wrappers of other tensors."""
    if tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor):
        return None
    storage = tensor.untyped_storage()
    return storage if storage.device.type != "meta" and storage.nbytes() else None
