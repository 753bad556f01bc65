"""The weight channel inside the workers of a vLLM server, and its encoding as JSON."""

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
from vectorlm.sampling.weights.plan import Layout, TensorSpec
from vectorlm.sampling.weights.receive import WorkerSums
from vectorlm.sampling.weights.record import LoadPlan

ARENA_PATH = re.compile(r"/proc/\d+/fd/\d+")

CALLS: Mapping[str, tuple[tuple[Any, ...], Any]] = {
    "vectorlm_prepare": ((str,), str),
    "vectorlm_describe": ((str, tuple[TensorSpec, ...]), LoadPlan),
    "vectorlm_attach": ((str, Layout), int),
    "vectorlm_load": ((str, int, bool), list[int]),
    "vectorlm_empty_kv_cache": ((), None),
    "vectorlm_parameter_sums": ((tuple[TensorSpec, ...],), WorkerSums),
}
"""By method of `WeightExtension`: the types of its arguments and of its answer."""

# vLLM imports this module in every worker before it loads the model. No other place is early enough.
adapt_to_cpu()


class ServerExtension(WeightExtension):
    """`WeightExtension` for ``vllm serve --worker-extension-cls``."""

    vllm_config: Any
    _vectorlm_has_loaded = False
    _vectorlm_may_be_quantised = False
    _vectorlm_steps: Any = None

    def vectorlm_ask(self, trainer: str, method: str, values: Sequence[Any]) -> dict[str, Any]:
        """Call `method` of `WeightExtension` with arguments in JSON; return its answer in JSON.

        Only the trainer that called `vectorlm_prepare` last may use the channel; `trainer` is the name that it chose.
        Anybody may call `vectorlm_parameter_sums`, which changes nothing.
        """
        try:
            arguments = arguments_from_wire(method, values)
            for argument in arguments:
                # The client names the path, and a worker must not map other files than arenas.
                if isinstance(argument, Layout) and not ARENA_PATH.fullmatch(argument.path):
                    raise EngineError(
                        f"path={argument.path!r}: an arena must be at /proc/<process>/fd/<number>."
                    )
            if method == "vectorlm_prepare":
                self._vectorlm_trainer = trainer
            elif method == "vectorlm_parameter_sums":
                pass
            elif not hasattr(self, "_vectorlm_trainer"):
                raise EngineError(
                    "this server was restarted after the trainer connected. Build the engine again."
                )
            elif trainer != self._vectorlm_trainer:
                raise EngineError("another trainer has connected to this server and now owns its weights.")
        except VectorLMError as error:
            return result_to_wire((None, error))
        # Before the call, because a load may fail half way.
        self._vectorlm_has_loaded |= method == "vectorlm_load"
        return result_to_wire(getattr(self, method)(*arguments))

    def vectorlm_settings(self) -> dict[str, Any]:
        """Return the server's settings and its progress."""
        model, scheduler = self.vllm_config.model_config, self.vllm_config.scheduler_config
        return {
            "max_num_seqs": scheduler.max_num_seqs,
            "max_model_len": model.max_model_len,
            "logprobs_mode": str(model.logprobs_mode),
            "has_loaded": self._vectorlm_has_loaded,
            "num_steps": self._vectorlm_num_steps(),
        }

    def _vectorlm_num_steps(self) -> int | None:
        """Count the model's steps since the first call; None if other data-parallel engines compute too."""
        if self.vllm_config.parallel_config.data_parallel_size > 1:
            return None
        if self._vectorlm_steps is None:
            self._vectorlm_steps, execute = 0, self.model_runner.execute_model

            def execute_and_count(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
                self._vectorlm_steps += scheduled.total_num_scheduled_tokens > 0
                return execute(scheduled, *args, **kwargs)

            self.model_runner.execute_model = execute_and_count
        return self._vectorlm_steps


def to_wire(value: Any) -> Any:
    """Return `value` as JSON types."""
    return msgspec.to_builtins(value)


def arguments_from_wire(method: str, values: Sequence[Any]) -> list[Any]:
    """Decode the arguments of a call; raise `EngineError` for an unknown method or wrong types."""
    if method not in CALLS:
        raise EngineError(
            f"{method!r} is not a call of the weight channel. It must be one of {sorted(CALLS)}."
        )
    types, _ = CALLS[method]
    try:
        return [msgspec.convert(value, kind) for value, kind in zip(values, types, strict=True)]
    except (ValueError, TypeError) as error:
        raise EngineError(f"the arguments of {method} cannot be read: {error}") from error


def result_to_wire(result: CallResult) -> dict[str, Any]:
    """Encode the answer of a call, or the name and text of its error."""
    answer, error = result
    if error is not None:
        return {"error": type(error).__name__, "text": str(error)}
    return {"answer": to_wire(answer)}


def result_from_wire(method: str, value: Mapping[str, Any]) -> CallResult:
    """Decode the answer or error of a call; an error of another library becomes an `EngineError`."""
    if "error" not in value:
        return msgspec.convert(value["answer"], CALLS[method][1]), None
    kind = getattr(errors, value["error"], None)
    is_ours = isinstance(kind, type) and issubclass(kind, VectorLMError)
    return None, (kind if is_ours else EngineError)(value["text"])  # type: ignore[misc]
