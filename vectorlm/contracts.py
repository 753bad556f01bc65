"""What another inference engine, or another trainer, must offer to stand in for ours.

A training loop calls a `vectorlm.types.Engine`, on all ranks alike. Behind `vectorlm.SamplingEngine` stands an
`Inference`, in a process of its own and called from one thread; in front of it a `WeightSource`, on every rank.
docs/contracts.md shows how to write either, and `vectorlm.testing` holds the checks that both must pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from vectorlm.types import Prompt

if TYPE_CHECKING:
    from vectorlm.weights.plan import Layout, TensorSpec


INFERENCES = {
    "vllm": "vectorlm.sampling.vllm_inference:VLLM",
    "transformers": "vectorlm.sampling.hf_inference:Transformers",
    "server": "vectorlm.sampling.server_inference:VLLMServer",
}
"""The implementations of `Inference` that are here, by the names that `SamplingEngine` and configs call them."""


@dataclass(frozen=True)
class Written:
    """One completion of a request."""

    token_ids: Sequence[int]
    """The sampled tokens, an end token included."""
    logprobs: Sequence[float] | None
    """The log-probability of each sampled token; None where none were asked for."""
    versions: Sequence[int]
    """The weight version that sampled each token."""
    text: str
    """The tokens as text, without a stop string that ended them."""
    finish_reason: str | None
    """``stop``, ``length`` or ``abort``."""


@dataclass(frozen=True)
class Finished:
    """A request that needs no further step."""

    name: str
    """As it was submitted."""
    prompt_token_ids: Sequence[int]
    """The prompt as the engine saw it."""
    completions: Sequence[Written]
    """As many as the sampling parameters' `n`, in the order of their seeds."""
    error: Exception | None = None
    """Why there are none; ends the caller's batch, and no other."""
    raw: Any = None
    """vLLM's own ``RequestOutput``, where there is one: what `SamplingEngine.generate` gives."""


class Inference(Protocol):
    """An inference engine as one process drives it, from one thread.

    `SamplingEngine` keeps the order of the calls: it submits only to an engine that is awake, not paused and in
    possession of whole weights; it writes weights only between `pause` and `resume`; after an error of `poll` it asks
    for nothing more. An implementation is built as ``Class(model, receiver=…, **engine_args)``, in the sampler process.

    Errors are `vectorlm.errors`' own where one fits. Others reach the ranks as `EngineError`, with their traceback.
    """

    @property
    def receiver(self) -> str:
        """How the engine holds weights: `live`, or `packed` for its own kernels."""
        ...

    @property
    def max_num_seqs(self) -> int:
        """Sequences that are sampled at a time; more requests wait inside the engine."""
        ...

    @property
    def version(self) -> int:
        """The version that `load` was told last; -1 before."""
        ...

    def submit(self, name: str, prompt: Prompt, sampling_params: Any) -> None:
        """Queue one prompt.

        Args:
            name: Tells it from all others under way.
            prompt: Text, token ids or chat messages.
            sampling_params: A mapping with the names of ``vllm.SamplingParams``, or one of these; None for their
                defaults.

        Raises:
            EngineError: The engine cannot sample this; the text says why. It is not queued.
        """
        ...

    def poll(self) -> Sequence[Finished]:
        """Go on for a moment, a fraction of a second at most, and return what has finished since the last call.

        Raises:
            Exception: The engine is broken; every request under way is lost.
        """
        ...

    def cancel(self, names: Iterable[str]) -> None:
        """Forget requests; names that are unknown or finished are passed over."""
        ...

    def connect(self, manifest: Sequence[TensorSpec], arena_path: str | None, part: str) -> Layout:
        """Initialise the weight channel: match the trainer's tensors with the engine's, and say where they go.

        Args:
            manifest: What the trainer will send, whole tensors.
            arena_path: Memory of another engine of this node, to be shared; None makes one.
            part: `base` for the model's own tensors; `adapter` for LoRA factors on top of them.

        Returns:
            A file that every rank of this node can map, and the place of each tensor in it.

        Raises:
            WeightMismatch: The two do not hold the same model; nothing has changed.
        """
        ...

    def pause(self) -> None:
        """Stand still: from here to `resume` no token is written and no weight is read."""
        ...

    def load(
        self, version: int, checksums: Sequence[int] | None, swapped: Sequence[str], recompute: bool
    ) -> float:
        """Take over what the ranks wrote into the arena, while paused.

        From here on tokens are of `version`, those of requests under way included, and no new request finds KV blocks
        of older weights.

        Args:
            version: The training step of these weights.
            checksums: Of all tensors that were written, part by part; None if nothing shall be proven.
            swapped: The parts that were written, `base` before `adapter`.
            recompute: Compute the KV cache of requests under way anew, with the new weights; else they keep it.

        Returns:
            Seconds it took.

        Raises:
            ChecksumMismatch: The engine does not hold what was sent.
        """
        ...

    def resume(self) -> None:
        """Go on with the requests under way."""
        ...

    def drop(self, parts: frozenset[str], asleep: frozenset[str]) -> None:
        """Give the memory of `parts` (of `weights`, `kv_cache`) away; those in `asleep` sleep already.

        An engine that has no such memory forgets its KV cache, and that is all.

        Raises:
            EngineError: It cannot be done, and nothing has happened.
        """
        ...

    def restore(self, parts: frozenset[str]) -> None:
        """Take the memory of `parts` back; weights hold nothing until the next `load`."""
        ...

    def close(self) -> None:
        """End what this object has started."""
        ...


@runtime_checkable
class WeightSource(Protocol):
    """What `Engine.update` takes in place of a ``torch.nn.Module``: weights that somebody else trains.

    All ranks call both methods alike.
    """

    def manifest(self) -> Sequence[TensorSpec]:
        """List the tensors, whole, under their names in the trainer; the same on every rank, at every version."""
        ...

    def publish(self, layout: Layout, with_checksums: bool) -> Sequence[int]:
        """Write this rank's part of every tensor into the arena, cast to each slot's dtype.

        The ranks of one node write every byte of every slot between them.

        Args:
            layout: Where the tensors go.
            with_checksums: Whether to return sums.

        Returns:
            For each slot, the sum modulo 2^64 over ranks of which is `vectorlm.weights.checksum.checksum` of the whole
            tensor; nothing where none are asked for.
        """
        ...


@runtime_checkable
class Trainer(WeightSource, Protocol):
    """A trainer whose weights an engine follows: ``engine.update(trainer, trainer.version)``."""

    @property
    def version(self) -> int:
        """Optimizer steps that the weights have seen."""
        ...

    def step(self, batch: Any) -> Mapping[str, float]:
        """Take one optimizer step on this rank's `batch`; return metrics, equal on all ranks."""
        ...
