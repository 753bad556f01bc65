"""transformers in the sampler's process, as an `Inference`: the pattern for engines that are not vLLM."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from vectorlm.contracts import Finished, Written
from vectorlm.errors import ChecksumMismatch, EngineError
from vectorlm.sampling.hf_sampler import HFSampler, HFWork
from vectorlm.sampling.rest import Parts
from vectorlm.types import Completion, Prompt
from vectorlm.weights.arena import Arena, path_of, reserve
from vectorlm.weights.checksum import checksum
from vectorlm.weights.plain_layout import plain_slots
from vectorlm.weights.plan import Layout, TensorSpec, dtype_name
from vectorlm.weights.whole import require_same


class Transformers:
    """Continues prompts with ``transformers``, a batch at a time; weights are copied out of the arena."""

    receiver = "live"
    """Weights lie as the checkpoint has them."""

    def __init__(
        self,
        model: str,
        *,
        receiver: str,
        dtype: str = "float32",
        max_num_seqs: int = 64,
        logprobs_mode: str = "raw_logprobs",
        max_model_len: int | None = None,
    ) -> None:
        """Load the model, on the first CUDA device if there is one.

        Args:
            model: A folder written by ``save_pretrained``.
            receiver: `live` or `auto`; there is nothing to pack.
            dtype: The precision, as torch spells it.
            max_num_seqs: Prompts that are continued together.
            logprobs_mode: `raw_logprobs`: log-probabilities are those before temperature and cuts.
            max_model_len: Not read: there is room for what the model has room for.

        Raises:
            EngineError: The folder or a tensor of the model is missing, weights shall be packed, or log-probabilities
                shall be others.
        """
        if receiver == "packed":
            raise EngineError("receiver='packed' is vLLM's: transformers computes with plain weights.")
        if logprobs_mode != "raw_logprobs":
            raise EngineError(
                f"logprobs_mode={logprobs_mode!r} is vLLM's: log-probabilities of transformers are those before "
                "temperature and cuts, which reinforcement learning cannot use."
            )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._sampler = HFSampler(model, device, dtype, max_num_seqs, lambda: self._version)
        self.max_num_seqs = max_num_seqs
        self._version = -1
        self._waiting: dict[str, tuple[Prompt, Any]] = {}
        self._names: list[str] = []
        self._work: HFWork | None = None
        self._cancelled: set[str] = set()

    @property
    def version(self) -> int:
        """The training step of the weights; -1 for the checkpoint's."""
        return self._version

    def submit(self, name: str, prompt: Prompt, sampling_params: Any) -> None:
        """Queue one prompt for the next batch; what is wrong with it is said now."""
        self._sampler.begin([prompt], sampling_params)
        self._waiting[name] = (prompt, sampling_params)

    def poll(self) -> list[Finished]:
        """Go on with the batch at hand for a slice; begin one where there is none."""
        if self._work is None:
            self._begin()
        if self._work is None:
            return []
        self._work.step()
        if not self._work.is_finished:
            return []
        answers, names, cancelled = self._work.answers(), self._names, self._cancelled
        self._work, self._names, self._cancelled = None, [], set()
        return [
            Finished(name, completions[0].prompt_token_ids, [_written(each) for each in completions])
            for name, completions in zip(names, answers, strict=True)
            if name not in cancelled
        ]

    def cancel(self, names: Iterable[str]) -> None:
        """Take prompts out of the queue; what is being written is finished and thrown away."""
        for name in names:
            self._waiting.pop(name, None)
            self._cancelled.add(name)
        if self._cancelled.issuperset(self._names):
            self._work, self._names, self._cancelled = None, [], set()

    def connect(self, manifest: Sequence[TensorSpec], arena_path: str | None, part: str) -> Layout:
        """Give every parameter a slot in the arena.

        Raises:
            WeightMismatch: The model has other parameters.
            EngineError: Adapters were asked for.
        """
        if part != "base":
            raise EngineError("transformers takes no adapters over here: use lora_mode='merged'.")
        require_same(manifest, self._sampler.manifest)
        tensors = self._sampler.tensors()
        num_bytes, slots = plain_slots(manifest, lambda name: dtype_name(tensors[name].dtype))
        layout = Layout(arena_path or path_of(reserve(num_bytes)), num_bytes, slots, num_bytes)
        self._arena, self._slots = Arena.open(layout.path, num_bytes), slots
        return layout

    def pause(self) -> None:
        """Do nothing: without `poll` nothing is written."""

    def load(
        self, version: int, checksums: Sequence[int] | None, swapped: Sequence[str], recompute: bool
    ) -> float:
        """Copy the arena into the model, and prove it where that is asked for."""
        start = time.perf_counter()
        tensors = self._sampler.tensors()
        for slot in self._slots:
            tensors[slot.name].data.copy_(self._arena.view(slot))
        if checksums is not None:
            sums = [checksum(tensors[slot.name].data, word_bytes=slot.word_bytes) for slot in self._slots]
            wrong = [
                slot.name
                for slot, mine, sent in zip(self._slots, sums, checksums, strict=True)
                if mine != sent
            ]
            if wrong:
                raise ChecksumMismatch(
                    f"after the update {len(wrong)} of {len(sums)} tensors are not those that the trainer sent: "
                    f"{wrong[:8]}."
                )
        if recompute and self._work is not None:
            self._work.recompute()
        self._version = version
        return time.perf_counter() - start

    def resume(self) -> None:
        """Do nothing: the next `poll` goes on."""

    def drop(self, parts: Parts, asleep: Parts) -> None:
        """Free the weights' memory; caches live no longer than the requests that need them."""
        if "weights" in parts:
            self._sampler.drop()

    def restore(self, parts: Parts) -> None:
        """Take the weights' memory back, with nothing in it."""
        if "weights" in parts:
            self._sampler.restore()

    def close(self) -> None:
        """Do nothing: all of it ends with the process."""

    def _begin(self) -> None:
        names = list(self._waiting)[: self.max_num_seqs]
        if names:
            chosen = [self._waiting.pop(name) for name in names]
            self._names = names
            self._work = self._sampler.begin([prompt for prompt, _ in chosen], [each for _, each in chosen])


def _written(completion: Completion) -> Written:
    return Written(
        completion.token_ids,
        completion.sampler_logprobs or None,
        completion.versions,
        completion.text,
        completion.finish_reason,
    )
