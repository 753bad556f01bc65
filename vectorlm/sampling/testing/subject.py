"""The engine under test, with a trainer's model for its updates."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vectorlm.ranks.topology import Topology
from vectorlm.types import Completion, Engine

PROMPTS = ([2, 3, 4], [5, 6, 7, 8, 9], [10])
NUM_TOKENS = 8
GREEDY = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
SAMPLED = {**GREEDY, "temperature": 1.0, "seed": 7}


@dataclass
class EngineUnderTest:
    """The engine under test; all checks share it, in order."""

    engine: Engine
    """The engine, before any update."""
    model_path: str | Path
    """The engine's model folder: a causal language model of at least 12 tokens and 64 positions."""
    logprob_tolerance: float = 1e-3
    """Largest difference between log-probabilities of engine and model; increase it for engines in 16 bits."""
    topology: Topology = field(default_factory=Topology.from_environment)
    """This rank's place; several ranks need the default process group."""
    fresh: Callable[[str], AbstractContextManager[Engine]] | None = None
    """A function that starts another engine of this kind on a model folder; None skips the comparison with it."""

    @contextmanager
    def kept_busy(self) -> Iterator[None]:
        """Keep the engine busy: the requests of a check then stay in flight even on a fast engine."""
        handle = self.engine.submit(PROMPTS * 40, {**GREEDY, "max_tokens": 40, "n": 8, "temperature": 1.0})
        try:
            yield
        finally:
            handle.cancel()
            self.engine.poll()

    @property
    def next_step(self) -> int:
        """The next training step."""
        return self.engine.version + 1

    def models(self, seed: int = 0) -> tuple[Any, Any]:
        """Return a trainer's model, sharded on several ranks, and a plain copy.

        Both have the checkpoint's weights plus noise of `seed`; different seeds give different answers.
        """
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoModelForCausalLM

        trained, plain = (
            AutoModelForCausalLM.from_pretrained(self.model_path, dtype=torch.float32).eval()
            for _ in range(2)
        )
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for ours, theirs in zip(trained.parameters(), plain.parameters(), strict=True):
                ours.add_(torch.randn(ours.shape, generator=generator) * 0.05)
                theirs.copy_(ours)
        trained.to(self.topology.device)
        if self.topology.world_size > 1:
            fully_shard(trained)
        return trained, plain

    @contextmanager
    def saved(self, plain: Any) -> Iterator[str]:
        """Write `plain` to a folder that all ranks of this machine see, with the other files of `model_path`."""
        with tempfile.TemporaryDirectory(prefix="vectorlm-contract-") as own:
            folder = [f"{own}/model"]
            if self.topology.rank == 0:
                weights = shutil.ignore_patterns("*.safetensors", "*.bin", "*.index.json")
                shutil.copytree(self.model_path, folder[0], ignore=weights)
                plain.save_pretrained(folder[0])
            if self.topology.world_size > 1:
                dist.broadcast_object_list(folder)
            yield folder[0]
            if self.topology.world_size > 1:
                dist.barrier()

    def logits(self, plain: Any, completion: Completion) -> torch.Tensor:
        """Return the logits [T, V] that `plain` gives at each token of a completion, in double."""
        ids = torch.tensor([[*completion.prompt_token_ids, *completion.token_ids]])
        with torch.no_grad():
            logits: torch.Tensor = plain(ids).logits[0].double()
        return logits[len(completion.prompt_token_ids) - 1 : -1]


@contextmanager
def raises(*kinds: type[Exception], saying: str = "") -> Iterator[list[Exception]]:
    """Fail unless the block raises one of `kinds` with `saying` in its text; yield a list that receives the error."""
    caught: list[Exception] = []
    try:
        yield caught
    except kinds as error:
        caught.append(error)
    assert caught, f"{' or '.join(kind.__name__ for kind in kinds)} must be raised, but nothing was."
    assert saying in str(caught[0]), f"{type(caught[0]).__name__} must name {saying!r}, but says: {caught[0]}"
