"""The backend for vLLM in the sampler process."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from vectorlm.data.images import pictures_of
from vectorlm.errors import ChangedBySleep, EngineError
from vectorlm.ranks.engine_ranks import results_or_first_error
from vectorlm.sampling.backends.vllm.adapters import Adapters
from vectorlm.sampling.backends.vllm.shim import (
    CudaSleep,
    adapt_to_cpu,
    build_engine,
    count_accepted,
    finish_steps,
    make_sampling_params,
    naming_the_model,
    next_tokens,
    warm_up,
)
from vectorlm.sampling.backends.vllm.workers import Workers, shorten_socket_paths, start_worker
from vectorlm.sampling.contract import RequestOutput
from vectorlm.sampling.settings import CHECKED_SLEEPS
from vectorlm.sampling.weights.plan import BASE
from vectorlm.sampling.weights.receive import EngineReceiver
from vectorlm.types import POLICY, Completion

prepare_process = shorten_socket_paths
__all__ = ["VLLM", "prepare_process", "start_worker"]


class VLLM:
    """A `Backend` around a ``vllm.LLMEngine``. `poll` takes one engine step, so all other calls run between steps."""

    transports = ("push", "bucketed", "pull")

    def __init__(
        self,
        model: str,
        *,
        receiver: str,
        exact: bool = False,
        enable_return_routed_experts: bool = False,
        **engine_args: Any,
    ) -> None:
        """Build the engine and sample one token; raise `EngineError` if vLLM cannot run the model here.

        If `exact`, log-probabilities have bits that a trainer can reproduce (`vectorlm.sampling.exact`). With
        `enable_return_routed_experts`, completions have `routes` if the model has experts and, on CUDA, if vLLM returns
        them with these arguments.
        """
        import torch
        import vllm
        from torch import distributed

        # vLLM would change the threads of a rank, and hang if the ranks have a process group.
        has_ranks = distributed.is_initialized() and distributed.get_world_size() > 1
        if has_ranks or os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
            raise EngineError(
                "channel='inline' does not work with vLLM, which cannot sample in a rank's process. Use "
                "channel='process' or inference='transformers'."
            )
        on_cpu = not torch.cuda.is_available()
        if exact:
            if not on_cpu:
                raise EngineError("exact needs an engine on CPU, and this machine has CUDA. Leave exact out.")
            # The number of pieces would depend on the batch. vLLM reads the variable at every step.
            os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
            receiver = "exact"
        adapt_to_cpu()
        with naming_the_model(model):
            self._engine = build_engine(model, engine_args, on_cpu, enable_return_routed_experts)
            self._workers = Workers(self._engine.vllm_config.parallel_config.world_size)
            self._receiver = EngineReceiver(self._engine.collective_rpc, receiver)
            self.connect, self.open_handles = self._receiver.connect, self._receiver.open_handles
            self.copy_round, self.lend = self._receiver.copy_round, self._receiver.lend
            lora = self._engine.vllm_config.lora_config
            self._adapters = Adapters(0 if lora is None else lora.max_loras, self._receiver.remove)
            self.require_slot, self.remove_adapter = self._adapters.require_slot, self._adapters.remove
            warm_up(self._engine)
        self.receiver = self._receiver.kind
        self.keeps_base: bool = self._call("vectorlm_does_keep_base")
        self._captures_routes = False
        if on_cpu and enable_return_routed_experts:
            self._captures_routes = self._call("vectorlm_capture_routes") > 0
        self._requests: dict[str, tuple[str, ...]] = {}
        """vLLM's names of the completions of each request whose routes are captured."""
        runner = self._call("vectorlm_runner")
        self.runner = f"vLLM {vllm.__version__}, model runner {runner}"
        config = self._engine.vllm_config
        self.max_num_seqs: int = config.scheduler_config.max_num_seqs
        self.vocab_size: int = config.model_config.get_vocab_size()
        self.takes_images: bool = config.model_config.is_multimodal_model
        speculates = engine_args.get("speculative_config") is not None
        self._accepted = count_accepted(self._engine) if speculates else [0, 0]
        self._device_sleep = None if on_cpu else CudaSleep(self._engine)
        self.progress = 0
        self._asleep: frozenset[str] = frozenset()
        self._has_weights = True
        """Whether the engine holds all weights of the checkpoint, or all weights of one update."""
        self._sleep_check = SleepCheck(self._score, self._receiver, 0.0 if on_cpu else CUDA_NOISE)
        self._may_hold_nan = False
        """Whether the KV cache may contain NaN: attention would return NaN even where it masks the NaN."""
        self._spans = VersionSpans()
        self._texts = Texts(self._engine.output_processor.tokenizer)
        self._told: dict[str, tuple[int, int]] = {}
        """By streamed request: the tokens and characters returned so far."""
        self._pictured: dict[str, tuple[int, ...]] = {}
        """By request with pictures: its prompt; vLLM's own record has every placeholder expanded."""
        self._finished: list[RequestOutput] = []
        """Outputs found by `pause`; the next `poll` returns them."""

    @property
    def version(self) -> int:
        """The version of the policy's last load; -1 before."""
        return self._adapters.versions[POLICY]

    @property
    def adapters(self) -> Mapping[str, int]:
        """The version of each adapter's last load."""
        return self._adapters.versions

    def submit(self, name: str, prompt: Sequence[int], sampling_params: Any, adapter: str = POLICY) -> None:
        """Add one request; its text is decoded when it ends."""
        params = make_sampling_params(sampling_params)
        self._texts.defer(name, params)
        self._add(name, prompt, params, adapter)

    def submit_streamed(
        self, name: str, prompt: Sequence[int], sampling_params: Any, adapter: str = POLICY
    ) -> None:
        """Add one request; vLLM decodes its text during sampling, to the same text."""
        params = make_sampling_params(sampling_params, is_streamed=True)
        self._told[name] = 0, 0
        self._add(name, prompt, params, adapter)

    def submit_raw(
        self, name: str, prompt: Sequence[int], sampling_params: Any, adapter: str = POLICY
    ) -> None:
        """Add one request; the `raw` of its output holds vLLM's own record, with the strings of single tokens."""
        self._add(name, prompt, make_sampling_params(sampling_params), adapter)

    def _add(self, name: str, prompt: Sequence[int], params: Any, adapter: str) -> None:
        longest = self._engine.vllm_config.model_config.max_model_len
        if len(prompt) >= longest:
            raise ValueError(
                f"it has {len(prompt)} tokens, and max_model_len={longest} must hold prompt and completion. Shorten "
                "the prompt, or build the engine with a larger max_model_len."
            )
        request: dict[str, Any] = {
            "prompt_token_ids": list(prompt),
            "cache_salt": self._adapters.begin(name, adapter),
        }
        if pictures := pictures_of(prompt):
            request["multi_modal_data"] = {"image": [picture.open() for picture in pictures]}
            self._pictured[name] = tuple(prompt)
        # With ``scheduling_policy="priority"`` requests to other adapters come first: rollouts wait for their answers.
        self._engine.add_request(
            name,
            request,
            params,
            lora_request=self._adapters.requests.get(adapter),
            priority=int(adapter == POLICY),
        )
        if self._captures_routes:
            self._requests[name] = tuple(self._engine.output_processor.external_req_ids[name])

    def _call(self, method: str, *args: Any) -> Any:
        """Call a method of `WeightExtension` on all workers, and return the first worker's result."""
        return next(iter(results_or_first_error(self._engine.collective_rpc(method, args=args))))

    def _take_routes(self, names: Iterable[str], is_wanted: bool = True) -> dict[str, Any]:
        """Return the captured routes of requests that have ended, by vLLM's names of their completions."""
        own = [own for name in names for own in self._requests.pop(name, ())]
        return dict(zip(own, self._call("vectorlm_take_routes", own, is_wanted), strict=True)) if own else {}

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
        self._take_routes(names, is_wanted=False)
        for name in names:
            for record in (self._told, self._pictured, self._adapters.adapter_of):
                record.pop(name, None)

    def pause(self) -> None:
        """Wait until no step runs on the device; only `poll` starts steps."""
        # The ranks may write weights from here on.
        self._has_weights = False
        self._finish_steps()

    def _finish_steps(self) -> None:
        if self._device_sleep is not None:
            # On CPU no step runs ahead, and an empty step could reorder the rows of vLLM's batch.
            self._finished += self._finished_of(finish_steps(self._engine))

    def load(
        self,
        version: int,
        checksums: Sequence[int] | None,
        weight_sets: Sequence[str],
        recompute: bool,
        adapter: str = POLICY,
    ) -> float:
        """Load the new weights and drop the cache of the old ones."""
        adapter_id = self._adapters.id_for(adapter, weight_sets)
        try:
            load_s = self._receiver.load(version, checksums, weight_sets, adapter_id)
        except BaseException:
            if adapter != POLICY:
                self.remove_adapter(adapter)
            raise
        if not self._engine.has_unfinished_requests():
            must_reset = not self._adapters.keep_blocks or self._may_hold_nan or BASE in weight_sets
            if must_reset and not self._engine.reset_prefix_cache():
                raise EngineError("vLLM did not empty its prefix cache, which has blocks of the old weights.")
        elif recompute or self._may_hold_nan:
            self._engine.reset_prefix_cache(reset_running_requests=True)
        # vLLM caches image embeddings by the image alone. A half-computed prompt computes them again.
        self._engine.reset_encoder_cache()
        self._empty_kv_cache()
        self._spans.close(self._engine, self._adapters.version_of)
        self._adapters.loaded(adapter, version, weight_sets)
        self._has_weights = True
        self._sleep_check.after_update()
        self._compare()
        return load_s

    def take_accepted(self) -> tuple[int, int]:
        """Return the accepted tokens and the steps of sequences since the last call."""
        accepted, steps = self._accepted
        self._accepted[:] = 0, 0
        return accepted, steps

    def expect_nan(self) -> None:
        """Overwrite the whole KV cache at the next update."""
        self._may_hold_nan = True

    def resume(self) -> None:
        """Do nothing: the next `poll` continues."""

    def sleep(self, parts: frozenset[str], asleep: frozenset[str]) -> None:
        """Free device memory; on CPU, where vLLM has no sleep mode, empty the prefix cache."""
        self._finish_steps()
        if self._has_weights and not self._asleep:
            self._sleep_check.before_sleep()
        if "weights" in parts:
            self._receiver.before_sleep()
        if self._device_sleep is not None:
            self._device_sleep.sleep(parts, asleep)
        elif not self._engine.reset_prefix_cache():
            raise EngineError("the prefix cache cannot be emptied: requests are running.")
        if "weights" in parts:
            self._adapters.keep_policy()
        self._asleep = parts | asleep
        self._has_weights &= "weights" not in parts

    def wake_up(self, parts: frozenset[str]) -> list[str]:
        """Allocate device memory again; return the names of the tensors that were restored."""
        if self._device_sleep is not None:
            self._device_sleep.wake_up(parts)
        self._asleep -= parts
        restored = self._receiver.after_wake() if "weights" in parts else []
        if "kv_cache" in parts:
            self._empty_kv_cache()
        self._compare()
        return restored

    def close(self) -> None:
        """End the workers of a parallel engine."""
        self._workers.end()

    def _empty_kv_cache(self) -> None:
        """Overwrite a KV cache that may contain NaN, if it is awake."""
        if self._may_hold_nan and "kv_cache" not in self._asleep:
            self._receiver.empty_kv_cache()
            self._may_hold_nan = False

    def _compare(self) -> None:
        """Compare log-probabilities with those before a sleep, if the engine is awake, idle and has its weights."""
        if self._has_weights and not self._asleep and not self._engine.has_unfinished_requests():
            self._sleep_check.compare()

    def _score(self, salt: str) -> np.ndarray:
        """Return the next tokens after parts of a fixed text, and their log-probabilities."""
        # The middle of a vocabulary has no special tokens, such as placeholders of images.
        first, span = self.vocab_size // 2, max(self.vocab_size // 4, 1)
        length = min(SCORED_TOKENS, self._engine.vllm_config.model_config.max_model_len - 1)
        text = [first + 7 * place % span for place in range(length)]
        prompts = [text[:end] for end in range(length, 0, -SCORED_EVERY)]
        return next_tokens(self._engine, prompts, salt, self._adapters.requests.get(POLICY))

    def _finished_of(self, outputs: Iterable[Any]) -> list[RequestOutput]:
        found, outputs = [], list(outputs)
        ended = [output for output in outputs if output.finished]
        own = {output.request_id: self._requests.get(output.request_id, ()) for output in ended}
        captured = self._take_routes(own)
        for output in outputs:
            if output.finished:
                self._texts.fill(output)
                self._told.pop(output.request_id, None)
                prompt = self._pictured.pop(output.request_id, None)
                if names := own[output.request_id]:
                    for sample in output.outputs:
                        sample.routed_experts = captured[names[sample.index]]
                versions = self._spans.of(output, self._adapters.version_of(output.request_id))
                self._adapters.adapter_of.pop(output.request_id, None)
                found.append(finished(output, versions, prompt))
            elif output.request_id in self._told:
                found.append(self._part_of(output))
        self._may_hold_nan |= any(
            math.isnan(sum(completion.sampler_logprobs)) for one in found for completion in one.completions
        )
        return found

    def _part_of(self, output: Any) -> RequestOutput:
        (whole,) = output.outputs
        num_tokens, num_characters = self._told[output.request_id]
        self._told[output.request_id] = len(whole.token_ids), len(whole.text)
        token_ids = tuple(whole.token_ids[num_tokens:])
        logprobs = _sampled_logprobs(token_ids, whole.logprobs and whole.logprobs[num_tokens:])
        versions = (self._adapters.version_of(output.request_id),) * len(token_ids)
        part = Completion((), token_ids, logprobs, versions, whole.text[num_characters:], None)
        return RequestOutput(output.request_id, [part], is_part=True)


def finished(
    output: Any, versions: Sequence[Sequence[int]], prompt: tuple[int, ...] | None = None
) -> RequestOutput:
    """Convert vLLM's finished ``RequestOutput``, with the versions of its tokens; `prompt` replaces vLLM's own."""
    prompt = tuple(output.prompt_token_ids) if prompt is None else prompt
    completions = [
        Completion(
            prompt,
            tuple(sample.token_ids),
            _sampled_logprobs(sample.token_ids, sample.logprobs),
            tuple(token_versions),
            sample.text,
            sample.finish_reason,
            _routes(sample, len(output.prompt_token_ids)),
        )
        for sample, token_versions in zip(output.outputs, versions, strict=True)
    ]
    return RequestOutput(output.request_id, completions, raw=output)


def _routes(sample: Any, num_prompt: int) -> np.ndarray | None:
    """Return the routes of all tokens but the last, which the engine never read; None if some are missing."""
    routes: np.ndarray | None = getattr(sample, "routed_experts", None)
    length = num_prompt + len(sample.token_ids) - 1
    if routes is None or len(routes) < length:
        return None
    kind = np.uint8 if routes.dtype.itemsize == 1 else np.uint16
    return np.ascontiguousarray(routes[:length], kind)


def _sampled_logprobs(token_ids: Sequence[int], logprobs: Any) -> tuple[float, ...]:
    if logprobs is None:
        return ()
    # Flat log-probabilities, of the sampled tokens alone.
    if len(flat := getattr(logprobs, "logprobs", ())) == len(token_ids):
        return tuple(flat)
    pairs: Iterable[tuple[int, Mapping[int, Any]]] = zip(token_ids, logprobs, strict=True)
    return tuple(candidates[token].logprob for token, candidates in pairs)


SCORED_TOKENS, SCORED_EVERY = 32, 4
"""Length of the text that is scored before and after a sleep, and the tokens between two scored places."""
CUDA_NOISE = 0.02
"""Difference that is always accepted on CUDA; a lost scale or table changes log-probabilities by more."""
NOISE_FACTOR = 8
"""Largest accepted difference, in units of the difference between two scorings without a sleep in between. Where
kernels always add in the same order, as on CPU, the limit is 0, and the bits must be equal."""


class SleepCheck:
    """The comparison of log-probabilities before and after a sleep, made once, with the same weights."""

    def __init__(
        self, score: Callable[[str], np.ndarray], receiver: EngineReceiver, least_noise: float = 0.0
    ) -> None:
        """Compare the answers of `score`, whose argument must be new at each call; always accept `least_noise`."""
        self._receiver, self._least_noise = receiver, least_noise
        numbers = itertools.count()
        self._score = lambda: score(f"sleep check {next(numbers)}")
        self._notes_left = CHECKED_SLEEPS
        self._noted: tuple[np.ndarray, float, list[dict[str, int]]] | None = None
        """Log-probabilities before the last sleep, the largest difference to accept, and checksums."""

    def before_sleep(self) -> None:
        """Note the log-probabilities and the checksums of the weights."""
        if self._notes_left:
            self._notes_left -= 1
            noted = self._score()
            noise = max(self._least_noise, NOISE_FACTOR * _largest_gap(noted, self._score()))
            self._noted = noted, noise, self._receiver.weight_sums()

    def after_update(self) -> None:
        """Drop the note unless the update brought the same weights."""
        if self._noted is not None:
            workers = zip(self._receiver.weight_sums(), self._noted[2], strict=True)
            if not all(now.items() <= before.items() for now, before in workers):
                self._noted = None

    def compare(self) -> None:
        """Compare with the note, if there is one; raise `ChangedBySleep` for a difference."""
        if self._noted is None:
            return
        noted, noise, _ = self._noted
        # Where kernels add in any order, the two best tokens may change places, with almost equal probabilities.
        compared = slice(1, None) if noise else slice(None)
        gap = _largest_gap(noted[:, compared], self._score()[:, compared])
        if not gap <= noise:
            raise ChangedBySleep(
                "sleep changed what the engine computes: with the same weights as before, the log-probabilities of a "
                f"fixed text differ by up to {gap:.2g}. The engine can no longer be used. Build a new one, "
                "and do not let its weights sleep."
            )
        self._noted, self._notes_left = None, 0


def _largest_gap(before: np.ndarray, after: np.ndarray) -> float:
    """Return the largest difference of tokens and log-probabilities; NaN if only one of two values is NaN."""
    return float(np.abs(before - after)[~(np.isnan(before) & np.isnan(after))].max(initial=0.0))


class VersionSpans:
    """The lengths of running requests at every update, to find the version of each token."""

    def __init__(self) -> None:
        self._closed: dict[str, dict[int, list[tuple[int, int]]]] = {}
        """By request and completion, in order: (number of tokens, version that sampled the last of them)."""

    def close(self, engine: Any, version_of: Callable[[str], int]) -> None:
        """Mark all tokens so far as sampled by `version_of(request)`; called between two engine steps."""
        processor = engine.output_processor
        for state in processor.request_states.values():
            owner = state.external_req_id if state.parent_req is None else state.parent_req.external_req_id
            num_tokens = state.detokenizer.num_output_tokens()
            self._note(owner, state.request_index, num_tokens, version_of(owner))
        # Completions that ended before the others of their prompt.
        for parent in processor.parent_requests.values():
            for ended in parent.output_aggregator:
                if ended is not None:
                    owner = parent.external_req_id
                    self._note(owner, ended.index, len(ended.token_ids), version_of(owner))

    def _note(self, owner: str, index: int, num_tokens: int, version: int) -> None:
        spans = self._closed.setdefault(owner, {}).setdefault(index, [])
        if num_tokens > (spans[-1][0] if spans else 0):
            spans.append((num_tokens, version))

    def of(self, output: Any, version: int) -> list[list[int]]:
        """Return and drop the version of each token of each completion; `version` sampled the last ones."""
        closed = self._closed.pop(output.request_id, {})
        found = []
        for completion in output.outputs:
            versions: list[int] = []
            for end, old in closed.get(completion.index, ()):
                versions += [old] * (end - len(versions))
            found.append(versions + [version] * (len(completion.token_ids) - len(versions)))
        return found

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop cancelled requests."""
        for name in request_ids:
            self._closed.pop(name, None)


BEFORE_TOKENS = 8
"""Prompt tokens decoded before a completion; they decide whether it begins with a space."""
HALF_A_CHARACTER = "\ufffd"


class Texts:
    """A decoder of whole completions, faster than vLLM's decoding token by token, and with the same text."""

    def __init__(self, tokenizer: Any) -> None:
        """Decode with vLLM's `tokenizer`; if it is None or a slow one, vLLM decodes."""
        self._tokenizer = tokenizer
        self._params: dict[str, Any] = {}
        """The parameters of each request that is decoded here; vLLM decodes all other texts."""

    def defer(self, name: str, params: Any) -> None:
        """Make vLLM sample the request without text, unless it needs the text for stop strings."""
        from transformers import PreTrainedTokenizerFast

        # vLLM's own condition for decoding with the tokenizers library.
        is_fast = isinstance(self._tokenizer, PreTrainedTokenizerFast)
        if params.detokenize and not params.stop and is_fast:
            params.detokenize = False
            self._params[name] = params

    def fill(self, output: Any) -> None:
        """Write the texts into a finished ``RequestOutput``."""
        if (params := self._params.pop(output.request_id, None)) is not None:
            for sample in output.outputs:
                # The stop token has no text.
                has_end = sample.finish_reason == "stop" and not params.include_stop_str_in_output
                token_ids = list(sample.token_ids)[:-1] if has_end else list(sample.token_ids)
                sample.text = self._decode(output.prompt_token_ids, token_ids, params)

    def forget(self, names: Iterable[str]) -> None:
        """Drop cancelled requests."""
        for name in names:
            self._params.pop(name, None)

    def _decode(self, prompt: list[int], token_ids: list[int], params: Any) -> str:
        backend, skips = self._tokenizer._tokenizer, params.skip_special_tokens
        if skips or params.spaces_between_special_tokens:
            before = prompt[-BEFORE_TOKENS:]
            prefix = backend.decode(before, skip_special_tokens=skips)
            whole = backend.decode([*before, *token_ids], skip_special_tokens=skips)
            if prefix and HALF_A_CHARACTER not in whole and whole.startswith(prefix):
                return str(whole[len(prefix) :])
        # vLLM's own decoder leaves out incomplete characters.
        from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

        request: Any = SimpleNamespace(request_id="", prompt_token_ids=prompt, sampling_params=params)
        steps = FastIncrementalDetokenizer(self._tokenizer, request)
        steps.update(token_ids, stop_terminated=False)
        return steps.get_next_output_text(finished=True, delta=False)
