"""A scripted engine, for the tests of training loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from vectorlm.ranks.topology import Topology
from vectorlm.sampling.desk import Desk
from vectorlm.sampling.fake_sampler import FakeSampler
from vectorlm.sampling.requests import Answers, Request
from vectorlm.types import InFlight, Prompt, UpdateReport

if TYPE_CHECKING:
    import torch


class FakeEngine:
    """The `Engine` protocol without a model: it says what the script says, and keeps every other rule.

    >>> with FakeEngine(lambda prompt, version: f"{prompt} at step {version}") as engine:
    ...     engine.generate_text(["2 + 2"])
    ['2 + 2 at step -1']

    A token is a character: prompts and answers have the code points of their text as token ids. `max_tokens` cuts an
    answer where it is given, `n` repeats it, `logprobs` gives each token -1; the other parameters change nothing,
    but one that vLLM or `HFEngine` would refuse is refused here too.

    Args:
        answers: A function of prompt and version, or texts that are handed out in turn, prompt by prompt.
        topology: This rank's place in the run; read from the environment when omitted.
        sampling_params: Used where a call gives none.
        num_steps: Steps that each batch takes: `poll`, `done` and `result` take one at a time.
        timeout_s: The longest silence, in seconds, that is tolerated from a rank.
    """

    def __init__(
        self,
        answers: Callable[[Any, int], str] | Sequence[str],
        *,
        topology: Topology | None = None,
        sampling_params: Any = None,
        num_steps: int = 1,
        timeout_s: float = 60.0,
    ) -> None:
        self.updates: list[int] = []
        """The versions that were loaded, in order; a step that was skipped is not among them."""
        self._failures: dict[str, Exception] = {}

        def load(device: str) -> FakeSampler:
            return FakeSampler(answers, num_steps, lambda: self.version, self._failures)

        self._desk = Desk(
            load, lambda model: None, topology=topology, sampling_params=sampling_params, timeout_s=timeout_s
        )

    def fail_next(self, call: str, error: Exception) -> None:
        """Let the next ``sample`` (of whatever kind) or ``update`` raise `error`; made on all ranks.

        Raises:
            ValueError: `call` is neither.
        """
        if call not in ("sample", "update"):
            raise ValueError(f"call={call!r} cannot be told to fail: it must be 'sample' or 'update'.")
        self._failures[call] = error

    @property
    def version(self) -> int:
        """The training step that was loaded last; -1 before the first update."""
        return self._desk.readiness.version

    def sample(self, prompts: Sequence[Prompt] | str, sampling_params: Any = None) -> Answers:
        """Return the scripted completions of each prompt.

        Raises:
            RankMismatch: A rank passed other prompts or parameters than rank 0.
            EngineError: A parameter is unknown, the script has run out, or the engine sleeps or is closed.
        """
        return self._desk.sample(prompts, sampling_params)

    def sample_sharded(self, local_prompts: Sequence[Prompt], sampling_params: Any = None) -> Answers:
        """Return the completions of this rank's own prompts; raises as `sample` does."""
        return self._desk.sample_sharded(local_prompts, sampling_params)

    def generate_text(self, prompts: Sequence[Prompt] | str, sampling_params: Any = None) -> list[str]:
        """Return the first completion of each prompt as text; raises as `sample` does."""
        return [completions[0].text for completions in self.sample(prompts, sampling_params)]

    def submit(self, prompts: Sequence[Prompt] | str, sampling_params: Any = None) -> Request:
        """Queue a batch and return at once; raises as `sample` does."""
        return self._desk.submit(prompts, sampling_params)

    def poll(self) -> list[Request]:
        """Take one step; return the batches that have finished since last time."""
        return self._desk.poll()

    def update(self, model: torch.nn.Module, train_step: int, in_flight: InFlight = "refuse") -> UpdateReport:
        """Note the version; the first update says which parameters later models must have.

        Raises:
            WeightMismatch: The model is not the one of the first update.
            ValueError: `train_step` is negative.
            RankMismatch: Ranks passed different steps.
        """
        report = self._desk.update(model, train_step, in_flight)
        if not report.skipped:
            self.updates.append(train_step)
        return report

    def sleep(self, *, weights: bool = True, kv_cache: bool = True) -> None:
        """Keep the rules of sleep; there is no memory to give away."""
        self._desk.sleep(weights=weights, kv_cache=kv_cache)

    def wake_up(self, *, weights: bool = True, kv_cache: bool = True) -> None:
        """Keep the rules of waking up."""
        self._desk.wake_up(weights=weights, kv_cache=kv_cache)

    def close(self) -> None:
        """Refuse everything from here on."""
        self._desk.close()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
