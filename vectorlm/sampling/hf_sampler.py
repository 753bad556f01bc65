"""A transformers model that samples, in rank 0's own process."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vectorlm.errors import EngineError
from vectorlm.sampling.decoding import Decoding
from vectorlm.sampling.parameters import Parameters, read_each
from vectorlm.sampling.requests import Answers
from vectorlm.sampling.row import Row
from vectorlm.sampling.vocabulary import Vocabulary
from vectorlm.types import Prompt
from vectorlm.weights.plan import dtype_of, manifest_of, trainer_tensors
from vectorlm.weights.whole import copy_whole, require_no_adapters, require_same


class HFSampler:
    """The model, its tokens, and its weights' comings and goings."""

    def __init__(
        self, model_path: str | Path, device: str, dtype: str, batch_size: int, version: Callable[[], int]
    ) -> None:
        """Load the model.

        Args:
            model_path: A folder written by ``save_pretrained``.
            device: Where it computes.
            dtype: Its precision, as torch spells it.
            batch_size: Completions that are continued together.
            version: Says which weights the model holds.

        Raises:
            EngineError: The folder or a tensor of the model is missing.
        """
        from transformers import GenerationConfig

        self._model = _load(model_path, dtype).to(device).eval()
        self._vocabulary = Vocabulary.of(model_path, self._model)
        # What the folder says about sampling would be mixed into every call; a caller's parameters are all there is.
        self._model.generation_config = GenerationConfig()
        self._context_length: int = self._model.config.get_text_config().max_position_embeddings
        self._batch_size = batch_size
        self._version = version
        self.manifest = manifest_of(self._model)
        """The model's parameters."""

    def tensors(self) -> dict[str, torch.nn.Parameter]:
        """Return the model's parameters by their names in the manifest."""
        return trainer_tensors(self._model)

    def begin(self, prompts: Sequence[Prompt], sampling_params: Any) -> HFWork:
        """Make the rows of one batch; raises where a prompt or a parameter is wrong."""
        parameters = read_each(sampling_params, len(prompts))
        rows = [self._rows(prompt, each) for prompt, each in zip(prompts, parameters, strict=True)]
        return HFWork(self._model, rows, self._batch_size, self._version)

    def check(self, model: torch.nn.Module) -> None:
        """Raise `WeightMismatch` unless the weights of `model` can be taken over."""
        require_no_adapters(model)
        require_same(manifest_of(model), self.manifest)

    def replace(self, model: torch.nn.Module) -> int:
        """Take the weights of `model` over; return the bytes replaced."""
        return copy_whole(model, self.tensors())

    def drop(self) -> None:
        """Free the weights' memory."""
        for tensor in self.tensors().values():
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Take the weights' memory back, with nothing in it."""
        tensors = self.tensors()
        for spec in self.manifest:
            tensor = tensors[spec.name]
            tensor.data = torch.empty(spec.shape, dtype=tensor.dtype, device=tensor.device)

    def _rows(self, prompt: Prompt, parameters: Parameters) -> list[Row]:
        ids = self._vocabulary.encode(prompt)
        room = self._context_length - len(ids)
        if room < 1:
            raise EngineError(
                f"a prompt has {len(ids)} tokens: the model holds {self._context_length}, the completion included."
            )
        seed = secrets.randbits(64) if parameters.seed in (None, -1) else parameters.seed
        longest = min(room, parameters.max_tokens or room)
        return [
            Row(ids, parameters, f"{seed}/{index}", longest, self._vocabulary)
            for index in range(parameters.n)
        ]


class HFWork:
    """The rows of one batch of prompts, decoded some at a time."""

    def __init__(
        self, model: Any, rows: Sequence[Sequence[Row]], batch_size: int, version: Callable[[], int]
    ) -> None:
        self._model = model
        self._version = version
        self._rows = rows
        flat = [row for group in rows for row in group]
        self._batches = [flat[start : start + batch_size] for start in range(0, len(flat), batch_size)]
        self._decoding: Decoding | None = None

    @property
    def is_finished(self) -> bool:
        """Whether every completion has ended."""
        return not self._batches

    def step(self) -> None:
        """Sample the next slice of the batch at hand."""
        if self._decoding is None:
            self._decoding = Decoding(self._model, self._batches[0], self._version)
        self._decoding.step()
        if self._decoding.is_finished:
            self._decoding = None
            self._batches.pop(0)

    def recompute(self) -> None:
        """Forget the cache of the batch at hand."""
        if self._decoding is not None:
            self._decoding.forget_cache()

    def answers(self) -> Answers:
        """Return the completions of each prompt."""
        return [[row.completion() for row in group] for group in self._rows]


def _load(model_path: str | Path, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM

    if not (Path(model_path) / "config.json").is_file():
        raise EngineError(
            f"{str(model_path)!r} has no config.json: it must be a folder written by save_pretrained."
        )
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=dtype_of(dtype), output_loading_info=True
    )
    model, info = loaded
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:5])
        raise EngineError(f"{str(model_path)!r} lacks tensors of its model: {missing}.")
    return model
