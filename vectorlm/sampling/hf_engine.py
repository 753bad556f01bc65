"""An engine made of transformers alone, for machines and models that vLLM does not support."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vectorlm.ranks.topology import Topology
from vectorlm.sampling.desk import Desk
from vectorlm.sampling.hf_sampler import HFSampler
from vectorlm.sampling.requests import Answers, Request
from vectorlm.types import InFlight, Prompt, UpdateReport
from vectorlm.weights.whole import copy_whole

if TYPE_CHECKING:
    import torch


class HFEngine:
    """The `Engine` protocol over ``transformers.generate``.

    Rank 0 holds a copy of the model and does the sampling; the others wait for its results, which are therefore the
    same everywhere. There is no second process and no thread: requests under way go on inside `poll`, `done` and
    `result`.

    >>> with HFEngine("path/to/model") as engine:  # doctest: +SKIP
    ...     engine.update(model, train_step=10)
    ...     print(engine.generate_text(["2 + 2 ="]))

    Args:
        model_path: A Hugging Face model folder.
        topology: This rank's place in the run; read from the environment when omitted.
        sampling_params: Used where a call gives none; a mapping, whose names are fields of `Parameters`.
        dtype: The copy's precision, as torch spells it.
        batch_size: Completions that are continued together.
        timeout_s: The longest silence, in seconds, that is tolerated from a rank.

    Raises:
        EngineError: The model cannot be loaded.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        topology: Topology | None = None,
        sampling_params: Any = None,
        dtype: str = "float32",
        batch_size: int = 64,
        timeout_s: float = 300.0,
    ) -> None:
        def load(device: str) -> HFSampler:
            return HFSampler(model_path, device, dtype, batch_size, lambda: self.version)

        self._desk = Desk(
            load,
            lambda model: copy_whole(model, None),
            topology=topology,
            sampling_params=sampling_params,
            timeout_s=timeout_s,
        )

    @property
    def version(self) -> int:
        """The training step whose weights the engine holds; -1 for the checkpoint that it was started from."""
        return self._desk.readiness.version

    def sample(self, prompts: Sequence[Prompt] | str, sampling_params: Any = None) -> Answers:
        """Return the completions of each prompt, in the order of the prompts.

        Log-probabilities are those of the model as it is: before penalties, temperature and cuts, as vLLM's default.

        Args:
            prompts: Text, chat messages or token ids; the same on every rank.
            sampling_params: A mapping, or one for each prompt; the engine's own when omitted.

        Raises:
            RankMismatch: A rank passed other prompts or parameters than rank 0.
            EngineError: A prompt or a parameter cannot be honoured, the engine sleeps or is closed, or the model
                raised.
            HandoffTimeout: A rank did not make this call within the deadline.
        """
        return self._desk.sample(prompts, sampling_params)

    def sample_sharded(self, local_prompts: Sequence[Prompt], sampling_params: Any = None) -> Answers:
        """Return the completions of this rank's own prompts, by parameters that may differ between ranks."""
        return self._desk.sample_sharded(local_prompts, sampling_params)

    def generate_text(self, prompts: Sequence[Prompt] | str, sampling_params: Any = None) -> list[str]:
        """Return the first completion of each prompt as text; raises as `sample` does."""
        return [completions[0].text for completions in self.sample(prompts, sampling_params)]

    def submit(self, prompts: Sequence[Prompt] | str, sampling_params: Any = None) -> Request:
        """Queue a batch and return at once; raises as `sample` does."""
        return self._desk.submit(prompts, sampling_params)

    def poll(self) -> list[Request]:
        """Go on with the oldest batch for a second at most; return the batches that have finished since last time."""
        return self._desk.poll()

    def update(self, model: torch.nn.Module, train_step: int, in_flight: InFlight = "refuse") -> UpdateReport:
        """Copy the weights of `model` into rank 0's copy, a parameter at a time.

        Requests under way are treated as `in_flight` says, as in `SamplingEngine.update`.

        Raises:
            WeightMismatch: The models do not have the same parameters; nothing has changed.
            ValueError: `train_step` is negative.
            RankMismatch: Ranks passed different steps.
            EngineError, HandoffTimeout: As for `sample`.
        """
        return self._desk.update(model, train_step, in_flight)

    def sleep(self, *, weights: bool = True, kv_cache: bool = True) -> None:
        """Free the weights' memory; caches live no longer than the requests that need them.

        Raises:
            EngineError: Requests are under way.
        """
        self._desk.sleep(weights=weights, kv_cache=kv_cache)

    def wake_up(self, *, weights: bool = True, kv_cache: bool = True) -> None:
        """Take the memory back; weights that slept hold nothing until the next `update`."""
        self._desk.wake_up(weights=weights, kv_cache=kv_cache)

    def close(self) -> None:
        """Let go of the model; safe to call twice, and not a collective."""
        self._desk.close()

    def __enter__(self) -> HFEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
