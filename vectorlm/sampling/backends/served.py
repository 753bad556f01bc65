"""The weights of a vLLM engine with the weight-transfer backend ``vectorlm``, through vLLM's own calls."""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vectorlm.errors import EngineDied, EngineError, EngineTimeout, TokenRefused
from vectorlm.ranks.engine_ranks import CallResult, results_or_first_error
from vectorlm.sampling.weights.plan import Layout, TensorSpec
from vectorlm.sampling.weights.receive import EngineReceiver
from vectorlm.sampling.weights.wire import UPDATE_CALLS, Answers, result_from_wire, to_wire

NEEDS = '--weight-transfer-config \'{"backend": "vectorlm"}\' and VLLM_SERVER_DEV_MODE=1'


Route = Callable[[str, Mapping[str, Any] | None], Any]
"""A function that makes a request to the engine, given vLLM's route and the body; it raises `EngineError`."""


class ServedWeights:
    """The weights of an engine that other code or another process drives; a `Backend` without requests."""

    def __init__(self, route: Route, receiver: str) -> None:
        """Create the receivers in the engine's workers; an earlier trainer owns the weights until `connect`.

        Raises:
            EngineError: The engine runs without the backend, or its workers cannot reach this process.
        """
        self._route, self._answers = route, Answers()
        self._trainer, self._numbers = uuid.uuid4().hex, itertools.count()
        try:
            self.settings: Mapping[str, Any] = self._ask("vectorlm_settings")[0]
        except (EngineDied, EngineTimeout, TokenRefused):
            raise
        except EngineError as error:
            raise EngineError(f"{error} To take weights, an engine must be started with {NEEDS}.") from error
        self._is_whole = bool(self.settings["is_whole"])
        self._receiver = EngineReceiver(self._collective_rpc, receiver)
        self.receiver, self.copy_round = self._receiver.kind, self._receiver.copy_round
        self.open_handles = self._receiver.open_handles
        on_cuda = self.settings["device"] == "cuda"
        self.transports: Sequence[str] = ("push", "bucketed", *(["pull"] if on_cuda else []))
        self.max_num_seqs: int = self.settings["max_num_seqs"]
        self.version = -1
        self._may_hold_nan = False

    def claim(self) -> None:
        """Take the weights from the trainer that owns them."""
        self._ask("vectorlm_claim")

    def connect(
        self,
        manifest: Sequence[TensorSpec],
        arena_path: str | None,
        weight_set: str,
        arena_bytes: int | None = None,
    ) -> Layout:
        """Match the trainer's tensors with the engine's."""
        if weight_set != "base":
            raise EngineError("lora_mode='adapter' does not work with a vLLM server. Use lora_mode='merged'.")
        return self._receiver.connect(manifest, arena_path, weight_set, arena_bytes)

    def pause(self) -> None:
        """Let requests wait, and begin an update, even if an earlier trainer died during one."""
        # This call is first: a trainer that no longer owns the weights must not pause another trainer's engine.
        was_begun = any(self._ask("vectorlm_begin"))
        self._route("pause", None)
        try:
            if was_begun:
                # vLLM's worker refuses a second update. The call must not fail in a worker: with several workers, vLLM
                # 0.32 would then take the answers of one call for the answers of the next.
                self._route("finish_weight_update", {})
            self._route("start_weight_update", None)
        except EngineError:
            with contextlib.suppress(EngineError):
                self.resume()
            raise
        self._is_whole = False

    def load(
        self, version: int, checksums: Sequence[int] | None, weight_sets: Sequence[str], recompute: bool
    ) -> float:
        """Load the new weights, prove them, and let the engine mark tokens with their version."""
        load_s = self._receiver.load(version, checksums, weight_sets)
        if recompute or self._may_hold_nan:
            self.forget_prefixes()
        self._route("reset_encoder_cache", None)
        if self._may_hold_nan:
            self._receiver.empty_kv_cache()
        self._route("finish_weight_update", {"weight_version": str(version)})
        self._is_whole, self._may_hold_nan, self.version = True, False, version
        return load_s

    def forget_prefixes(self) -> None:
        """Drop every block of the KV cache; all requests in flight, of other clients too, recompute theirs."""
        if not self._route("reset_prefix_cache", None):
            raise EngineError("the engine's prefix cache still holds blocks of the old weights.")

    def expect_nan(self) -> None:
        """Overwrite the whole KV cache at the next update, for the engine's other clients too."""
        self._may_hold_nan = True

    def resume(self) -> None:
        """Let requests continue, unless the engine holds weights that are not proven."""
        if self._is_whole:
            self._route("resume", None)

    def sleep(self, parts: frozenset[str], asleep: frozenset[str]) -> None:
        """Empty the prefix cache; the engine keeps its memory."""
        self.forget_prefixes()

    def wake_up(self, parts: frozenset[str]) -> None:
        """Do nothing: the engine kept its memory."""

    def close(self) -> None:
        """Let the engine's workers forget this trainer's memory, except for what the engine computes with."""
        with contextlib.suppress(EngineError):
            self._ask("vectorlm_release")
        self._receiver.close()
        self._answers.close()

    def _ask(self, method: str) -> list[Any]:
        return results_or_first_error(self._collective_rpc(method))

    def _collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[CallResult]:
        """Stand in for an engine's ``collective_rpc``, for `EngineReceiver`."""
        number = next(self._numbers)
        call = {"trainer": self._trainer, "answers": self._answers.path, "number": number, "method": method}
        call["values"] = [to_wire(value) for value in args]
        if method in UPDATE_CALLS:
            self._route("update_weights", {"update_info": call})
        else:
            self._route("init_weight_transfer_engine", {"init_info": call})
        if not (answers := self._answers.read(number)):
            raise EngineError(f"no worker of the engine has answered {method}.")
        return [result_from_wire(method, answer) for answer in answers]
