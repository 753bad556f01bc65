"""Engines that sample in the ranks' own processes: `FakeEngine` from a script, `HFEngine` with transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vectorlm.data.settings import PLAIN_CHAT, ChatSettings
from vectorlm.ranks.topology import Topology
from vectorlm.sampling.contract import WeightSource
from vectorlm.sampling.engine import SamplingEngine
from vectorlm.types import POLICY, InFlight, UpdateReport


class FakeEngine(SamplingEngine):
    """A `SamplingEngine` without a model: it answers from a script, and keeps all other rules.

    >>> with FakeEngine(lambda prompt, version: f"{prompt} at step {version}") as engine:
    ...     engine.generate_text(["2 + 2"])
    ['2 + 2 at step -1']

    A token is a character: token ids are the code points of a text. `max_tokens` cuts an answer, `n` repeats it,
    `logprobs` gives each token -1; other parameters change nothing. It refuses the parameters that `HFEngine` refuses.

    Args:
        answers: A function of the prompt's text and the version, or texts, each of which is returned once, in order.
        topology: This rank's place in the run; read from the environment when omitted.
        sampling_params: Sampling parameters of calls without their own.
        num_steps: Steps that each batch takes: `poll`, `done` and `result` take one at a time.
        timeout_s: Longest silence tolerated from a rank, in seconds.
    """

    def __init__(
        self,
        answers: Callable[[str, int], str] | Sequence[str],
        *,
        topology: Topology | None = None,
        sampling_params: Any = None,
        num_steps: int = 1,
        timeout_s: float = 60.0,
    ) -> None:
        self.updates: list[int] = []
        """The versions that were loaded, in order; skipped updates are left out."""
        self._failures: dict[str, Exception] = {}
        super().__init__(
            "scripted",
            topology=topology,
            sampling_params=sampling_params,
            inference="vectorlm.sampling.backends.scripted:Scripted",
            channel="inline",
            timeout_s=timeout_s,
            answers=answers,
            num_steps=num_steps,
            failures=self._failures,
        )

    def fail_next(self, call: str, error: Exception) -> None:
        """Let the next ``sample`` (of any kind) or ``update`` raise `error`; called on all ranks."""
        if call not in ("sample", "update"):
            raise ValueError(f"call={call!r} cannot be told to fail: it must be 'sample' or 'update'.")
        self._failures[call] = error

    def update(
        self,
        model: torch.nn.Module | WeightSource,
        train_step: int,
        in_flight: InFlight = "refuse",
        name: str = POLICY,
    ) -> UpdateReport:
        """Do what `SamplingEngine.update` does, and append the version to `updates`."""
        report = super().update(model, train_step, in_flight, name)
        if not report.skipped:
            self.updates.append(train_step)
        return report


class HFEngine(SamplingEngine):
    """A `SamplingEngine` that samples with transformers in the ranks' own processes.

    Rank 0 holds a copy of the model and samples (on several nodes the first rank of each does); the others wait for its
    results. There is no second process and no thread: requests in flight continue inside `poll`, `done` and
    `result`. Log-probabilities are of the sampling distribution: after penalties, temperature and cuts.

    >>> with HFEngine("path/to/model") as engine:  # doctest: +SKIP
    ...     engine.update(model, train_step=10)
    ...     print(engine.generate_text(["2 + 2 ="]))

    Args:
        model_path: A Hugging Face model folder.
        topology: This rank's place in the run; read from the environment when omitted.
        sampling_params: Sampling parameters of calls without their own: a mapping with the fields of `Parameters`.
        dtype: The copy's precision, as torch spells it.
        batch_size: Number of completions that are sampled together.
        max_model_len: Longest prompt and completion together, in tokens; the model's own limit when omitted.
        logprobs_mode: `processed_logprobs`; or `raw_logprobs`, taken before penalties, temperature and cuts.
        timeout_s: Longest silence tolerated from a rank, in seconds.
        chat: The chat template.
        tokenizer: The folder of the tokenizer; the model's when omitted.
        trust_remote_code: Run the Python files of a model that brings its own.

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
        max_model_len: int | None = None,
        logprobs_mode: str = "processed_logprobs",
        timeout_s: float = 300.0,
        chat: ChatSettings = PLAIN_CHAT,
        tokenizer: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        topology = Topology.from_environment() if topology is None else topology
        super().__init__(
            model_path,
            chat=chat,
            topology=topology,
            sampling_params=sampling_params,
            inference="transformers",
            channel="inline",
            timeout_s=timeout_s,
            dtype=dtype,
            max_num_seqs=batch_size,
            max_model_len=max_model_len,
            logprobs_mode=logprobs_mode,
            device=topology.device,
            tokenizer=tokenizer,
            trust_remote_code=trust_remote_code,
        )
        self.wait_until_ready()
