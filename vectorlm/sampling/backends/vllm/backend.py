"""vLLM in the sampler's own process, as a `Backend`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from vectorlm.errors import EngineError
from vectorlm.sampling.backends.vllm.shim import (
    CudaSleep,
    adapt_to_cpu,
    build_engine,
    finish_steps,
    make_sampling_params,
    naming_the_model,
    warm_up,
)
from vectorlm.sampling.backends.vllm.workers import Workers, shorten_socket_paths, start_worker
from vectorlm.sampling.contract import RequestOutput
from vectorlm.sampling.weights.lora_receive import adapter_request
from vectorlm.sampling.weights.receive import EngineReceiver
from vectorlm.types import Completion

prepare_process = shorten_socket_paths
__all__ = ["VLLM", "prepare_process", "start_worker"]


class VLLM:
    """Owns a ``vllm.LLMEngine``. Its step loop is `poll`: what is done between polls is done between steps."""

    transports = ("push", "bucketed", "pull")

    def __init__(self, model: str, *, receiver: str, **engine_args: Any) -> None:
        """Build the engine and sample one token with it; raise `EngineError` where vLLM cannot run the model here."""
        import torch
        from torch import distributed

        # It would take over the threads of a rank, and hang where the ranks have a process group.
        has_ranks = distributed.is_initialized() and distributed.get_world_size() > 1
        if has_ranks or os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
            raise EngineError(
                "channel='inline' does not work with vLLM: it cannot sample in the process of a rank. Use "
                "channel='process', or inference='transformers'."
            )
        on_cpu = not torch.cuda.is_available()
        adapt_to_cpu()
        with naming_the_model(model):
            self._engine = build_engine(model, engine_args, on_cpu)
            self._workers = Workers(self._engine.vllm_config.parallel_config.world_size)
            self._receiver = EngineReceiver(self._engine.collective_rpc, receiver)
            # They keep this part of the contract.
            self.connect, self.open_handles = self._receiver.connect, self._receiver.open_handles
            self.copy_round = self._receiver.copy_round
            # From the start, so that requests in flight follow the first adapter too; it is zero until then.
            self._adapter_request = adapter_request() if engine_args.get("enable_lora") else None
            warm_up(self._engine)
        self.receiver = self._receiver.kind
        config = self._engine.vllm_config
        self.max_num_seqs: int = config.scheduler_config.max_num_seqs
        self.vocab_size: int = config.model_config.get_vocab_size()
        self._device_sleep = None if on_cpu else CudaSleep(self._engine)
        self.progress = 0
        self.version = -1
        self._num_loads = 0
        self._asleep: frozenset[str] = frozenset()
        self._may_hold_nan = False
        """Whether blocks of the KV cache may hold NaN: where attention masks a NaN, the product is NaN again."""
        self._spans = VersionSpans()
        self._texts = Texts(self._engine.output_processor.tokenizer)
        self._told: dict[str, tuple[int, int]] = {}
        """Of each request that is streamed, the tokens and characters that were told."""
        self._finished: list[RequestOutput] = []
        """Found while the engine was paused; the next `poll` returns them."""

    def submit(self, name: str, prompt: Sequence[int], sampling_params: Any) -> None:
        """Add one request, whose text is decoded when it has ended."""
        params = make_sampling_params(sampling_params)
        self._texts.take_over(name, params)
        self._add(name, prompt, params)

    def submit_streamed(self, name: str, prompt: Sequence[int], sampling_params: Any) -> None:
        """Add one request, whose text vLLM decodes as it is sampled: the same text."""
        params = make_sampling_params(sampling_params, is_streamed=True)
        self._told[name] = 0, 0
        self._add(name, prompt, params)

    def submit_raw(self, name: str, prompt: Sequence[int], sampling_params: Any) -> None:
        """Add one request, whose `raw` will hold all that vLLM reports: strings of single tokens, too."""
        self._add(name, prompt, make_sampling_params(sampling_params))

    def _add(self, name: str, prompt: Sequence[int], params: Any) -> None:
        # Blocks of other weights are never found, however long requests of theirs keep them.
        request = {"prompt_token_ids": list(prompt), "cache_salt": f"weights {self._num_loads}"}
        self._engine.add_request(name, request, params, lora_request=self._adapter_request)

    def poll(self) -> list[RequestOutput]:
        """Take one engine step."""
        self.progress += self._engine.has_unfinished_requests()
        try:
            outputs = self._engine.step()
        except Exception:
            self._workers.let_the_dead_be_named()
            raise
        found, self._finished = self._finished + self._finished_of(outputs), []
        return found

    def cancel(self, names: Iterable[str]) -> None:
        """Abort requests."""
        names = list(names)
        self._engine.abort_request(names)
        self._spans.forget(names)
        self._texts.forget(names)
        for name in names:
            self._told.pop(name, None)

    def pause(self) -> None:
        """Wait until no step runs on the device; no other begins, as the engine steps in `poll` alone."""
        if self._device_sleep is not None:
            # On CPU no step is ahead, and an empty one could change the order of rows in vLLM's batch.
            self._finished += self._finished_of(finish_steps(self._engine))

    def load(
        self, version: int, checksums: Sequence[int] | None, weight_sets: Sequence[str], recompute: bool
    ) -> float:
        """Take the new weights over, and leave the cache of the old ones."""
        load_s = self._receiver.load(version, checksums, weight_sets)
        if not self._engine.has_unfinished_requests():
            if not self._engine.reset_prefix_cache():
                raise EngineError("the prefix cache still holds blocks of the old weights.")
        elif recompute or self._may_hold_nan:
            self._engine.reset_prefix_cache(reset_running_requests=True)
        # Embeddings of images, which vLLM finds by the image alone; a prompt that is half computed makes them again.
        self._engine.reset_encoder_cache()
        self._empty_kv_cache()
        self._spans.close(self._engine, self.version)
        self.version = version
        self._num_loads += 1
        return load_s

    def expect_nan(self) -> None:
        """Overwrite the whole KV cache at the next update."""
        self._may_hold_nan = True

    def resume(self) -> None:
        """Do nothing: the next `poll` goes on."""

    def sleep(self, parts: frozenset[str], asleep: frozenset[str]) -> None:
        """Give device memory away; on CPU, where vLLM has no sleep mode, forget what a sleeping KV cache would."""
        self.pause()
        if self._device_sleep is not None:
            self._device_sleep.sleep(parts, asleep)
        elif not self._engine.reset_prefix_cache():
            raise EngineError("the prefix cache cannot be emptied: requests are running.")
        self._asleep = parts | asleep

    def wake_up(self, parts: frozenset[str]) -> None:
        """Take device memory back."""
        if self._device_sleep is not None:
            self._device_sleep.wake_up(parts)
        self._asleep -= parts
        if "kv_cache" in parts:
            self._empty_kv_cache()

    def close(self) -> None:
        """End the workers of a parallel engine."""
        self._workers.end()

    def _empty_kv_cache(self) -> None:
        """Overwrite a KV cache that may hold NaN, once it is awake: memory that sleeps is not there."""
        if self._may_hold_nan and "kv_cache" not in self._asleep:
            self._receiver.empty_kv_cache()
            self._may_hold_nan = False

    def _finished_of(self, outputs: Iterable[Any]) -> list[RequestOutput]:
        found = []
        for output in outputs:
            if output.finished:
                self._texts.fill(output)
                self._told.pop(output.request_id, None)
                found.append(finished(output, self._spans.of(output, self.version)))
            elif output.request_id in self._told:
                found.append(self._part_of(output))
        self._may_hold_nan |= any(
            math.isnan(sum(each.sampler_logprobs)) for one in found for each in one.completions
        )
        return found

    def _part_of(self, output: Any) -> RequestOutput:
        (whole,) = output.outputs
        num_tokens, num_characters = self._told[output.request_id]
        self._told[output.request_id] = len(whole.token_ids), len(whole.text)
        token_ids = tuple(whole.token_ids[num_tokens:])
        logprobs = _sampled_logprobs(token_ids, whole.logprobs and whole.logprobs[num_tokens:])
        versions = (self.version,) * len(token_ids)
        part = Completion((), token_ids, logprobs, versions, whole.text[num_characters:], None)
        return RequestOutput(output.request_id, [part], is_part=True)


def finished(output: Any, versions: Sequence[Sequence[int]]) -> RequestOutput:
    """Return vLLM's finished ``RequestOutput`` as the contract has it, with the versions of its tokens."""
    prompt = tuple(output.prompt_token_ids)
    completions = [
        Completion(
            prompt,
            tuple(each.token_ids),
            _sampled_logprobs(each.token_ids, each.logprobs),
            tuple(spans),
            each.text,
            each.finish_reason,
        )
        for each, spans in zip(output.outputs, versions, strict=True)
    ]
    return RequestOutput(output.request_id, completions, raw=output)


def _sampled_logprobs(token_ids: Sequence[int], logprobs: Any) -> tuple[float, ...]:
    if logprobs is None:
        return ()
    pairs: Iterable[tuple[int, Mapping[int, Any]]] = zip(token_ids, logprobs, strict=True)
    return tuple(candidates[token].logprob for token, candidates in pairs)


class VersionSpans:
    """Remembers how far every running request was when its weights were replaced."""

    def __init__(self) -> None:
        self._closed: dict[str, dict[int, list[tuple[int, int]]]] = {}
        """By request and completion: (tokens written, version that wrote the last of them), in order."""

    def close(self, engine: Any, version: int) -> None:
        """Note that what was written until now is of `version`; called between two engine steps."""
        processor = engine.output_processor
        for state in processor.request_states.values():
            owner = state.external_req_id if state.parent_req is None else state.parent_req.external_req_id
            self._note(owner, state.request_index, state.detokenizer.num_output_tokens(), version)
        # Of several completions of a prompt, those that have ended wait here for the others.
        for parent in processor.parent_requests.values():
            for ended in parent.output_aggregator:
                if ended is not None:
                    self._note(parent.external_req_id, ended.index, len(ended.token_ids), version)

    def _note(self, owner: str, index: int, num_tokens: int, version: int) -> None:
        spans = self._closed.setdefault(owner, {}).setdefault(index, [])
        if num_tokens > (spans[-1][0] if spans else 0):
            spans.append((num_tokens, version))

    def of(self, output: Any, version: int) -> list[list[int]]:
        """Return the version of each token of each completion, and forget them; the last ones are of `version`."""
        closed = self._closed.pop(output.request_id, {})
        return [
            _spread(closed.get(completion.index, ()), len(completion.token_ids), version)
            for completion in output.outputs
        ]

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop requests that will not be asked for."""
        for name in request_ids:
            self._closed.pop(name, None)


def _spread(spans: Sequence[tuple[int, int]], num_tokens: int, version: int) -> list[int]:
    versions: list[int] = []
    for end, old in spans:
        versions += [old] * (end - len(versions))
    return versions + [version] * (num_tokens - len(versions))


BEFORE_TOKENS = 8
"""Tokens of the prompt that are decoded before a completion: whether it begins with a space depends on them."""
HALF_A_CHARACTER = "\ufffd"


class Texts:
    """Decodes what vLLM was told not to decode, into the same text."""

    def __init__(self, tokenizer: Any) -> None:
        """Decode with vLLM's `tokenizer`; with None, or with one that is slow, vLLM's own text stays."""
        self._tokenizer = tokenizer
        self._params: dict[str, Any] = {}
        """By request; those that are not here have vLLM's own text, or none."""

    def take_over(self, name: str, params: Any) -> None:
        """Let vLLM sample the request without text, unless stop strings are looked for in it."""
        from transformers import PreTrainedTokenizerFast

        # As vLLM asks (0.26 to 0.32) before it decodes with the tokenizers library.
        is_fast = isinstance(self._tokenizer, PreTrainedTokenizerFast)
        if params.detokenize and not params.stop and is_fast:
            params.detokenize = False
            self._params[name] = params

    def fill(self, output: Any) -> None:
        """Write the texts into a finished ``RequestOutput``, and forget its request."""
        if (params := self._params.pop(output.request_id, None)) is not None:
            for each in output.outputs:
                # The token that ended it has no text.
                has_end = each.finish_reason == "stop" and not params.include_stop_str_in_output
                token_ids = list(each.token_ids)[:-1] if has_end else list(each.token_ids)
                each.text = self._decoded(output.prompt_token_ids, token_ids, params)

    def forget(self, names: Iterable[str]) -> None:
        """Drop requests that will not end."""
        for name in names:
            self._params.pop(name, None)

    def _decoded(self, prompt: list[int], token_ids: list[int], params: Any) -> str:
        backend, skips = self._tokenizer._tokenizer, params.skip_special_tokens
        if skips or params.spaces_between_special_tokens:
            before = prompt[-BEFORE_TOKENS:]
            prefix = backend.decode(before, skip_special_tokens=skips)
            whole = backend.decode([*before, *token_ids], skip_special_tokens=skips)
            if prefix and HALF_A_CHARACTER not in whole and whole.startswith(prefix):
                return str(whole[len(prefix) :])
        return self._decoded_in_steps(prompt, token_ids, params)

    def _decoded_in_steps(self, prompt: list[int], token_ids: list[int], params: Any) -> str:
        """Decode as vLLM does, which leaves out characters that never became whole."""
        from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

        request: Any = SimpleNamespace(request_id="", prompt_token_ids=prompt, sampling_params=params)
        steps = FastIncrementalDetokenizer(self._tokenizer, request)
        steps.update(token_ids, stop_terminated=False)
        return steps.get_next_output_text(finished=True, delta=False)
