"""transformers as a `Backend`: a pattern for engines other than vLLM."""

from __future__ import annotations

import secrets
import traceback
from collections import deque
from collections.abc import Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from vectorlm.errors import EngineError
from vectorlm.sampling.backends.plain_weights import PlainWeights
from vectorlm.sampling.backends.transformers.generation import (
    Batch,
    Detokenizer,
    SequenceState,
    read_parameters,
)
from vectorlm.sampling.contract import RequestOutput
from vectorlm.sampling.weights.model_tensors import trainer_tensors
from vectorlm.sampling.weights.module_source import manifest_of
from vectorlm.sampling.weights.plan import Layout, TensorSpec, dtype_of, require_same

LOGPROBS_MODES = ("processed_logprobs", "raw_logprobs")
"""vLLM's names for what log-probabilities may be of: what was drawn from, or the model."""


class Transformers:
    """Continues prompts with ``transformers``, a batch at a time; weights are copied from the arena."""

    receiver = "live"

    def __init__(
        self,
        model: str,
        *,
        receiver: str,
        dtype: str = "float32",
        max_num_seqs: int = 64,
        logprobs_mode: str = "processed_logprobs",
        max_model_len: int | None = None,
        device: str | None = None,
    ) -> None:
        """Load the model.

        Args:
            model: A folder written by ``save_pretrained``.
            receiver: `live` or `auto`; there is nothing to pack.
            dtype: The precision, as torch spells it.
            max_num_seqs: Completions that are continued together.
            logprobs_mode: `processed_logprobs`: log-probabilities are of what was drawn from; `raw_logprobs`: of the
                model, before penalties, temperature and cuts.
            max_model_len: Longest prompt and completion together, in tokens; the model's own limit when omitted.
            device: Where it computes; when omitted the first CUDA device, if there is one.

        Raises:
            EngineError: The folder or a tensor of the model is missing, or an argument cannot be honoured.
        """
        if receiver == "packed":
            raise EngineError("receiver='packed' is vLLM's: transformers computes with plain weights.")
        if logprobs_mode not in LOGPROBS_MODES:
            raise EngineError(
                f"logprobs_mode={logprobs_mode!r} is not one of transformers': it must be one of "
                f"{', '.join(LOGPROBS_MODES)}."
            )
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.model = _load(model, dtype).to(device).eval()
        self._tokenizer = Detokenizer(model, self.model)
        # `generate` would mix the folder's sampling defaults into every call.
        self.model.generation_config = type(self.model.generation_config)()
        own_length: int = self.model.config.get_text_config().max_position_embeddings
        self._context_length = min(max_model_len or own_length, own_length)
        self.vocab_size: int = self.model.get_input_embeddings().num_embeddings
        self._manifest = manifest_of(self.model)
        self._weights = PlainWeights()
        self._requests: dict[str, list[SequenceState]] = {}
        self._waiting: deque[SequenceState] = deque()
        self._batch: Batch | None = None
        self._are_raw = logprobs_mode == "raw_logprobs"
        self.max_num_seqs = max_num_seqs
        self.version = -1
        self.progress = 0

    def submit(self, name: str, prompt: Sequence[int], sampling_params: Any) -> None:
        """Queue one prompt; it joins the next batch."""
        parameters, ids = read_parameters(sampling_params), tuple(prompt)
        if not ids:
            raise EngineError("a prompt has no tokens: there is nothing to continue.")
        room = self._context_length - len(ids)
        if room < 1:
            raise EngineError(
                f"a prompt has {len(ids)} tokens: the engine holds {self._context_length}, the completion included."
            )
        seed = secrets.randbits(64) if parameters.seed in (None, -1) else parameters.seed
        limit = min(room, parameters.max_tokens or room)
        self._requests[name] = [
            SequenceState(ids, parameters, f"{seed}/{index}", limit, self._tokenizer)
            for index in range(parameters.n)
        ]
        self._waiting.extend(self._requests[name])

    def poll(self) -> list[RequestOutput]:
        """Continue the batch for a slice, or begin one; return the requests that have ended."""
        if self._batch is None and self._waiting:
            size = min(self.max_num_seqs, len(self._waiting))
            self._batch = Batch(self.model, [self._waiting.popleft() for _ in range(size)], self._are_raw)
        if self._batch is None:
            return []
        self.progress += 1
        try:
            self._batch.sample_slice(self.version)
        except Exception as error:
            return self._fail_batch(self._batch, error)
        if self._batch.has_ended:
            self._batch = None
        ended = {
            name: states for name, states in self._requests.items() if all(each.has_ended for each in states)
        }
        self._requests = {name: states for name, states in self._requests.items() if name not in ended}
        return [RequestOutput(name, [each.completion() for each in states]) for name, states in ended.items()]

    def cancel(self, names: Iterable[str]) -> None:
        """Forget requests; their sequences in the batch end."""
        for name in names:
            for sequence in self._requests.pop(name, ()):
                sequence.finish_reason = "abort"
        self._waiting = deque(each for each in self._waiting if not each.has_ended)
        if self._batch is not None and self._batch.has_ended:
            self._batch = None

    def connect(self, manifest: Sequence[TensorSpec], arena_path: str | None, weight_set: str) -> Layout:
        """Give every parameter a slot in the arena."""
        by_name = attrgetter("name")
        require_same(sorted(manifest, key=by_name), sorted(self._manifest, key=by_name))
        return self._weights.connect(manifest, arena_path, weight_set, trainer_tensors(self.model))

    def pause(self) -> None:
        """Do nothing: without `poll` nothing is sampled."""

    def load(
        self, version: int, checksums: Sequence[int] | None, weight_sets: Sequence[str], recompute: bool
    ) -> float:
        """Copy the arena into the model, and compare checksums."""
        load_s = self._weights.load(checksums, trainer_tensors(self.model))
        if recompute and self._batch is not None:
            self._batch.forget_cache()
        self.version = version
        return load_s

    def resume(self) -> None:
        """Do nothing: the next `poll` goes on."""

    def sleep(self, parts: frozenset[str], asleep: frozenset[str]) -> None:
        """Free the weights' memory; KV caches end with their requests."""
        if "weights" in parts:
            for tensor in trainer_tensors(self.model).values():
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def wake_up(self, parts: frozenset[str]) -> None:
        """Take the weights' memory back, uninitialised."""
        if "weights" in parts:
            tensors = trainer_tensors(self.model)
            for spec in self._manifest:
                tensor = tensors[spec.name]
                tensor.data = torch.empty(spec.shape, dtype=tensor.dtype, device=tensor.device)

    def close(self) -> None:
        """Close the arena."""
        self._weights.close()

    def _fail_batch(self, batch: Batch, error: Exception) -> list[RequestOutput]:
        """End the requests of a batch that raised; the others go on."""
        failure = EngineError(f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}")
        lost = set(batch.sequences)
        names = [name for name, states in self._requests.items() if not lost.isdisjoint(states)]
        self._batch = None
        self.cancel(names)
        return [RequestOutput(name, (), error=failure) for name in names]


def _load(model_path: str, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM

    if not (Path(model_path) / "config.json").is_file():
        raise EngineError(
            f"{model_path!r} has no config.json: it must be a folder written by save_pretrained."
        )
    load: Any = AutoModelForCausalLM.from_pretrained
    model, info = load(model_path, dtype=dtype_of(dtype), output_loading_info=True)
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:5])
        raise EngineError(f"{model_path!r} lacks tensors of its model: {missing}.")
    return model
