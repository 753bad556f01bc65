"""Join the copies of a loader that together put a trainer's parameter down as it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from vectorlm.weights.plan import TensorSpec
from vectorlm.weights.record import Copy, View


def join_copies(
    copies: Sequence[Copy], manifest: Sequence[TensorSpec], parameters: Mapping[str, torch.Tensor]
) -> list[Copy]:
    """Replace the copies of one source by a single one, where they only cut it up to lay it down in its own order.

    A loader fills a fused parameter part by part even from a source that is fused the same way: q, k and v of a
    Phi-3, or every expert of a layer. As one copy, it can be a view of the arena, and proven in one go.

    Args:
        copies: From `record_loading`.
        manifest: What the trainer sends.
        parameters: The engine's parameters by name.

    Returns:
        The copies, in the same order; each source that was joined stands where its first copy stood.
    """
    of_source: dict[str, list[Copy]] = defaultdict(list)
    for copy in copies:
        of_source[copy.source].append(copy)
    shapes = {spec.name: spec.shape for spec in manifest}
    joined: list[Copy] = []
    for name, parts in of_source.items():
        first = parts[0]
        shift = first.parameter_view.offset - first.source_view.offset
        whole = View.of(torch.empty(shapes[name], device="meta"), 0)
        if parameters[first.parameter].is_contiguous() and _are_laid_down(parts, shift, whole.count):
            joined.append(Copy(name, whole, first.parameter, View(whole.shape, whole.stride, shift)))
        else:
            joined.extend(parts)
    return joined


def _are_laid_down(parts: Sequence[Copy], shift: int, count: int) -> bool:
    """Whether `parts` are runs of one parameter, all moved by `shift`, that make up a source of `count` elements."""
    end = 0
    for part in sorted(parts, key=lambda each: each.source_view.offset):
        is_run = part.source_view.is_whole and part.parameter_view.is_whole
        is_moved = part.parameter_view.offset - part.source_view.offset == shift
        if (
            part.parameter != parts[0].parameter
            or not (is_run and is_moved)
            or part.source_view.offset != end
        ):
            return False
        end += part.source_view.count
    return end == count
