"""A scripted engine for tests of your own loop: it needs no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vectorlm.ranks.topology import Topology
from vectorlm.sampling.engine import SamplingEngine
from vectorlm.types import InFlight, UpdateReport

if TYPE_CHECKING:
    import torch

    from vectorlm.sampling.contract import WeightSource


class FakeEngine(SamplingEngine):
    """A `SamplingEngine` without a model: it answers by a script, and keeps every other rule.

    >>> with FakeEngine(lambda prompt, version: f"{prompt} at step {version}") as engine:
    ...     engine.generate_text(["2 + 2"])
    ['2 + 2 at step -1']

    A token is a character: token ids are the code points of a text. `max_tokens` cuts an answer, `n` repeats it,
    `logprobs` gives each token -1; other parameters change nothing, but what `HFEngine` refuses is refused here too.

    Args:
        answers: A function of the prompt's text and the version, or texts that are handed out in turn.
        topology: This rank's place in the run; read from the environment when omitted.
        sampling_params: Used where a call gives none.
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
        self, model: torch.nn.Module | WeightSource, train_step: int, in_flight: InFlight = "refuse"
    ) -> UpdateReport:
        """Do what `SamplingEngine.update` does, and append the version to `updates`."""
        report = super().update(model, train_step, in_flight)
        if not report.skipped:
            self.updates.append(train_step)
        return report
