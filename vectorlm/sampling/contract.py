"""The interfaces of an inference engine and of a trainer, for your own implementations.

A training loop calls a `vectorlm.types.Engine` on all ranks. Behind `vectorlm.SamplingEngine` runs a `Backend`, driven
from one thread; on every rank a `WeightSource` sends the weights. docs/howto/own_backend.md and docs/contracts.md show
how to write either, and `vectorlm.sampling.testing` holds the checks that both must pass.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from vectorlm.errors import EngineError
from vectorlm.sampling.weights.plan import BASE
from vectorlm.types import POLICY, Completion

if TYPE_CHECKING:
    from vectorlm.sampling.weights.exports import Export, Lent
    from vectorlm.sampling.weights.plan import Layout, TensorSpec

BACKENDS = {
    "vllm": "vectorlm.sampling.backends.vllm.backend:VLLM",
    "transformers": "vectorlm.sampling.backends.transformers:Transformers",
    "server": "vectorlm.sampling.backends.server.backend:VLLMServer",
}
"""The implementations of `Backend` in this library, by their names in `SamplingEngine` and configs."""


@dataclass(frozen=True)
class RequestOutput:
    """The output of one request, or a part of it."""

    name: str
    """The name from `submit`."""
    completions: Sequence[Completion]
    """The `n` completions, in the order of their seeds."""
    error: Exception | None = None
    """The error that replaces the completions; it fails this batch only."""
    raw: Any = None
    """vLLM's own ``RequestOutput``, if there is one; `SamplingEngine.generate` returns it."""
    is_part: bool = False
    """Whether the request continues; its only completion then holds the tokens since the last part."""


class Backend(Protocol):
    """An inference engine that one process drives from one thread.

    `vectorlm.sampling.sampler.scheduler.Scheduler` makes the calls in a fixed order. It submits only to an engine
    that is awake, is not paused and holds whole weights. Weights are written only between `pause` and `resume`. After
    `poll` has raised, it submits nothing more.

    An implementation is built as ``Class(model, receiver=…, **engine_args)`` in the process that samples: the sampler
    process or, on the inline channel, rank 0's.

    An error whose class is not in `vectorlm.errors` reaches the ranks as its nearest base class there or as
    `EngineError`, with its traceback. The ranks must be able to import the types of other results.

    `AnswerRules` checks the answers before the ranks get them. An answer that breaks a rule ends its batch with an
    `EngineError`, and the engine continues. The rules:

    - Each name that was submitted and not cancelled is answered once, with exactly `n` completions.
    - A completion repeats the token ids of its prompt. It has at most `max_tokens` tokens and one of vLLM's finish
      reasons. For each token it has a version and, with `logprobs`, a log-probability.
    - Versions belong to the last load before the request was submitted or to later loads, in the order of the loads.
    - Log-probabilities are finite, at most 0, and of the sampling distribution: after penalties, temperature, `top_k`,
      `top_p` and `min_p`; at temperature 0 after penalties alone.

    Members that are marked optional may be missing.
    """

    @property
    def receiver(self) -> str:
        """Storage of the weights in the engine: `live` (in place), or `packed` for its own kernels."""

    @property
    def max_num_seqs(self) -> int:
        """Sequences that are sampled at the same time; more requests wait inside the engine."""

    @property
    def version(self) -> int:
        """The version of the last `load`; -1 before."""

    def submit(self, name: str, prompt: Sequence[int], sampling_params: Any) -> None:
        """Queue one prompt.

        Args:
            name: Unique among the requests in flight.
            prompt: Its token ids, each below `vocab_size`: `SamplingEngine` has encoded texts and chat messages.
            sampling_params: A mapping with the names of ``vllm.SamplingParams``, one of these, or None for defaults.

        Raises:
            EngineError: The engine cannot sample this prompt and does not queue it; the text says why.
        """

    def poll(self) -> Sequence[RequestOutput]:
        """Sample for a fraction of a second at most, and return what has finished since the last call.

        Raises:
            Exception: The engine is broken; every request in flight is lost.
        """

    def cancel(self, names: Iterable[str]) -> None:
        """Forget requests; unknown and finished names are ignored."""

    def connect(self, manifest: Sequence[TensorSpec], arena_path: str | None, weight_set: str) -> Layout:
        """Match the trainer's tensors with the engine's, and give each a place in the arena.

        Args:
            manifest: The tensors that the trainer will send, whole.
            arena_path: Arena of another engine of this node, to be shared; None creates one.
            weight_set: `base`: the model's own tensors; `adapter`: LoRA factors on top of them.

        Returns:
            A file that every rank of this node can map, and the place of each tensor in it.

        Raises:
            WeightMismatch: Trainer and engine do not hold the same model; nothing has changed.
        """

    def pause(self) -> None:
        """Stop: until `resume` no token is sampled and no weight is read."""

    def load(
        self, version: int, checksums: Sequence[int] | None, weight_sets: Sequence[str], recompute: bool
    ) -> float:
        """Load the weights that the ranks wrote into the arena, while paused; return the seconds it took.

        From then on the engine samples every token with `version`, also in requests in flight, and no new request finds
        KV blocks of older weights.

        Args:
            version: The training step of these weights.
            checksums: Checksums of all written tensors, one weight set after the other; None skips the proof.
            weight_sets: The written sets, `base` before `adapter`.
            recompute: Recompute the KV cache of requests in flight with the new weights; otherwise they keep it.

        Raises:
            ChecksumMismatch: The engine does not hold what was sent.
        """

    def resume(self) -> None:
        """Continue the requests in flight."""

    def sleep(self, parts: frozenset[str], asleep: frozenset[str]) -> None:
        """Free the memory of `parts` (`weights`, `kv_cache`); those in `asleep` sleep already.

        An engine that cannot free memory only forgets its KV cache.

        Raises:
            EngineError: The engine cannot sleep; nothing has changed.
        """

    def wake_up(self, parts: frozenset[str]) -> Sequence[str] | None:
        """Take back the memory of `parts`; weights are garbage until the next `load`.

        Returns:
            Optional: names of other tensors that the sleep lost and that were restored; rank 0 warns of them.

        Raises:
            ChangedBySleep: The sleep lost tensors that cannot be restored, and no rank uses the engine any more.
        """

    def close(self) -> None:
        """End what this object started."""

    @property
    def vocab_size(self) -> int:
        """Optional: the limit below which all token ids are; by default the vocabulary size in the folder's config."""

    @property
    def runner(self) -> str:
        """Optional: the inference library with its version, and the part that runs the model; printed at the start."""

    @property
    def tokenizer(self) -> Any:
        """Optional: the tokenizer for texts and chats, with ``encode`` and ``apply_chat_template``.

        It is pickled by value, so its class may be in the backend's file. Without it the ranks use the tokenizer of
        the model's folder.
        """

    @property
    def adapters(self) -> Mapping[str, int]:
        """Optional: the adapters that the engine holds, with their versions; `base` is the model without one.

        A backend with adapters also has `require_slot(name)`, which raises `EngineError` if no slot is free, and
        ``remove_adapter(name)``. Its `load`, `submit` and variants get any other name than `policy` as `adapter`.
        """

    @property
    def takes_images(self) -> bool:
        """Optional: whether a prompt may be `vectorlm.data.images.PicturedIds`; without it they are refused.

        The answer repeats its token ids, with one placeholder for each picture.
        """

    @property
    def progress(self) -> int:
        """Optional: a number that grows while tokens are sampled.

        Without it a request must finish within the ranks' `timeout_s`; otherwise they raise `EngineTimeout`.
        """

    @property
    def transports(self) -> Sequence[str]:
        """Optional: `push`, and further transports: `bucketed` fills an arena in rounds, `pull` copies from handles.

        With one of these, `connect` takes `arena_bytes`, the largest size of the arena. With 0 there is no arena, and
        the layout's path is ``""``.
        """

    def submit_streamed(self, name: str, prompt: Sequence[int], sampling_params: Any) -> None:
        """Optional: do what `submit` does for one completion, and return parts from `poll` before the whole answer.

        Texts and tokens of the parts, in order, are the beginning of the whole answer. Without this method, or without
        parts, a streamed answer arrives whole.
        """

    def copy_round(self, rounds: Mapping[str, int]) -> None:
        """With `bucketed`: copy these rounds of the arenas, by weight set, while paused; `load` copies the last."""

    def open_handles(self, weight_set: str, exports: Sequence[Export]) -> None:
        """With `pull`: open the exports of this node's ranks, which replace earlier ones; `load` copies from them.

        Raises:
            StaleHandle: A rank no longer holds the memory that it exported; `load` raises it too.
        """

    def lend(self, checksums: Sequence[int]) -> Lent:
        """Optional: return handles of the tensors of the connected base, which ranks read in place from now on.

        Raises:
            ChecksumMismatch: The tensors differ from the trainer's, which have these checksums.
            HandleRefused: No rank can read them.
        """

    def expect_nan(self) -> None:
        """Optional: note that the weights may hold NaN.

        The next `load` must then remove NaN from the KV cache, where it would spread.
        """


@runtime_checkable
class WeightSource(Protocol):
    """Weights that `Engine.update` takes instead of a ``torch.nn.Module``; all ranks call both methods.

    A source may also have ``inspect(layout, with_checksums, check_finite) -> Inspection``, called before `publish`
    (`vectorlm.sampling.weights.inspection`). Without it, differences between ranks and changes under the same step stay
    unnoticed, and therefore every update sends all weights. NaN and infinity are found only after they were written;
    the engine then samples nothing until the next update.
    """

    def manifest(self) -> Sequence[TensorSpec]:
        """List the whole tensors by their names in the trainer; the same on every rank, at every version."""

    def publish(self, layout: Layout, with_checksums: bool) -> Sequence[int]:
        """Write this rank's rows of every tensor of `layout` into its arena, cast to each slot's dtype.

        Together the ranks of one node write every byte of every slot. With the transport `bucketed` a layout lists some
        of the tensors, and further calls send the rest.

        Returns:
            One sum per slot. Modulo 2^64, the sums of the ranks add up to
            `vectorlm.sampling.weights.inspection.checksum` of the whole tensor. Empty unless `with_checksums`.
        """


@dataclass(frozen=True)
class WeightSet:
    """Tensors that an update replaces together; an engine holds one or several sets."""

    name: str
    """`base`: the model's own tensors; `adapter`: LoRA factors on top of them."""
    source: WeightSource
    fingerprint: object = None
    """A value that equals an earlier one if nothing has changed since; with None every update sends the set."""


@runtime_checkable
class Trainer(WeightSource, Protocol):
    """A trainer that an engine follows: ``engine.update(trainer, trainer.version)``."""

    @property
    def version(self) -> int:
        """Optimizer steps taken."""

    def step(self, batch: Any) -> Mapping[str, float]:
        """Take one optimizer step on this rank's `batch`; return metrics, equal on all ranks."""


FINISH_REASONS = (None, "stop", "length", "abort", "error", "repetition")
"""The finish reasons of vLLM."""
SLACK = 1e-4
"""Largest accepted log-probability; for a certain token, rounding may give a number above 0."""


class AnswerRules:
    """Checks of a backend's answers; errors name the backend, the prompt and the value."""

    def __init__(self, backend: Any, model: str | None) -> None:
        """Read the backend's first version, and the vocabulary size of the backend or of the folder `model`."""
        self._name = type(backend).__name__
        self._vocab_size = backend.vocab_size if hasattr(backend, "vocab_size") else _vocab_size(model)
        adapters = getattr(backend, "adapters", {POLICY: backend.version})
        self.loaded: dict[str, list[int]] = {name: [version] for name, version in adapters.items()}
        """By adapter: the version of each load, in order."""

    def note_load(self, version: int, adapter: str, weight_sets: Sequence[str]) -> None:
        """Note that an update has brought these weights."""
        for name in {adapter} | ({BASE} & {*weight_sets} & self.loaded.keys()):
            self.loaded.setdefault(name, []).append(version)

    def error(self, index: int, what: str) -> EngineError:
        """Return the error of the prompt with this index."""
        return EngineError(f"the backend {self._name} answered prompt {index} {what}.")

    def unknown(self, name: str) -> EngineError:
        """Return the error for an unknown name, which may stand for any request in flight."""
        return EngineError(
            f"the backend {self._name} answered a request {name!r}, which was never submitted: RequestOutput.name must "
            "be the name that `submit` got."
        )

    def check_prompt(self, index: int, token_ids: Sequence[int]) -> None:
        """Raise EngineError for tokens outside the vocabulary, which would crash an engine on CUDA."""
        size = self._vocab_size
        if size and token_ids and not (min(token_ids) >= 0 and max(token_ids) < size):
            outside = next(token for token in token_ids if not 0 <= token < size)
            raise EngineError(f"prompt {index} has token {outside}: it must be from 0 to {size - 1}.")

    def check(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[Any],
        outputs: Sequence[RequestOutput],
        num_loads: int,
        adapter: str = POLICY,
    ) -> None:
        """Raise EngineError for an answer that breaks a rule of `Backend`.

        `num_loads` counts the adapter's loads before the submission. The versions of the last of these and of later
        loads are valid.
        """
        held = self.loaded[adapter][num_loads - 1 :]
        for index, (prompt, asked, output) in enumerate(zip(prompts, params, outputs, strict=True)):
            what = _wrong_record(prompt, asked, output.completions)
            for completion in output.completions:
                what = what or self._wrong_values(completion, held)
            if what:
                raise self.error(index, what)

    def _wrong_values(self, completion: Completion, held: Sequence[int]) -> str | None:
        """Return the rule that tokens, log-probabilities or versions break; None if there is none."""
        tokens, logprobs, versions = completion.token_ids, completion.sampler_logprobs, completion.versions
        size = self._vocab_size or sys.maxsize
        if tokens and (min(tokens) < 0 or max(tokens) >= size):
            token = next(token for token in tokens if not 0 <= token < size)
            limit = f" to {size - 1}" if self._vocab_size else ""
            return f"with token {token}, but token ids are from 0{limit}"
        # A sum is fast, and NaN or infinity survives it.
        if not math.isfinite(sum(logprobs)):
            odd = next(logprob for logprob in logprobs if not math.isfinite(logprob))
            return f"with a log-probability of {odd}, which is not finite: the weights may hold NaN"
        if logprobs and max(logprobs) > SLACK:
            odd = next(logprob for logprob in logprobs if logprob > SLACK)
            return f"with a log-probability of {odd}, which must be at most 0"
        order, left = [version for version, _ in itertools.groupby(versions)], iter(held)
        if not all(version in left for version in order):
            shown = ", ".join(map(str, order))
            return f"with tokens of versions {shown}, but the weights were, in this order, {list(held)}"
        return None


def _wrong_record(prompt: Sequence[int], asked: Any, completions: Sequence[Completion]) -> str | None:
    """Return the contradiction to the prompt or its sampling parameters; None if there is none."""
    n, max_tokens = _parameter(asked, "n") or 1, _parameter(asked, "max_tokens")
    if len(completions) != n:
        return f"with {len(completions)} completions, but n={n}"
    ids = tuple(prompt)
    for completion in completions:
        num_tokens, num_logprobs = len(completion.token_ids), len(completion.sampler_logprobs)
        if tuple(completion.prompt_token_ids) != ids:
            shown = str(completion.prompt_token_ids)[:60]
            return f"with prompt_token_ids={shown}, but the prompt is {str(prompt)[:60]}"
        if completion.finish_reason not in FINISH_REASONS:
            return f"with finish_reason={completion.finish_reason!r}, but it must be one of {FINISH_REASONS}"
        if max_tokens is not None and num_tokens > max_tokens:
            return f"with {num_tokens} tokens, but max_tokens={max_tokens}"
        if len(completion.versions) != num_tokens:
            return f"with {len(completion.versions)} versions for {num_tokens} tokens"
        if num_logprobs != num_tokens and (num_logprobs or _parameter(asked, "logprobs") is not None):
            return f"with {num_logprobs} sampler_logprobs for {num_tokens} tokens"
    return None


def _parameter(asked: Any, name: str) -> Any:
    """Return a sampling parameter, of a mapping or of an object; None if it is not given."""
    return asked.get(name) if isinstance(asked, Mapping) else getattr(asked, name, None)


def _vocab_size(model: str | None) -> int | None:
    path = Path(model or "", "config.json")
    if model is None or not path.is_file():
        return None
    config = json.loads(path.read_text(encoding="utf-8"))
    size: int | None = (config.get("text_config") or config).get("vocab_size")
    return size
