"""An engine made of transformers alone: greedy decoding with its own copy of the weights, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vectorlm.model.load import load_model, load_tokenizer
from vectorlm.types import Completion, UpdateReport


class PlainEngine:
    """Answers with at most four tokens."""

    def __init__(self, model_dir: Path) -> None:
        self._model = load_model(model_dir).eval()
        self._tokenizer = load_tokenizer(model_dir)
        self.version = -1

    def update(self, model: torch.nn.Module, train_step: int) -> UpdateReport:
        """Copy every weight."""
        if train_step == self.version:
            return UpdateReport(train_step, True, 0, 0.0, 0.0, 0.0)
        own = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                own[name].copy_(whole)
        self.version = train_step
        return UpdateReport(train_step, False, 0, 0.1, 0.2, 0.3)

    def sample(self, prompts: Any, sampling_params: Any = None) -> list[list[Completion]]:
        """Continue each prompt by itself."""
        return [[self._complete(prompt)] for prompt in prompts]

    def _complete(self, prompt: str) -> Completion:
        inputs = self._tokenizer(prompt, return_tensors="pt")
        rest = self._model.generate(**inputs, max_new_tokens=4, do_sample=False)[
            0, inputs.input_ids.shape[1] :
        ]
        ids, prompt_ids = rest.tolist(), inputs.input_ids[0].tolist()
        text = self._tokenizer.decode(ids).replace(" ", "")
        return Completion(tuple(prompt_ids), tuple(ids), (), (self.version,) * len(ids), text, "length")
