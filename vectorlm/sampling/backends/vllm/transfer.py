"""The weight-transfer engine ``vectorlm`` in vLLM's workers."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from vectorlm.errors import EngineError
from vectorlm.ranks.engine_ranks import capture, results_or_first_error
from vectorlm.sampling.backends.vllm.extension import WeightExtension
from vectorlm.sampling.backends.vllm.workers import remove_reduction_buffers
from vectorlm.sampling.weights.copy_list import CopyList
from vectorlm.sampling.weights.plan import BASE
from vectorlm.sampling.weights.wire import UPDATE_CALLS, append_answer, arguments_from_wire

POLL_S = 0.25
TITLES = ("VLLM::EngineCor", "VLLM::Worker")
"""Names of the processes that a server starts, as the kernel truncates them."""


@dataclass
class Call(WeightTransferInitInfo, WeightTransferUpdateInfo):
    """A call of a trainer to all workers, as vLLM's requests carry it."""

    trainer: str
    """The name that the trainer chose for itself."""
    answers: str
    """The path of the trainer's `Answers`."""
    number: int
    method: str
    """A key of `CALLS`."""
    values: Sequence[Any]
    """The arguments, in JSON."""


class TransferEngine(WeightTransferEngine[Call, Call]):
    """The receivers of one worker, behind vLLM's requests for weight transfer.

    ``init_weight_transfer_engine`` and ``update_weights`` carry a `Call`. Its answer goes into the trainer's file,
    because vLLM's requests return nothing. The trainer that was the last to attach its memory owns the weights.
    """

    init_info_cls = update_info_cls = Call
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        """Receive weights for `model`; vLLM calls this after it has loaded the model."""
        super().__init__(config, vllm_config, device, model)
        self._runner = _Runner(model, vllm_config)
        self._receivers: dict[str, Any] = {}
        """Receivers of the owner and of trainers that have not attached their memory yet, by trainer."""
        self._owner = ""
        self._copies: CopyList | None = None
        """The copies of the last trainer that released or lost the weights."""
        self._has_loaded = self._is_loaded = False
        self.is_packed = False
        """Whether layers compute with packed copies of their weights."""
        self._is_whole = True
        """Whether the last update was finished with its weights; True before the first."""
        self._is_active = self._is_given_up = False
        """Whether vLLM's worker is in an update, and whether that update is to end without weights."""
        _follow_server()

    def init_transfer_engine(self, init_info: Call) -> None:
        """Carry out a call outside of updates."""
        self._answer(init_info)

    def start_weight_update(self) -> None:
        """Begin an update: the trainer's ranks are about to write."""
        self._is_whole = self._is_loaded = False
        self._is_active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Carry out a call of an update. vLLM's own method waits for an accelerator, and torch for CPU has none."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self._is_active = False  # After an error vLLM's worker is no longer in an update.
            raise

    def receive_weights(self, update_info: Call) -> None:
        """Carry out a call of an update."""
        self._answer(update_info)

    def finish_weight_update(self) -> None:
        """End an update; raise `EngineError` if its weights were not loaded, unless it is given up."""
        if not self._is_loaded and not self._is_given_up:
            raise EngineError("the update has not loaded its weights. Send them again.")
        self._is_whole = not self._is_given_up
        self._is_active = self._is_given_up = False

    def shutdown(self) -> None:
        """Let go of the trainer's memory, except for an arena that the model computes with."""
        if self._owner:
            self._copies = self._receivers[self._owner]._vectorlm_receivers[BASE].copies
            if self._copies is not None:
                self._copies.close()
        self._owner, self._receivers = "", {}

    def _answer(self, call: Call) -> None:
        append_answer(call.answers, call.number, capture(lambda: self._carry_out(call), "the worker"))

    def _carry_out(self, call: Call) -> Any:
        method, arguments = call.method, arguments_from_wire(call.method, call.values)
        match method:
            case "vectorlm_settings":
                return self._settings()
            case "vectorlm_release":
                return self.shutdown() if call.trainer == self._owner else None
            case "vectorlm_claim":
                return self._claim(call.trainer)
            case "vectorlm_begin":
                self._receiver(call.trainer, must_own=True)
                self._is_given_up = self._is_active
                return self._is_active
            case "vectorlm_attach":
                self._claim(call.trainer)
            case "vectorlm_prepare":
                self._receivers[call.trainer] = WeightExtension()
                self._receivers[call.trainer]._vectorlm_may_be_quantised = False
                self._receivers[call.trainer].model_runner = self._runner
                # Packed layers would continue to compute with the old packed weights.
                arguments = ["packed"] if self.is_packed else arguments
        receiver = self._receiver(call.trainer, must_own=method in UPDATE_CALLS)
        self._has_loaded |= method == "vectorlm_load"  # Before the call: it may fail half way.
        (answer,) = results_or_first_error([getattr(receiver, method)(*arguments)])
        self.is_packed |= method == "vectorlm_prepare" and answer == "packed"
        self._is_loaded |= method == "vectorlm_load"
        return answer

    def _receiver(self, trainer: str, must_own: bool = False) -> Any:
        if trainer not in self._receivers or (must_own and trainer != self._owner):
            raise EngineError(
                "another trainer has connected to this engine meanwhile, or the engine was restarted. Connect again."
            )
        return self._receivers[trainer]

    def _claim(self, trainer: str) -> None:
        """Make `trainer` the owner."""
        receiver = self._receiver(trainer)
        if trainer == self._owner:
            return
        self.shutdown()
        # The model may compute with the earlier trainer's arena, which the new one replaces.
        receiver._vectorlm_receivers[BASE].copies, self._copies = self._copies, None
        self._owner, self._receivers = trainer, {trainer: receiver}

    def _settings(self) -> Mapping[str, Any]:
        if self.device.type == "cpu":
            # All workers have mapped them; a killed engine could not remove the names.
            remove_reduction_buffers([os.getpid()])
        return {
            "max_num_seqs": self.vllm_config.scheduler_config.max_num_seqs,
            "max_model_len": self.model_config.max_model_len,
            "logprobs_mode": str(self.model_config.logprobs_mode),
            "has_loaded": self._has_loaded,
            "is_whole": self._is_whole,
            "device": self.device.type,
        }


class _Runner:
    """The parts of vLLM's model runner that `WeightExtension` uses and a weight-transfer engine can see."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        self._model, self._vllm_config = model, vllm_config
        self.model_config = vllm_config.model_config

    def get_model(self) -> torch.nn.Module:
        return self._model

    @property
    def kv_caches(self) -> list[Any]:
        layers = self._vllm_config.compilation_config.static_forward_context.values()
        return [cache for layer in layers if (cache := getattr(layer, "kv_cache", None)) is not None]


def _follow_server() -> None:
    """End engine and worker soon after the process that started the engine has ended, even if it was killed.

    vllm 0.32: if a server is killed, its engine waits for requests forever and keeps the shared memory.
    """
    links, pid = [], os.getpid()
    while _status(pid, "Name").startswith(TITLES) and (parent := int(_status(pid, "PPid"))) > 1:
        links.append((pid, parent))
        pid = parent

    def follow() -> None:
        while all(_status(child, "PPid") == str(parent) for child, parent in links):
            time.sleep(POLL_S)
        for child, _ in reversed(links):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    if links:
        threading.Thread(target=follow, name="follow-server", daemon=True).start()


def _status(pid: int, field: str) -> str:
    """Return a field of a process's status; empty if there is no such process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return ""
    return next(line.partition(":")[2].strip() for line in lines if line.startswith(f"{field}:"))
