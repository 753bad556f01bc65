"""Proofs that an engine holds a model's weights, and that updates do what a start does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from vectorlm.errors import ConfigError, WeightMismatch
from vectorlm.ranks.engine_ranks import results_or_first_error
from vectorlm.sampling.backends.server.client import ScoringServer
from vectorlm.sampling.backends.server.serve import TOKEN_VARIABLE
from vectorlm.sampling.backends.vllm.extension import WeightExtension
from vectorlm.sampling.testing.subject import GREEDY, PROMPTS, SAMPLED, EngineUnderTest
from vectorlm.sampling.weights.model_tensors import adapter_prefixes, trainer_tensors
from vectorlm.sampling.weights.module_source import manifest_of
from vectorlm.sampling.weights.plan import TensorSpec
from vectorlm.sampling.weights.receive import WorkerSums, require_same_weights, tensor_sum
from vectorlm.types import Engine

SENT_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes in which an engine may hold a tensor."""

EXTENSION = "vectorlm.sampling.backends.server.extension.ServerExtension"
HOW = f"start it with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls {EXTENSION}"

ROWS, ROW_TOKENS = 4, 64
"""Number and length of the texts for a server without checksums; random tokens use many embeddings."""

ROUNDINGS = 4.0
"""Largest difference of log-probabilities of equal weights, in units of the rounding to bfloat16."""


def verify_server(url: str, load: Callable[[], torch.nn.Module]) -> str:
    """Prove that a vLLM server holds the weights of a whole transformers model; return a description of the proof.

    `load` is called after the server has answered, and returns the model. If the server has our extension, checksums of
    all tensors are compared; otherwise log-probabilities of some texts, which do not show changes below rounding.
    ``VECTORLM_SERVER_TOKEN`` holds the server's token or API key.

    Raises:
        ConfigError: The model has adapters besides its weights.
        WeightMismatch: The server holds other weights, or another model; the text names the tensors.
        EngineError: The server does not answer.
    """
    server = ScoringServer(url, token_variable=TOKEN_VARIABLE)
    max_tokens = server.max_model_len()
    model = load()
    if adapter_prefixes(model):
        raise ConfigError(
            "the model has adapters, which cannot be compared: return model.merge_and_unload() instead."
        )
    manifest, tensors = manifest_of(model), trainer_tensors(model)
    try:
        held = server.parameter_sums(manifest)
        if held is None:
            return _by_logprobs(server, model, min(ROW_TOKENS, max_tokens - 1))
        dtypes = require_same_weights(manifest, lambda name, dtype: tensor_sum(tensors[name], dtype), held)
    except WeightMismatch as error:
        raise type(error)(f"at {url}: {error}") from error
    kinds = ", ".join(sorted({*dtypes.values()}))
    return (
        f"the same weights, proven by the checksums of all {len(dtypes)} tensors, which it holds in {kinds}"
    )


@torch.no_grad()
def _by_logprobs(server: ScoringServer, model: Any, num_tokens: int) -> str:
    size = model.get_input_embeddings().num_embeddings
    ids = torch.randint(size, (ROWS, num_tokens), generator=torch.Generator().manual_seed(0))
    there = torch.tensor(server.logprobs(ids.tolist()))[:, 1:]
    model.eval()
    exact, rounded = (_logprobs(model.to(dtype), ids) for dtype in (torch.float32, torch.bfloat16))
    distance, rounding = ((exact - other).abs().mean().item() for other in (there, rounded))
    found = (
        f"the log-probabilities of {there.numel()} tokens differ by {distance:.2g} in the mean, where rounding to "
        f"bfloat16 makes {rounding:.2g}"
    )
    if not distance <= ROUNDINGS * rounding:
        raise WeightMismatch(f"the server computes with other weights: {found}.")
    limit = "A smaller change of the weights would not show"
    return f"probably the same weights, and not proven: {found}. {limit}. For checksums {HOW}"


def _logprobs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logprobs = model(ids).logits[:, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, ids[:, 1:, None])[..., 0]


def verify_updates(model: str, start: Callable[[str], AbstractContextManager[Engine]]) -> str:
    """Prove that an update does what a start with the new weights does; return a description of the proof.

    The model plus noise is sent to a running engine; then another engine starts with it. Both must return tokens and
    log-probabilities with the same bits. Unlike checksums of weights, this covers what an engine computes from them
    when it loads them, and it needs no other implementation of the model.

    Args:
        model: The model's folder.
        start: Starts an engine with the model of a folder.

    Raises:
        WeightMismatch: The engines differ, or the update changed nothing.
        VectorLMError: As `Engine.update`.
    """
    with start(model) as engine:
        subject = EngineUnderTest(engine, model)
        sent, plain = subject.models()
        before = _answers(engine)
        engine.update(sent, 0)
        found = _answers(engine)
        del sent
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    with subject.saved(plain) as folder, start(folder) as fresh:
        expected = _answers(fresh)
    if found == before:
        raise WeightMismatch("the update changed no answer of the engine, so its weights have not arrived.")
    differ = sum(ours != theirs for ours, theirs in zip(found, expected, strict=True))
    if differ:
        raise WeightMismatch(
            f"after an update, {differ} of {len(found)} answers differ from the answers of a fresh engine with the "
            "same weights. Do not train with this model and these engine arguments: the rollouts would be wrong."
        )
    return (
        f"the same bits as a fresh engine in {len(found)} answers, {sum(len(ids) for ids, _ in found)} tokens"
    )


def _answers(engine: Engine) -> list[tuple[Sequence[int], Sequence[float]]]:
    sampled = [engine.sample(PROMPTS, {**how, "logprobs": 0}) for how in (GREEDY, SAMPLED)]
    return [
        (completion.token_ids, completion.sampler_logprobs)
        for answers in sampled
        for (completion,) in answers
    ]


def verify_each_sync(trainer: Any) -> None:
    """Let a TRL trainer (1.16) prove after each weight sync that vLLM holds the sent weights; call it before training.

    >>> verify_each_sync(trainer)  # doctest: +SKIP

    With ``vllm_mode="server"`` the server needs `EXTENSION` as its ``--worker-extension-cls``.

    Raises:
        ConfigError: The trainer generates without vLLM.
        ChecksumMismatch: In training: a tensor is not what was sent, or nothing was sent for one; the text names it.
    """
    generation: Any = getattr(trainer, "vllm_generation", None)
    if generation is None:
        raise ConfigError("the trainer generates without vLLM: set use_vllm=True.")
    sync, iterate = generation.sync_weights, generation._iter_named_params
    sent: dict[str, tuple[TensorSpec, dict[str, int]]] = {}

    def noted() -> Iterator[tuple[str, torch.Tensor]]:
        """Note the tensors as they are sent: adapters are merged into the weights only during a sync."""
        sent.clear()
        for name, tensor in iterate():
            sums = {dtype: tensor_sum(tensor, dtype) for dtype in SENT_DTYPES}
            sent[name] = TensorSpec(name, tuple(tensor.shape)), sums
            yield name, tensor

    def proven_sync() -> None:
        sync()
        manifest = [spec for spec, _ in sent.values()]
        held: Sequence[WorkerSums] | None
        if generation.mode == "colocate":
            worker: Any = WeightExtension()
            worker.model_runner = generation.llm.llm_engine.model_executor.driver_worker.model_runner
            results = [worker.vectorlm_parameter_sums(manifest)]
            if generation.tensor_parallel_size > 1:
                results *= generation.tensor_parallel_size
                dist.all_gather_object(results, results[0], group=generation.tp_group)
            held = results_or_first_error(results)
        elif generation.accelerator.is_main_process:
            held = ScoringServer(generation.vllm_client.base_url).parameter_sums(manifest)
            if held is None:
                raise ConfigError(
                    f"the server at {generation.vllm_client.base_url} gives no checksums: {HOW}."
                )
        else:
            return
        require_same_weights(manifest, lambda name, dtype: sent[name][1].get(dtype), held)

    generation._iter_named_params, generation.sync_weights = noted, proven_sync
