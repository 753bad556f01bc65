"""The weight channel inside the workers of a separate vLLM server."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from vectorlm import errors
from vectorlm.errors import EngineError, VectorLMError
from vectorlm.ranks.engine_ranks import CallResult
from vectorlm.sampling.backends.vllm.extension import WeightExtension
from vectorlm.sampling.backends.vllm.shim import adapt_to_cpu
from vectorlm.sampling.weights.held import Held
from vectorlm.sampling.weights.plan import Layout, TensorSpec
from vectorlm.sampling.weights.record import LoadPlan

ARENA_PATH = re.compile(r"/proc/\d+/fd/\d+")

# vLLM imports this module in each worker before it loads the model, and offers no other place to be early.
adapt_to_cpu()


class ServerExtension(WeightExtension):
    """`WeightExtension` for a server: ``vllm serve --worker-extension-cls`` takes this class."""

    vllm_config: Any
    _vectorlm_has_loaded = False
    _vectorlm_steps: Any = None

    def vectorlm_ask(self, trainer: str, method: str, values: Sequence[Any]) -> dict[str, Any]:
        """Call `method` of `WeightExtension`, with arguments and answer as JSON values.

        The channel belongs to the `trainer`, by a name that it chose, that called `vectorlm_prepare` last. Anybody may
        call `vectorlm_held`, which changes nothing.
        """
        try:
            arguments = arguments_from_wire(method, values)
            _require_arena(arguments)
            if method == "vectorlm_prepare":
                self._vectorlm_trainer = trainer
            elif method == "vectorlm_held":
                pass
            elif not hasattr(self, "_vectorlm_trainer"):
                raise EngineError(
                    "this server was started again after the trainer had connected: build the engine again."
                )
            elif trainer != self._vectorlm_trainer:
                raise EngineError(
                    "another trainer has connected to this server since, and its weights are that one's."
                )
        except VectorLMError as error:
            return result_to_wire((None, error))
        # Before the call: it may fail half way.
        self._vectorlm_has_loaded |= method == "vectorlm_load"
        return result_to_wire(getattr(self, method)(*arguments))

    def vectorlm_settings(self) -> dict[str, Any]:
        """Say how the server was started, as far as a trainer must know."""
        model, scheduler = self.vllm_config.model_config, self.vllm_config.scheduler_config
        return {
            "max_num_seqs": scheduler.max_num_seqs,
            "max_model_len": model.max_model_len,
            "logprobs_mode": str(model.logprobs_mode),
            "has_loaded": self._vectorlm_has_loaded,
            "num_steps": self._vectorlm_num_steps(),
        }

    def _vectorlm_num_steps(self) -> int | None:
        """Return how many steps the model has computed since the first call; None where other engines compute too."""
        if self.vllm_config.parallel_config.data_parallel_size > 1:
            return None
        if self._vectorlm_steps is None:
            self._vectorlm_steps, execute = 0, self.model_runner.execute_model

            def counted(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
                self._vectorlm_steps += scheduled.total_num_scheduled_tokens > 0
                return execute(scheduled, *args, **kwargs)

            self.model_runner.execute_model = counted
        return self._vectorlm_steps


def _require_arena(arguments: Sequence[Any]) -> None:
    """Map nothing but memory that a process of this machine holds open: a client names the path."""
    for argument in arguments:
        if isinstance(argument, Layout) and not ARENA_PATH.fullmatch(argument.path):
            raise EngineError(
                f"{argument.path!r} is not an arena: its path must be /proc/<process>/fd/<number>."
            )


CALLS: Mapping[str, tuple[tuple[Any, ...], Any]] = {
    "vectorlm_prepare": ((str,), str),
    "vectorlm_describe": ((str, tuple[TensorSpec, ...]), LoadPlan),
    "vectorlm_attach": ((str, Layout), int),
    "vectorlm_load": ((str, int, bool), list[int]),
    "vectorlm_empty_kv_cache": ((), None),
    "vectorlm_held": ((tuple[TensorSpec, ...],), Held),
}
"""By method of `WeightExtension`: the types of its arguments, and of its answer."""


def to_wire(value: Any) -> Any:
    """Return `value` as what JSON has; `from_wire` brings it back."""
    return msgspec.to_builtins(value)


def arguments_from_wire(method: str, values: Sequence[Any]) -> list[Any]:
    """Rebuild the arguments of a call; raise `EngineError` where there is no such call or they have other types."""
    if method not in CALLS:
        raise EngineError(
            f"{method!r} is not a call of the weight channel: it must be one of {sorted(CALLS)}."
        )
    types, _ = CALLS[method]
    try:
        return [msgspec.convert(value, kind) for value, kind in zip(values, types, strict=True)]
    except (ValueError, TypeError) as error:
        raise EngineError(f"the arguments of {method} cannot be read: {error}") from error


def result_to_wire(result: CallResult) -> dict[str, Any]:
    """Return what a call gave: its answer, or its error by name and text."""
    answer, error = result
    if error is not None:
        return {"error": type(error).__name__, "text": str(error)}
    return {"answer": to_wire(answer)}


def result_from_wire(method: str, value: Mapping[str, Any]) -> CallResult:
    """Rebuild what a call gave; errors that are not this library's become `EngineError`."""
    if "error" not in value:
        return msgspec.convert(value["answer"], CALLS[method][1]), None
    kind = getattr(errors, value["error"], None)
    is_ours = isinstance(kind, type) and issubclass(kind, VectorLMError)
    return None, (kind if is_ours else EngineError)(value["text"])  # type: ignore[misc]
