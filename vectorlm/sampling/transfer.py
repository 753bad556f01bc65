"""Send a trainer's weights to an engine that other code runs: a vLLM server, or a ``vllm.LLM`` of the trainer's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vectorlm.errors import LaunchError
from vectorlm.ranks.collectives import Collectives
from vectorlm.ranks.engine_ranks import EngineRanks
from vectorlm.ranks.topology import Topology
from vectorlm.sampling import messages
from vectorlm.sampling.arguments import require_update
from vectorlm.sampling.hot_swap import HotSwap
from vectorlm.sampling.inline_channel import InlineChannel
from vectorlm.sampling.settings import EngineSettings, Receivers, Transports
from vectorlm.settings import require_choice
from vectorlm.types import UpdateReport

USERS_LLM = "vectorlm.sampling.backends.vllm.in_process:weights_of_llm"


class WeightTransfer:
    """Verified updates of a vLLM engine with the weight-transfer backend ``vectorlm``, from any trainer.

    Every rank builds one and makes every call, in the same order. The launcher does not matter: torchrun, accelerate,
    plain processes with a process group, or a single process. All ranks are on the engine's machine.

    >>> with WeightTransfer(model, "http://127.0.0.1:8000") as transfer:  # doctest: +SKIP
    ...     transfer.update(step)

    Args:
        model: The trained model: plain, FSDP2, DistributedDataParallel or PEFT, whose adapters are merged into what is
            sent; or a `vectorlm.sampling.contract.WeightSource`.
        engine: The address of a vLLM server on this machine, or on every rank the ``vllm.LLM`` that it samples from.
        token: The token of `vectorlm serve`, or the server's API key; ``VECTORLM_SERVER_TOKEN`` if omitted.
        receiver: How an engine on CPU keeps weights: in place (`live`), repacked for its own kernels (`packed`), or
            `auto`.
        transport: How weights travel: `push`, `bucketed`, `pull` (CUDA), or `auto`.
        timeout_s: Longest silence tolerated from the engine or from a rank, in seconds.
        start_timeout_s: Seconds to wait for a server that is still starting.

    Raises:
        ValueError: `receiver` or `transport` is unknown.
        ConfigError: The address is not on this machine.
        EngineError: The engine does not answer, refuses the token, or runs without the backend.
        LaunchError: The ranks have no process group, or are on several machines.
    """

    def __init__(
        self,
        model: Any,
        engine: Any,
        token: str | None = None,
        *,
        receiver: Receivers = "auto",
        transport: Transports = "auto",
        timeout_s: float = 300.0,
        start_timeout_s: float = 60.0,
    ) -> None:
        require_choice("receiver", receiver, Receivers)
        require_choice("transport", transport, Transports)
        settings = EngineSettings(
            lora_mode="merged", receiver=receiver, transport=transport, timeout_s=timeout_s
        )
        require_update(model, 0, "recompute")
        self._model = model
        self._topology = topology = Topology.of_process_group(_device_of(model))
        self._collectives = Collectives(topology, timeout_s)
        is_served = isinstance(engine, str)
        num_engines = 1 if is_served else topology.world_size
        self._engine_ranks = EngineRanks(topology, self._collectives, num_engines)
        self._channel: InlineChannel | None = None
        try:
            machine = Path("/proc/sys/kernel/random/boot_id").read_text()
            if len({*self._collectives.all_gather_object("find the ranks' machine", machine)}) > 1:
                raise LaunchError(
                    f"{topology.world_size} ranks are on several machines: they must all be on the engine's."
                )
            self._engine_ranks.check_same_args(
                "connect to the engine", engine if is_served else None, "an engine"
            )
            if self._engine_ranks.owns_an_engine:
                arguments: Mapping[str, Any] = {"llm": engine}
                if is_served:
                    limits = {"silence_s": 0.9 * timeout_s, "start_timeout_s": start_timeout_s}
                    arguments = {"url": engine, "token": token, "samples": False, **limits}
                start = messages.Start("", arguments, receiver, "server" if is_served else USERS_LLM)
                self._channel = InlineChannel(start, self._collectives.show_life)
            self._ready: messages.Ready = self._ask_engines(start_timeout_s)
        except BaseException:
            self.close()
            raise
        self._swap = HotSwap(self._engine_ranks, self._channel, settings)

    def _ask_engines(self, start_timeout_s: float) -> messages.Ready:
        channel: Any = self._channel
        answers = self._engine_ranks.on_engine_ranks(
            "connect to the engine", lambda: channel.answer(0, start_timeout_s, "connecting")
        )
        return answers[0]

    @property
    def version(self) -> int:
        """The step of the last update that succeeded; -1 before the first."""
        return self._swap.version

    def update(self, step: int) -> UpdateReport:
        """Send the weights that the model holds now, prove that they arrived, and let the engine continue.

        Requests in flight wait, and continue with a recomputed KV cache. Every update empties the prefix cache.

        Args:
            step: The version of these weights, from 0; a server reports it at ``GET /weight_info``.

        Raises:
            WeightMismatch: Trainer and engine do not hold the same model; nothing has changed.
            NonFiniteWeights: The weights hold NaN or infinity; nothing has changed.
            ChecksumMismatch: The engine does not hold what was sent; it answers no request until an update succeeds.
            EngineDied, EngineTimeout: The engine has ended, or is silent.
            RankMismatch, HandoffTimeout, RankFailed: The ranks did not all make this call with the same step.
        """
        require_update(self._model, step, "recompute")
        self._collectives.require_open()
        # An engine may have been restarted since, or updated by another trainer.
        self._swap.forget()
        return self._swap.update(self._model, step, "recompute", self._ready.transports)

    def close(self) -> None:
        """Let go of the engine, which keeps the weights; safe to call twice, and not a collective."""
        if "_swap" in vars(self):
            self._swap.close()
        if self._channel is not None:
            self._channel.close()
        self._collectives.close()

    def __enter__(self) -> WeightTransfer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _device_of(model: Any) -> str:
    """Return the device of the model's first parameter."""
    tensors = model.parameters() if isinstance(model, torch.nn.Module) else ()
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    return str(device)
