"""The ranks' side of a hot swap: agree, stand still, publish, take over."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vectorlm.contracts import WeightSource
from vectorlm.errors import WeightMismatch
from vectorlm.sampling import messages as say
from vectorlm.types import InFlight, UpdateReport

if TYPE_CHECKING:
    import torch

    from vectorlm.ranks.topology import Topology
    from vectorlm.sampling.channel import Channel
    from vectorlm.sampling.hosts import Hosts
    from vectorlm.weights.adapter_publish import AdapterPublisher
    from vectorlm.weights.plan import Layout, TensorSpec
    from vectorlm.weights.publish import Publisher
    from vectorlm.weights.source_publisher import SourcePublisher

    AnyPublisher = Publisher | AdapterPublisher | SourcePublisher


class HotSwap:
    """Brings the trainer's weights into the engines, and knows which they hold."""

    def __init__(
        self,
        topology: Topology,
        hosts: Hosts,
        channel: Channel | None,
        *,
        lora_mode: str,
        silence_s: float,
        verify: bool,
    ) -> None:
        """Start with engines that hold their checkpoint.

        Args:
            topology: This rank's place in the run.
            hosts: The ranks that own a sampler.
            channel: The line to this rank's engine, on hosts.
            lora_mode: What an update of a PEFT model swaps: `adapter` or `merged`.
            silence_s: The longest silence that is tolerated from an engine.
            verify: Whether to prove each update by checksum.
        """
        self._topology = topology
        self._hosts = hosts
        self._channel = channel
        self._silence_s = silence_s
        self._lora_mode = lora_mode
        self._verify = verify
        self._publisher: AnyPublisher | None = None
        self._held_step: int | None = None
        self.version = -1
        """The training step of the last update that succeeded; -1 before the first."""

    def update(self, model: Any, train_step: int, in_flight: InFlight) -> UpdateReport:
        """Do what `SamplingEngine.update` says, on engines that are ready."""
        start = time.perf_counter()
        self._hosts.agree("update", train_step, f"train_step={train_step}")
        if train_step == self._held_step:
            return UpdateReport(train_step, True, 0, 0.0, 0.0, time.perf_counter() - start)
        publisher = self._connect(model)
        # Every rank finds out whether its part can be sent before any rank writes a byte.
        shares: list[Any] = []
        self._hosts.together("prepare the update", lambda: shares.extend(publisher.shares(model)))
        # From here until the engines have proven the new weights, nobody knows what they hold.
        self._held_step = None
        self._hosts.each("begin the update", lambda: self._call(say.BeginUpdate(in_flight)))
        published_from = time.perf_counter()
        sums = self._hosts.together("publish weights", lambda: publisher.write(shares, self._verify))
        publish_s = time.perf_counter() - published_from
        totals = self._of_node(sums) if self._verify else None
        finish = say.FinishUpdate(train_step, totals, publisher.swapped)
        updated = self._hosts.each("finish the update", lambda: self._call(finish))
        self.version = self._held_step = train_step
        load_s = max(answer.load_s for answer in updated)
        total_s = time.perf_counter() - start
        stall_s = max(answer.stall_s for answer in updated)
        return UpdateReport(
            train_step, False, publisher.num_bytes, publish_s, load_s, total_s, stall_s, updated[0].busy
        )

    def forget(self) -> None:
        """Take note that the engines' weights are lost: the next update moves them whatever its step."""
        self._held_step = None

    def close(self) -> None:
        """Let go of the arena."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def _connect(self, model: Any) -> AnyPublisher:
        """Agree with the engines on what will be sent and where: once, and for adapters whenever they are others."""
        from vectorlm.weights.adapter_publish import AdapterPublisher, make_publisher
        from vectorlm.weights.plan import manifest_of
        from vectorlm.weights.source_publisher import SourcePublisher

        is_source = isinstance(model, WeightSource)
        if self._publisher is None:
            layout = self._lay_out(model.manifest() if is_source else manifest_of(model), "base")

            def attach() -> None:
                self._publisher = (
                    SourcePublisher(layout)
                    if is_source
                    else make_publisher(layout, self._topology, self._lora_mode)
                )

            self._hosts.together("map the arena", attach)
        assert self._publisher is not None
        if isinstance(self._publisher, SourcePublisher) != is_source:
            raise WeightMismatch(
                "this engine was connected to a trainer of the other kind, a torch.nn.Module or a WeightSource: build "
                "one engine for each."
            )
        if isinstance(self._publisher, AdapterPublisher):
            self._connect_adapter(self._publisher, model)
        return self._publisher

    def _connect_adapter(self, publisher: AdapterPublisher, model: torch.nn.Module) -> None:
        looks = self._hosts.together("look at the adapters", lambda: publisher.look(model))
        manifest, with_base = looks[0][0], self._held_step is None or any(changed for _, changed in looks)
        is_new = manifest and manifest != publisher.manifest
        layout = self._lay_out(manifest, "adapter") if is_new else None
        self._hosts.together("map the adapters", lambda: publisher.prepare(with_base, manifest, layout))

    def _lay_out(self, manifest: Sequence[TensorSpec], part: str) -> Layout:
        """Have the first engine of each node make an arena for `manifest`, and the others of the node share it."""
        first = self._hosts.first_of_node
        make = say.Connect(manifest, None, part)
        made = self._hosts.each(f"connect the {part}", lambda: self._call(make), first)
        layout: Layout = made[self._topology.node].layout
        join = say.Connect(manifest, layout.path, part)
        others = tuple(host for host in self._hosts.ranks if host not in first)
        self._hosts.each(f"share the arena of the {part}", lambda: self._call(join), others)
        return layout

    def _call(self, command: Any) -> Any:
        assert self._channel is not None
        return self._channel.call(command, self._silence_s)

    def _of_node(self, sums: Sequence[Sequence[int]]) -> list[int]:
        """Add up what the ranks of this node wrote: together they wrote the whole model into the node's arena."""
        per_node = self._topology.local_world_size
        near = sums[self._topology.node * per_node :][:per_node]
        return [sum(parts) % 2**64 for parts in zip(*near, strict=True)]
