"""The ranks' side of a hot swap: agree, pause the engines, publish, let the engines load."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vectorlm.contracts import WeightSet, WeightSource
from vectorlm.engine import messages
from vectorlm.errors import EngineDied, WeightMismatch
from vectorlm.plugin import load_plugin
from vectorlm.types import InFlight, UpdateReport
from vectorlm.weights.plan import BASE, adapter_prefixes, require_same

if TYPE_CHECKING:
    from vectorlm.dist.engine_ranks import EngineRanks
    from vectorlm.dist.topology import Topology
    from vectorlm.weights.arena import MappedArenas
    from vectorlm.weights.plan import Layout

LORA_WEIGHT_SETS = "vectorlm.lora.sources:lora_weight_sets"


class HotSwap:
    """Brings the trainer's weights into the engines, and knows which they hold."""

    def __init__(
        self,
        topology: Topology,
        engine_ranks: EngineRanks,
        channel: messages.Channel | None,
        *,
        lora_mode: str,
        silence_s: float,
        verify: bool,
    ) -> None:
        """Start with engines that hold their checkpoint; `channel` leads to this rank's engine, if it owns one."""
        self._topology = topology
        self._engine_ranks = engine_ranks
        self._channel = channel
        self._silence_s = silence_s
        self._lora_mode = lora_mode
        self._verify = verify
        self._arenas: MappedArenas | None = None
        self._layouts: dict[str, Layout] = {}
        self._held_step: int | None = None
        self._held: dict[str, object] = {}
        self._sent_changes: dict[int, int] = {}
        self.version = -1
        """The training step of the last update that succeeded; -1 before the first."""

    def update(self, model: Any, train_step: int, in_flight: InFlight) -> UpdateReport:
        """Do what `SamplingEngine.update` says, on engines that are ready."""
        start = time.perf_counter()
        self._engine_ranks.check_same_args("update", train_step, f"train_step={train_step}")
        if train_step == self._held_step:
            sent, now = self._sent_changes, _changes(model)
            if any(sent.get(each, count) != count for each, count in now.items()):
                warnings.warn(
                    f"the weights have changed since they were sent as step {train_step}, but the step has not: "
                    "nothing is sent. Pass another step.",
                    stacklevel=3,
                )
            return UpdateReport(train_step, True, 0, 0.0, 0.0, time.perf_counter() - start)
        crossing = self._prepare(model)
        # From here until the engines have proven the new weights, nobody knows what they hold.
        self._held_step = None
        begin = messages.BeginUpdate(in_flight)
        self._engine_ranks.on_engine_ranks("begin the update", lambda: self._call(begin))
        published_from = time.perf_counter()
        sums = self._while_engines_live("publish weights", lambda: self._publish(crossing))
        publish_s = time.perf_counter() - published_from
        totals = self._sum_over_node(sums) if self._verify else None
        finish = messages.FinishUpdate(train_step, totals, tuple(each.name for each in crossing))
        updated = self._engine_ranks.on_engine_ranks("finish the update", lambda: self._call(finish))
        self.version = self._held_step = train_step
        self._sent_changes = _changes(model)
        slots = (slot for each in crossing for slot in self._layouts[each.name].slots)
        return UpdateReport(
            train_step,
            skipped=False,
            num_bytes=sum(slot.num_bytes for slot in slots),
            publish_s=publish_s,
            load_s=max(answer.load_s for answer in updated),
            total_s=time.perf_counter() - start,
            stall_s=max(answer.stall_s for answer in updated),
            busy=updated[0].busy,
        )

    def forget(self) -> None:
        """Take note that the engines' weights are lost: the next update moves them, whatever its step."""
        self._held_step = None

    def close(self) -> None:
        """Let go of the arenas."""
        if self._arenas is not None:
            self._arenas.close()
            self._arenas = None

    def _prepare(self, model: Any) -> list[WeightSet]:
        """Return the weight sets that must be sent, once every rank knows that it can send its shards."""
        sets: list[WeightSet] = []

        def look() -> list[tuple[str, bool, bool]]:
            sets.extend(self._weight_sets(model))
            held = [self._is_held(each) for each in sets]
            return [(each.name, has, has or self._fits(each)) for each, has in zip(sets, held, strict=True)]

        looks = self._engine_ranks.on_all_ranks("prepare the update", look)
        if any([name for name, *_ in theirs] != [each.name for each in sets] for theirs in looks):
            raise WeightMismatch("the model has active adapters on some ranks and none on others.")
        crossing, to_check = [], []
        for each, *notes in zip(sets, *looks, strict=True):
            _, held, fits = zip(*notes, strict=True)
            if not all(fits):
                self._connect(each)
            if not all(held):
                crossing.append(each)
            if not all(fits) or (any(held) and not all(held)):
                to_check.append(each)
        if to_check:
            self._while_engines_live("map the arena", lambda: self._check_and_map(model, to_check))
        return crossing

    def _weight_sets(self, model: Any) -> Sequence[WeightSet]:
        """Wrap `model` in the sources that send it; they check that this rank can send its shards."""
        if isinstance(model, WeightSource):
            return [WeightSet(BASE, model)]
        from vectorlm.weights.arena import MappedArenas
        from vectorlm.weights.module_source import ModuleSource

        if self._arenas is None:
            self._arenas = MappedArenas()
        if adapter_prefixes(model):
            lora_weight_sets = load_plugin(LORA_WEIGHT_SETS)
            sets: list[WeightSet] = lora_weight_sets(model, self._topology, self._arenas, self._lora_mode)
            return sets
        return [WeightSet(BASE, ModuleSource(model, self._topology, self._arenas))]

    def _fits(self, weight_set: WeightSet) -> bool:
        """Return whether the engines are connected for these tensors; other base tensors raise."""
        if weight_set.name not in self._layouts:
            return False
        slots = self._layouts[weight_set.name].slots
        if weight_set.name == BASE:
            require_same(weight_set.source.manifest(), slots)
            return True
        sent = [(spec.name, tuple(spec.shape)) for spec in weight_set.source.manifest()]
        return sent == [(slot.name, slot.shape) for slot in slots]

    def _is_held(self, weight_set: WeightSet) -> bool:
        is_whole, fingerprint = self._held_step is not None, weight_set.fingerprint
        return is_whole and fingerprint is not None and fingerprint == self._held.get(weight_set.name)

    def _connect(self, weight_set: WeightSet) -> None:
        """Have the first engine of each node make an arena for the set, and the other engines open it."""
        name, manifest = weight_set.name, tuple(weight_set.source.manifest())
        first = self._engine_ranks.first_of_node
        make = messages.Connect(manifest, None, name)
        made = self._engine_ranks.on_engine_ranks(f"connect the {name}", lambda: self._call(make), first)
        layout: Layout = made[self._topology.node]
        join = messages.Connect(manifest, layout.path, name)
        others = tuple(rank for rank in self._engine_ranks.ranks if rank not in first)
        self._engine_ranks.on_engine_ranks(f"share the arena of the {name}", lambda: self._call(join), others)
        if name in self._layouts and self._arenas is not None:
            self._arenas.drop(self._layouts[name])
        self._layouts[name] = layout

    def _check_and_map(self, model: Any, weight_sets: Sequence[WeightSet]) -> None:
        for each in weight_sets:
            layout = self._layouts[each.name]
            require_same(each.source.manifest(), layout.slots)
            if self._arenas is not None and each.source is not model:
                self._arenas.slots_of(layout)

    def _publish(self, weight_sets: Sequence[WeightSet]) -> list[int]:
        """Write this rank's rows; return their checksums, if updates are verified."""
        found: list[int] = []
        for each in weight_sets:
            layout = self._layouts[each.name]
            sums = each.source.publish(layout, self._verify)
            if len(sums) != len(layout.slots) * self._verify:
                raise WeightMismatch(
                    f"publish returned {len(sums)} checksums for {len(layout.slots)} tensors."
                )
            found += sums
            self._held[each.name] = each.fingerprint
        return found

    def _while_engines_live(self, place: str, work: Callable[[], Any]) -> list[Any]:
        """Do `work` on every rank; where an arena was gone, let the rank of its engine say how that ended."""
        try:
            return self._engine_ranks.on_all_ranks(place, work)
        except EngineDied:
            # Any command would do: the arena goes when its engine does, and its rank may hear of it a moment later.
            self._engine_ranks.on_engine_ranks(place, lambda: self._call(messages.BeginUpdate("keep")))
            raise

    def _call(self, command: Any) -> Any:
        assert self._channel is not None
        return self._channel.call(command, self._silence_s)

    def _sum_over_node(self, sums: Sequence[Sequence[int]]) -> list[int]:
        """Add up the checksums of this node's ranks, which together wrote the whole model into the node's arena."""
        per_node = self._topology.local_world_size
        near = sums[self._topology.node * per_node :][:per_node]
        return [sum(rows) % 2**64 for rows in zip(*near, strict=True)]


def _changes(model: Any) -> dict[int, int]:
    """Return, by parameter, a number that grows with every change in place; nothing for other sources."""
    parameters = list(getattr(model, "parameters", list)())
    # An operation on a DTensor counts on the DTensor alone, one on its shard on the shard alone.
    return {id(each): each._version + getattr(each, "_local_tensor", each)._version for each in parameters}
