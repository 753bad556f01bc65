"""A folder that every node of a run sees under the same path."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vectorlm.errors import CheckpointError
from vectorlm.ranks.topology import Topology

PATIENCE_S = 10.0
"""Network file systems may show another machine's new file only after some seconds."""
POLL_S = 0.1


def require_shared(path: str | Path, topology: Topology) -> None:
    """Check that all nodes see the same folder `path`, and make it where it is missing; called on all ranks.

    Each rank writes its own part of a checkpoint: on folders that only look alike every node would keep a part that
    nothing can be resumed from.

    Raises:
        CheckpointError: On every rank, if a rank does not see what rank 0 wrote there.
    """
    if topology.num_nodes == 1:
        return
    names: list[Any] = [f".seen-by-all-{uuid.uuid4().hex}"]
    marker = None
    if topology.is_main:
        Path(path).mkdir(parents=True, exist_ok=True)
        marker = Path(path, names[0])
        marker.touch()
    try:
        dist.broadcast_object_list(names)
        seen: list[Any] = [None] * topology.world_size
        dist.all_gather_object(seen, _appears(Path(path, names[0])))
    finally:
        if marker is not None:
            marker.unlink()
    blind = sorted({rank // topology.local_world_size for rank, sees in enumerate(seen) if not sees})
    if blind:
        nodes = f"node {blind[0]} does" if len(blind) == 1 else f"nodes {', '.join(map(str, blind))} do"
        raise CheckpointError(
            f"{nodes} not see the output_dir {path} of node 0: each rank writes its part of a checkpoint, so all nodes "
            "must share the folder. Name one on a file system that they share, or set "
            "train_parameters.checkpointing_enabled=False."
        )


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
