"""The weights of a ``vllm.LLM`` that its user builds and samples from."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from vectorlm.errors import EngineError
from vectorlm.sampling.backends.served import ServedWeights


def weights_of_llm(model: str, *, receiver: str, llm: Any) -> ServedWeights:
    """Create the receivers in the workers of `llm`."""
    return ServedWeights(partial(_route, llm), receiver)


def _route(llm: Any, name: str, body: Mapping[str, Any] | None) -> Any:
    """Do what a server does at the route `name`."""
    try:
        match name:
            case "pause":
                # The same thread samples and updates: a request must not wait for the end of the update.
                llm.llm_engine.add_request = _refuse
            case "resume":
                vars(llm.llm_engine).pop("add_request", None)
            case "reset_prefix_cache":
                return llm.reset_prefix_cache(reset_running_requests=True)
            case "reset_encoder_cache":
                llm.llm_engine.reset_encoder_cache()
            case "start_weight_update":
                llm.start_weight_update()
            case "finish_weight_update":
                llm.finish_weight_update(**(body or {}))
            case _:
                getattr(llm, name)(body)
    except Exception as error:
        raise EngineError(f"vLLM refused {name}: {type(error).__name__}: {error}") from error


def _refuse(*args: Any, **options: Any) -> None:
    raise EngineError("the engine's weights are not proven, because an update failed. Call update() again.")
