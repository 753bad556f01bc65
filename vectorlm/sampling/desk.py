"""The engine protocol around a sampler that lives in rank 0's own process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from vectorlm.ranks.meeting import Meeting
from vectorlm.ranks.topology import Topology
from vectorlm.sampling.arguments import (
    as_list,
    one_each,
    require_in_flight,
    require_room_for_update,
    require_step,
    summary,
)
from vectorlm.sampling.hosts import Hosts
from vectorlm.sampling.readiness import Readiness
from vectorlm.sampling.requests import Answers, Request, Requests, Work
from vectorlm.types import InFlight, Prompt, UpdateReport

if TYPE_CHECKING:
    import torch


class LocalSampler(Protocol):
    """What stands behind a `Desk`, on rank 0."""

    def begin(self, prompts: Sequence[Prompt], sampling_params: Any) -> Work:
        """Make the work of one batch; raises where a prompt or a parameter is wrong."""
        ...

    def check(self, model: torch.nn.Module) -> None:
        """Raise `WeightMismatch` unless the weights of `model` can be taken over."""
        ...

    def replace(self, model: torch.nn.Module) -> int:
        """Take the weights of `model` over, while the other ranks `assist`; return the bytes replaced."""
        ...

    def drop(self) -> None:
        """Give the weights' memory away."""
        ...

    def restore(self) -> None:
        """Take the weights' memory back, with nothing in it."""
        ...


class Desk:
    """Takes the calls of all ranks, checks that they agree and keep to the rules, and has rank 0 do the work."""

    def __init__(
        self,
        load: Callable[[str], LocalSampler],
        assist: Callable[[torch.nn.Module], Any],
        *,
        topology: Topology | None,
        sampling_params: Any,
        timeout_s: float,
    ) -> None:
        """Have rank 0 load its sampler; an error there is raised on every rank.

        Args:
            load: Makes the sampler for a device.
            assist: What the other ranks do while the sampler takes a model's weights over.
            topology: This rank's place; read from the environment when omitted.
            sampling_params: Used where a call gives none.
            timeout_s: The longest silence, in seconds, that is tolerated from a rank.
        """
        self._topology = Topology.from_environment() if topology is None else topology
        self._meeting = Meeting(self._topology, timeout_s)
        self._hosts = Hosts(self._topology, self._meeting)
        self._assist = assist
        self._sampling_params = sampling_params
        self._requests = Requests(self._meeting)
        self._sampler: LocalSampler | None = None
        self.readiness = Readiness()
        """The rules."""

        def load_here() -> None:
            self._sampler = load(self._topology.device)

        self._hosts.each("load the engine", load_here, (0,))

    def submit(self, prompts: Sequence[Prompt] | str, sampling_params: Any) -> Request:
        """Queue a batch that is the same on every rank."""
        prompts = as_list(prompts)
        params = self._sampling_params if sampling_params is None else sampling_params
        self.readiness.require_sampling()
        self._hosts.agree("sample", (prompts, params), summary(prompts))
        return self._begin("sample", prompts, params)

    def sample(self, prompts: Sequence[Prompt] | str, sampling_params: Any) -> Answers:
        """Queue a batch and wait for it."""
        return _finish(self.submit(prompts, sampling_params))

    def sample_sharded(self, local_prompts: Sequence[Prompt], sampling_params: Any) -> Answers:
        """Answer every rank's prompts as one batch, and give each rank its own."""
        params = self._sampling_params if sampling_params is None else sampling_params
        self.readiness.require_sampling()

        def bring() -> tuple[list[Prompt], list[Any]]:
            prompts = as_list(local_prompts)
            return prompts, one_each(params, len(prompts))

        notes = self._hosts.together("sample sharded", bring)
        everything = [prompt for theirs, _ in notes for prompt in theirs]
        answers = _finish(
            self._begin("sample sharded", everything, [each for _, theirs in notes for each in theirs])
        )
        first = sum(len(theirs) for theirs, _ in notes[: self._topology.rank])
        return answers[first : first + len(notes[self._topology.rank][0])]

    def poll(self) -> list[Request]:
        """Return the batches that have finished since the last call."""
        self.readiness.require_open()
        return self._requests.poll()

    def update(self, model: torch.nn.Module, train_step: int, in_flight: InFlight) -> UpdateReport:
        """Take the weights of `model` over as version `train_step`."""
        require_step(train_step)
        require_in_flight(in_flight)
        self.readiness.require_open()
        start = time.perf_counter()
        self._hosts.agree("update", train_step, f"train_step={train_step}")
        if train_step == self.readiness.held_step:
            return UpdateReport(train_step, True, 0, 0.0, 0.0, time.perf_counter() - start)
        self._on_main("compare the models", lambda sampler: sampler.check(model))
        if in_flight == "drain":
            self._on_main("finish the requests", lambda _: self._requests.finish())
        num_under_way = self._meeting.share("update", self._requests.num_under_way)[0]
        require_room_for_update(num_under_way, in_flight)
        self._wake_weights()
        self.readiness.begin_update()
        copied_from = time.perf_counter()
        num_bytes = self._hosts.together("copy the weights", lambda: self._replace(model))[0]
        publish_s = time.perf_counter() - copied_from
        if in_flight == "recompute":
            self._requests.recompute()
        self.readiness.finish_update(train_step)
        stall_s = publish_s if num_under_way else 0.0
        total_s = time.perf_counter() - start
        return UpdateReport(train_step, False, num_bytes, publish_s, 0.0, total_s, stall_s)

    def sleep(self, *, weights: bool, kv_cache: bool) -> None:
        """Give memory away; nothing may be under way."""
        num_under_way = self._meeting.share("sleep", self._requests.num_under_way)[0]
        already = self.readiness.weights_sleep
        self.readiness.sleep(weights=weights, kv_cache=kv_cache, num_under_way=num_under_way)
        if weights and not already:
            self._on_main("drop the weights", lambda sampler: sampler.drop())

    def wake_up(self, *, weights: bool, kv_cache: bool) -> None:
        """Take memory back."""
        if weights:
            self._wake_weights()
        self.readiness.wake_up(weights=weights, kv_cache=kv_cache)

    def close(self) -> None:
        """Refuse everything from here on; not a collective."""
        self.readiness.close()
        self._meeting.close()

    def _begin(self, place: str, prompts: Sequence[Prompt], params: Any) -> Request:
        works: list[Work] = []
        self._on_main(place, lambda sampler: works.append(sampler.begin(prompts, params)))
        return self._requests.add(works[0] if works else None)

    def _wake_weights(self) -> None:
        self.readiness.require_open()
        if self.readiness.weights_sleep:
            self._on_main("wake the weights", lambda sampler: sampler.restore())

    def _replace(self, model: torch.nn.Module) -> Any:
        return self._assist(model) if self._sampler is None else self._sampler.replace(model)

    def _on_main(self, place: str, work: Callable[[LocalSampler], Any]) -> None:
        """Have rank 0 do `work`; an error of it is raised on every rank."""

        def act() -> None:
            assert self._sampler is not None
            work(self._sampler)

        self._hosts.each(place, act, (0,))


def _finish(request: Request) -> Answers:
    try:
        return request.result()
    except BaseException:
        # An interrupted call leaves nothing under way; one that failed is gone already.
        request.cancel()
        raise
