"""Where this process stands among the ranks of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun and its like set for each rank; a process that has all of them is one."""


@dataclass(frozen=True)
class Topology:
    """One rank's place in the run; a lone process is rank 0 of 1."""

    rank: int = 0
    """Index of this process among all ranks, from 0."""
    local_rank: int = 0
    """Index of this process among the ranks of its node, from 0."""
    world_size: int = 1
    """Number of ranks in the run."""
    local_world_size: int = 1
    """Number of ranks on this node."""
    device: str = "cpu"
    """The device that this rank trains on, as torch spells it: ``cpu`` or ``cuda:<local_rank>``."""
    error_file: str | None = None
    """Where the supervisor looks for this rank's error; None when nothing supervises this process."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Topology:
        """Read the variables that torchrun and `vectorlm.launch` set; a lone process where there are none.

        Args:
            environment: Variables to read instead of ``os.environ``.

        Raises:
            ValueError: A variable is not a number, the rank lies outside the world, or the nodes do not hold equally
                many ranks, numbered node by node.
        """
        variables = os.environ if environment is None else environment
        rank = int(variables.get("RANK", 0))
        world_size = int(variables.get("WORLD_SIZE", 1))
        local_rank = int(variables.get("LOCAL_RANK", rank))
        local_world_size = int(variables.get("LOCAL_WORLD_SIZE", world_size))
        if not 0 <= rank < world_size:
            raise ValueError(
                f"RANK={rank} lies outside WORLD_SIZE={world_size}: it must be 0 to {world_size - 1}."
            )
        if world_size % local_world_size or rank % local_world_size != local_rank:
            raise ValueError(
                f"RANK={rank} of WORLD_SIZE={world_size} cannot be LOCAL_RANK={local_rank} of "
                f"LOCAL_WORLD_SIZE={local_world_size}: every node must run as many ranks, numbered node by node."
            )
        return cls(
            rank,
            local_rank,
            world_size,
            local_world_size,
            _device(local_rank),
            variables.get("TORCHELASTIC_ERROR_FILE"),
        )

    @property
    def node(self) -> int:
        """Index of this node, from 0; nodes hold equally many ranks."""
        return self.rank // self.local_world_size

    @property
    def num_nodes(self) -> int:
        """Number of nodes in the run."""
        return self.world_size // self.local_world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which owns the sampler and writes the files."""
        return self.rank == 0

    @property
    def is_cuda(self) -> bool:
        """Whether this rank trains on a CUDA device."""
        return self.device.startswith("cuda")


def is_rank(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether torchrun, or another launcher that speaks its language, made this process a rank.

    Args:
        environment: Variables to read instead of ``os.environ``.
    """
    variables = os.environ if environment is None else environment
    return all(name in variables for name in RANK_VARIABLES)


def _device(local_rank: int) -> str:
    import torch

    return f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
