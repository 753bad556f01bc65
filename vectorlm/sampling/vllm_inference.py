"""vLLM in the sampler's own process, as an `Inference`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vectorlm.contracts import Finished, Written
from vectorlm.errors import EngineError
from vectorlm.sampling.bed import make_bed
from vectorlm.sampling.parts import SwappedParts
from vectorlm.sampling.rest import Parts
from vectorlm.sampling.version_spans import VersionSpans
from vectorlm.sampling.vllm_shim import (
    build_engine,
    let_seeded_requests_wait,
    make_prompt,
    make_sampling_params,
)
from vectorlm.sampling.warm_up import naming_the_model, warm_up
from vectorlm.sampling.workers import Workers
from vectorlm.types import Prompt
from vectorlm.weights.pack import keep_plain_weights
from vectorlm.weights.plan import Layout, TensorSpec


class VLLM:
    """Owns a ``vllm.LLMEngine``, whose step loop is `poll`: what is done between polls is done between steps."""

    def __init__(self, model: str, *, receiver: str, **engine_args: Any) -> None:
        """Build the engine and sample one token with it.

        Args:
            model: A Hugging Face model folder.
            receiver: How the engine shall hold weights on CPU: `live`, `packed` or `auto`.
            **engine_args: ``vllm.EngineArgs``.

        Raises:
            EngineError: vLLM cannot run this model here; the text says why.
        """
        import torch

        on_cpu = not torch.cuda.is_available()
        if on_cpu:
            keep_plain_weights()
            let_seeded_requests_wait()
        with naming_the_model(model):
            self._engine = build_engine(model, engine_args, on_cpu)
            self._workers = Workers()
            self._parts = SwappedParts(self._engine.collective_rpc, bool(engine_args.get("enable_lora")))
            self._receiver = self._parts.prepare(receiver)
            warm_up(self._engine)
        self._bed = make_bed(self._engine, on_cpu)
        self._version = -1
        self._num_loads = 0
        self._spans = VersionSpans()

    @property
    def receiver(self) -> str:
        """How the engine holds weights: `live` or `packed`."""
        return self._receiver

    @property
    def max_num_seqs(self) -> int:
        """Sequences that the engine samples from at a time."""
        num_sequences: int = self._engine.vllm_config.scheduler_config.max_num_seqs
        return num_sequences

    @property
    def version(self) -> int:
        """The training step of the weights; -1 for the checkpoint's."""
        return self._version

    def submit(self, name: str, prompt: Prompt, sampling_params: Any) -> None:
        """Add one request."""
        params = make_sampling_params(sampling_params)
        request = make_prompt(self._engine, prompt)
        # Blocks of other weights are never found, however long requests of theirs keep them.
        request["cache_salt"] = f"weights {self._num_loads}"
        self._engine.add_request(name, request, params, lora_request=self._parts.adapter_request)

    def poll(self) -> list[Finished]:
        """Take one engine step."""
        try:
            outputs = self._engine.step()
        except Exception:
            self._workers.let_the_dead_be_named()
            raise
        return [
            finished(output, self._spans.of(output, self._version)) for output in outputs if output.finished
        ]

    def cancel(self, names: Iterable[str]) -> None:
        """Abort requests."""
        names = list(names)
        self._engine.abort_request(names)
        self._spans.forget(names)

    def connect(self, manifest: Sequence[TensorSpec], arena_path: str | None, part: str) -> Layout:
        """Match the trainer's tensors with the engine's."""
        return self._parts.connect(manifest, arena_path, part)

    def pause(self) -> None:
        """Do nothing: without `poll` there is no step."""

    def load(
        self, version: int, checksums: Sequence[int] | None, swapped: Sequence[str], recompute: bool
    ) -> float:
        """Take the new weights over, and leave the cache of the old ones."""
        load_s = self._parts.load(version, checksums, swapped)
        if not self._engine.has_unfinished_requests():
            if not self._engine.reset_prefix_cache():
                raise EngineError("the prefix cache still holds blocks of the old weights.")
        elif recompute:
            self._engine.reset_prefix_cache(reset_running_requests=True)
        self._spans.close(self._engine, self._version)
        self._version = version
        self._num_loads += 1
        return load_s

    def resume(self) -> None:
        """Do nothing: the next `poll` goes on."""

    def drop(self, parts: Parts, asleep: Parts) -> None:
        """Give device memory away."""
        self._bed.drop(parts, asleep)

    def restore(self, parts: Parts) -> None:
        """Take device memory back."""
        self._bed.restore(parts)

    def close(self) -> None:
        """End the workers of a parallel engine."""
        self._workers.end()


def finished(output: Any, versions: Sequence[Sequence[int]]) -> Finished:
    """Return vLLM's finished ``RequestOutput`` as the contract has it, with the versions of its tokens."""
    completions = [
        Written(each.token_ids, _sampled_logprobs(each), spans, each.text, each.finish_reason)
        for each, spans in zip(output.outputs, versions, strict=True)
    ]
    return Finished(output.request_id, output.prompt_token_ids, completions, raw=output)


def _sampled_logprobs(completion: Any) -> list[float] | None:
    if completion.logprobs is None:
        return None
    pairs: Iterable[tuple[int, Mapping[int, Any]]] = zip(
        completion.token_ids, completion.logprobs, strict=True
    )
    return [candidates[token].logprob for token, candidates in pairs]
