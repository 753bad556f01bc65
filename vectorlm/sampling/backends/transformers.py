"""The backend for transformers, and the pattern for your own backends."""

from __future__ import annotations

import secrets
import traceback
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from vectorlm.algorithms.logprobs import compute_head_in_float32
from vectorlm.errors import EngineError
from vectorlm.sampling.backends.generation import (
    NUM_PROBED,
    PROBES,
    Batch,
    Detokenizer,
    SequenceState,
    computes_alike,
    read_parameters,
)
from vectorlm.sampling.contract import RequestOutput
from vectorlm.sampling.weights.copy_list import PlainWeights
from vectorlm.sampling.weights.model_size import auto_class
from vectorlm.sampling.weights.model_tensors import trainer_tensors
from vectorlm.sampling.weights.module_source import manifest_of
from vectorlm.sampling.weights.plan import Layout, TensorSpec, dtype_of, require_same

LOGPROBS_MODES = ("processed_logprobs", "raw_logprobs")
"""Log-probabilities of the sampling distribution, or of the model; the names are vLLM's."""


class Transformers:
    """A `Backend` that continues prompts with ``transformers``, one batch at a time; an update copies the arena."""

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
        fp32_head: bool = False,
        tokenizer: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Load the model.

        Args:
            model: A folder written by ``save_pretrained``.
            receiver: `live` or `auto`.
            dtype: The precision, such as ``bfloat16``.
            max_num_seqs: Largest number of completions in a batch. The engine uses 1 if the model's results depend on
                the batch.
            logprobs_mode: `processed_logprobs` returns log-probabilities of the sampling distribution, `raw_logprobs`
                the model's own, before penalties, temperature and cuts.
            max_model_len: Longest sequence, prompt and completion together, in tokens; the model's limit if omitted.
            device: The device of the model; if omitted the first CUDA device, else the CPU.
            fp32_head: Whether to compute logits in float32.
            tokenizer: The folder of the tokenizer; the model's if omitted.
            trust_remote_code: Whether to run the Python files of a model that brings its own.

        Raises:
            EngineError: The folder or a tensor of the model is missing, an argument is not supported, or the model
                computes something else in slices.
        """
        if receiver == "packed":
            raise EngineError("receiver='packed' needs vLLM. Use 'live' or 'auto' with transformers.")
        if logprobs_mode not in LOGPROBS_MODES:
            raise EngineError(
                f"logprobs_mode={logprobs_mode!r}: with transformers it must be one of {', '.join(LOGPROBS_MODES)}."
            )
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.model = _load(model, dtype, trust_remote_code).to(device).eval()
        if fp32_head:
            compute_head_in_float32(self.model.get_output_embeddings())
        self._tokenizer = Detokenizer(tokenizer or model, self.model, trust_remote_code=trust_remote_code)
        # Otherwise `generate` would apply the folder's sampling defaults.
        self.model.generation_config = type(self.model.generation_config)()
        self._context_length = _context_length(self.model.config.get_text_config(), max_model_len)
        self.vocab_size: int = self.model.get_input_embeddings().num_embeddings
        self._manifest = manifest_of(self.model)
        self._weights = PlainWeights()
        self._requests: dict[str, list[SequenceState]] = {}
        self._waiting: deque[SequenceState] = deque()
        self._batch: Batch | None = None
        self._are_raw = logprobs_mode == "raw_logprobs"
        self.max_num_seqs, self._keeps_cache = self._working_batches(max_num_seqs)
        self.version = -1
        self.progress = 0

    def submit(self, name: str, prompt: Sequence[int], sampling_params: Any) -> None:
        """Queue one prompt; it joins the next batch."""
        parameters, ids = read_parameters(sampling_params), tuple(prompt)
        if not ids:
            raise EngineError("a prompt must have at least one token.")
        num_left = self._context_length - len(ids)
        if num_left < 1:
            raise EngineError(
                f"a prompt has {len(ids)} tokens: the engine holds {self._context_length}, the completion included. "
                "Shorten the prompt, or raise max_model_len."
            )
        seed = secrets.randbits(64) if parameters.seed in (None, -1) else parameters.seed
        limit = min(num_left, parameters.max_tokens or num_left)
        self._requests[name] = [
            SequenceState(ids, parameters, f"{seed}/{index}", limit, self._tokenizer)
            for index in range(parameters.n)
        ]
        self._waiting.extend(self._requests[name])

    def poll(self) -> list[RequestOutput]:
        """Sample one slice of the batch, or start a batch; return the requests that have ended."""
        if self._batch is None and self._waiting:
            size = min(self.max_num_seqs, len(self._waiting))
            sequences = [self._waiting.popleft() for _ in range(size)]
            self._batch = Batch(self.model, sequences, self._are_raw, self._keeps_cache)
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
            name: states
            for name, states in self._requests.items()
            if all(state.has_ended for state in states)
        }
        self._requests = {name: states for name, states in self._requests.items() if name not in ended}
        return [
            RequestOutput(name, [state.completion() for state in states]) for name, states in ended.items()
        ]

    def cancel(self, names: Iterable[str]) -> None:
        """Forget requests; their sequences in the batch end."""
        for name in names:
            for sequence in self._requests.pop(name, ()):
                sequence.finish_reason = "abort"
        self._waiting = deque(state for state in self._waiting if not state.has_ended)
        if self._batch is not None and self._batch.has_ended:
            self._batch = None

    def connect(self, manifest: Sequence[TensorSpec], arena_path: str | None, weight_set: str) -> Layout:
        """Give every parameter a slot in the arena."""
        by_name = attrgetter("name")
        require_same(sorted(manifest, key=by_name), sorted(self._manifest, key=by_name))
        return self._weights.connect(manifest, arena_path, weight_set, trainer_tensors(self.model))

    def pause(self) -> None:
        """Do nothing: only `poll` samples."""

    def load(
        self, version: int, checksums: Sequence[int] | None, weight_sets: Sequence[str], recompute: bool
    ) -> float:
        """Copy the arena into the model and compare checksums."""
        load_s = self._weights.load(checksums, trainer_tensors(self.model))
        if recompute and self._batch is not None:
            self._batch.forget_cache()
        self.version = version
        return load_s

    def resume(self) -> None:
        """Do nothing: the next `poll` continues."""

    def sleep(self, parts: frozenset[str], asleep: frozenset[str]) -> None:
        """Free the weights' memory; KV caches are freed with their requests."""
        if "weights" in parts:
            for tensor in trainer_tensors(self.model).values():
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def wake_up(self, parts: frozenset[str]) -> None:
        """Allocate the weights' memory again, uninitialised."""
        if "weights" in parts:
            tensors = trainer_tensors(self.model)
            for spec in self._manifest:
                tensor = tensors[spec.name]
                tensor.data = torch.empty(spec.shape, dtype=tensor.dtype, device=tensor.device)

    def close(self) -> None:
        """Close the arena."""
        self._weights.close()

    def _working_batches(self, size: int) -> tuple[int, bool]:
        """Return the size of batches, and whether slices keep their cache, with the results of single prompts."""
        if min(self._context_length, self.vocab_size) < max(map(len, PROBES)) + NUM_PROBED:
            return size, True
        for way in ((size, True), (size, False), (1, False)):
            if computes_alike(self.model, together=way[0] > 1, keeps_cache=way[1]):
                break
        else:
            raise EngineError(
                f"{type(self.model).__name__} cannot be sampled with transformers: its cache gives other "
                "probabilities than a pass over all tokens. Use vLLM."
            )
        if way[0] < size:
            warnings.warn(
                f"{type(self.model).__name__} computes other probabilities in padded batches than alone: the engine "
                "samples one completion at a time. Use vLLM if this is too slow.",
                stacklevel=3,
            )
        return way

    def _fail_batch(self, batch: Batch, error: Exception) -> list[RequestOutput]:
        """Fail the requests of a batch that raised; others continue."""
        failure = EngineError(f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}")
        lost = set(batch.sequences)
        names = [name for name, states in self._requests.items() if not lost.isdisjoint(states)]
        self._batch = None
        self.cancel(names)
        return [RequestOutput(name, (), error=failure) for name in names]


def _context_length(config: Any, max_model_len: int | None) -> int:
    """Return the longest sequence; a model with recurrence or ALiBi may have no limit of its own."""
    own = [getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len")]
    # XLNet's limit is -1.
    limits = [length for length in (*own, max_model_len) if length is not None and length > 0]
    if not limits:
        raise EngineError(
            f"max_model_len={max_model_len}: a {config.model_type} model needs a limit, because its config.json has "
            "none. Pass the longest sequence in tokens, such as max_model_len=2048."
        )
    return min(limits)


def _load(model_path: str, dtype: str, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    if not (Path(model_path) / "config.json").is_file():
        raise EngineError(
            f"model={model_path!r} has no config.json. Pass a folder written by save_pretrained."
        )
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    load: Any = auto_class(config).from_pretrained
    model, info = load(
        model_path, dtype=dtype_of(dtype), output_loading_info=True, trust_remote_code=trust_remote_code
    )
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:5])
        raise EngineError(
            f"model={model_path!r}: its files must hold all tensors of the model; missing: {missing}."
        )
    return model
