"""The tokens of a forward pass split over a group of ranks, which exchange them for heads around attention.

Source: Jacobs et al. 2023, arXiv:2309.14509 (DeepSpeed Ulysses).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

from vectorlm.ranks.topology import Topology


@dataclass(frozen=True, eq=False)
class ContextGroup:
    """The ranks that share the tokens of each pass: every `size`-th one is this rank's, from the one at `rank` on.

    So all of them have as many tokens to compute and, about, as many that are asked for.
    """

    group: dist.ProcessGroup
    rank: int
    """This rank's index in the group."""
    size: int

    @classmethod
    def of(cls, topology: Topology) -> ContextGroup | None:
        """Make the groups, neighbours each; called on all ranks. None where each rank has passes of its own."""
        size = topology.context_parallel
        if size == 1:
            return None
        group, _ = dist.new_subgroups(size)
        return cls(group, topology.rank % size, size)

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens [1, n] of a pass [1, N], filled up with 0 where N is no multiple of `size`."""
        return F.pad(x, (0, -x.shape[1] % self.size))[:, self.rank :: self.size]

    def to_heads(self, x: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Turn all heads of this rank's tokens, [1, H, n, D], into its share of the heads of all, [1, H / size, N, D].

        Where `size` does not divide H, as of keys that several queries share, each head is there for several ranks.
        """
        x = x.repeat_interleave(self.size // math.gcd(x.shape[1], self.size), dim=1)
        found = self._exchange(x[0].unflatten(0, (self.size, -1)))
        return found.permute(1, 2, 0, 3).flatten(1, 2)[None, :, :num_tokens]

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Turn this rank's heads of all tokens, [1, N, h, E], into all heads of its own, [1, n, h * size, E]."""
        x = F.pad(x[0], (0, 0, 0, 0, 0, -x.shape[1] % self.size))
        found = self._exchange(x.unflatten(0, (-1, self.size)).transpose(0, 1))
        return found.transpose(0, 1).flatten(1, 2)[None]

    def gather(self, values: torch.Tensor, places: torch.Tensor, num: int) -> torch.Tensor:
        """Put values of all ranks together, [num, ...] on each of them; this rank's lie at `places`.

        Each rank then computes the whole loss, and its gradient goes back to its own values alone: gradients of the
        weights are shares, which FSDP adds up.
        """
        found = values.new_zeros(num, *values.shape[1:]).index_copy(0, places, values.detach())
        dist.all_reduce(found, group=self.group)  # Each value is one rank's: zeros change no bit of it.
        return found.index_copy(0, places, values)

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        """Send x[r] to rank r of the group, and return what each of them sent."""
        return wait_tensor(all_to_all_single_autograd(x.contiguous(), None, None, self.group))
