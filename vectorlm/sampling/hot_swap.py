"""The ranks' side of a hot swap: agree, pause the engines, publish in one round or several, let the engines load."""

from __future__ import annotations

import functools
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vectorlm.errors import EngineDied, HandleRefused, NonFiniteWeights, StaleHandle, WeightMismatch
from vectorlm.sampling import messages
from vectorlm.sampling.contract import WeightSet, WeightSource
from vectorlm.sampling.sampler.scheduler import require_room_for_update
from vectorlm.sampling.weights.inspection import FiniteCheck, Inspection, require_sound
from vectorlm.sampling.weights.model_tensors import adapter_prefixes, persistent_buffers
from vectorlm.sampling.weights.plan import BASE, require_same, shortened
from vectorlm.types import InFlight, UpdateReport

if TYPE_CHECKING:
    from vectorlm.ranks.engine_ranks import EngineRanks
    from vectorlm.sampling.settings import EngineSettings
    from vectorlm.sampling.transport import Transport
    from vectorlm.sampling.weights.arena import MappedArenas
    from vectorlm.sampling.weights.exports import Export
    from vectorlm.sampling.weights.plan import Layout


@dataclass(frozen=True)
class Sent:
    """What the engines hold since an update that succeeded."""

    train_step: int
    model: Callable[[], Any]
    """Returns the model while it lives."""
    changes: Mapping[int, int]
    """What `_changes` found."""
    fingerprints: dict[str, object]
    """By weight set."""
    sums: Mapping[str, Mapping[str, tuple[int, int]]]
    """By weight set, as in `Inspection`."""


@dataclass(frozen=True)
class SetState:
    """What a rank finds of a weight set before an update."""

    name: str
    is_held: bool
    """The engines hold it as it is now."""
    fits: bool
    """The engines are connected for its tensors."""
    is_open: bool
    """The transport and the engines know the way, or need none."""


class HotSwap:
    """Brings the trainer's weights into the engines, and knows which they hold."""

    def __init__(
        self,
        engine_ranks: EngineRanks,
        channel: messages.Channel | None,
        settings: EngineSettings,
    ) -> None:
        """Start with engines that hold their checkpoint; `channel` leads to this rank's engine, if it owns one."""
        self._topology = engine_ranks.topology
        self._engine_ranks = engine_ranks
        self._channel = channel
        self._settings, self._verify = settings, settings.verify_updates
        self._transport: Transport | None = None
        self._opened: set[str] = set()
        """The weight sets that transport and engines know the way of; one whose opening failed is opened again."""
        self._layouts: dict[str, Layout] = {}
        self._sent: Sent | None = None
        """None while nobody knows what the engines hold."""
        self.version = -1
        """The training step of the last update that succeeded; -1 before the first."""

    def update(
        self,
        model: Any,
        train_step: int,
        in_flight: InFlight,
        offered: Sequence[str] = ("push",),
        num_in_flight: Callable[[], int] = lambda: 0,
    ) -> UpdateReport:
        """Do what `SamplingEngine.update` says, on engines that are ready and take weights as `offered`.

        `num_in_flight` is collective, and counts what several engines have in flight.
        """
        start = time.perf_counter()
        sets, crossing = self._prepare(model, train_step, offered)
        if crossing is None:
            self._ask_engines("update", messages.RequireWhole())
            return UpdateReport(train_step, True, 0, 0.0, 0.0, time.perf_counter() - start)
        if in_flight == "refuse":
            require_room_for_update(num_in_flight(), in_flight)
        inspected_from = time.perf_counter()
        inspections = self._inspect(crossing)
        publish_s = time.perf_counter() - inspected_from
        earlier, self._sent = self._sent, None
        self._ask_engines("begin the update", messages.BeginUpdate(in_flight))
        published_from = time.perf_counter()
        totals = self._publish_rounds(crossing)
        publish_s += time.perf_counter() - published_from
        names = tuple(each.name for each in crossing)
        sums_of_ranks = totals if self._verify else None
        may_hold_nan = not self._settings.check_finite
        finish = messages.FinishUpdate(train_step, sums_of_ranks, names, may_hold_nan)
        try:
            updated = self._ask_engines("finish the update", finish)
        except StaleHandle:
            self._opened.clear()
            raise
        self.version = train_step
        fingerprints = {each.name: each.fingerprint for each in sets}
        sums = {name: each.sums for name, each in inspections.items()}
        held = {} if earlier is None else earlier.sums
        self._sent = Sent(train_step, _reference(model), _changes(model), fingerprints, {**held, **sums})
        slots = (slot for each in crossing for slot in self._layouts[each.name].slots)
        return UpdateReport(
            train_step,
            skipped=False,
            num_bytes=sum(slot.num_bytes for slot in slots),
            publish_s=publish_s,
            load_s=max(answer.load_s for answer in updated),
            total_s=time.perf_counter() - start,
            stall_s=max(answer.stall_s for answer in updated),
            transport=self._chosen_transport.name,
            busy=updated[0].busy,
        )

    def forget(self) -> None:
        """Take note that the engines' weights are lost: the next update moves them, whatever its step."""
        self._sent = None

    def close(self) -> None:
        """Let go of the arenas, and of what was exported."""
        self._transport = None
        self._opened.clear()
        if "_arenas" in vars(self):
            self._arenas.close()

    @functools.cached_property
    def _arenas(self) -> MappedArenas:
        from vectorlm.sampling.weights.arena import MappedArenas  # It imports torch, which takes long.

        return MappedArenas()

    @property
    def _chosen_transport(self) -> Transport:
        assert self._transport is not None, "_prepare chooses one"
        return self._transport

    def _prepare(
        self, model: Any, train_step: int, offered: Sequence[str]
    ) -> tuple[list[WeightSet], list[WeightSet] | None]:
        """Return the model's weight sets, and those to be sent, once every rank knows that it can send its shards.

        Nothing must be sent (None) where the engines hold `train_step`, and every rank's model is the one that was sent
        and has not changed.
        """
        from vectorlm.sampling.transport import open_transport, pull_obstacle
        from vectorlm.sampling.weights.module_source import warn_of_rounded_positions

        sets: list[WeightSet] = []

        def look() -> tuple[int, bool, str | None, list[SetState]]:
            sets.extend(self._weight_sets(model))
            is_as_sent = self._is_as_sent(model, train_step, sets)
            obstacle = pull_obstacle(sets, offered, self._topology) if self._transport is None else None
            return train_step, is_as_sent, obstacle, [self._state(each) for each in sets]

        answers = self._engine_ranks.on_all_ranks("update", look)
        if any(step != train_step for step, _, _, _ in answers):
            self._engine_ranks.check_same_args("update", train_step, f"train_step={train_step}")
        if all(is_as_sent for _, is_as_sent, _, _ in answers):
            return sets, None
        names = [each.name for each in sets]
        if any([state.name for state in states] != names for _, _, _, states in answers):
            raise WeightMismatch("the model has active adapters on some ranks and none on others.")
        if self._transport is None:
            warn_of_rounded_positions(model)
            obstacles = [obstacle for _, _, obstacle, _ in answers]
            self._transport = open_transport(
                self._settings.transport, offered, obstacles, self._topology, self._arenas
            )
        crossing, to_open = [], []
        for index, each in enumerate(sets):
            on_ranks = [states[index] for _, _, _, states in answers]
            num_held = sum(state.is_held for state in on_ranks)
            if not all(state.fits for state in on_ranks):
                self._connect(each)
            if num_held < len(on_ranks):
                crossing.append(each)
            if not all(state.is_open for state in on_ranks) or 0 < num_held < len(on_ranks):
                to_open.append(each)
        if to_open:
            try:
                self._open(to_open)
            except HandleRefused as error:
                if self._settings.transport != "auto":
                    raise
                self._transport = open_transport("auto", offered, [str(error)], self._topology, self._arenas)
                if self._topology.is_main:
                    text = (
                        f"the weights cross by the transport {self._transport.name}, and not by pull: {error}"
                    )
                    warnings.warn(text, stacklevel=5)
                self._layouts.clear()
                for each in crossing:
                    self._connect(each)
                self._open(crossing)
        return sets, crossing

    def _is_as_sent(self, model: Any, train_step: int, sets: Sequence[WeightSet]) -> bool:
        """Whether the engines hold this rank's `model`, as it is now, under this step."""
        sent = self._sent
        if sent is None or sent.train_step != train_step or sent.model() is not model:
            return False
        if isinstance(model, WeightSource) and not (self._verify and hasattr(model, "inspect")):
            # Nothing shows whether its weights have changed.
            return False
        if [each.name for each in sets] != [*sent.fingerprints] or not all(map(self._fits, sets)):
            return False
        if self._verify:
            # Reads the weights: what is written through ``.data`` counts no operation.
            found = {each.name: self._inspection(each, check_finite=False).sums for each in sets}
            changed = [name for name, sums in found.items() if sums != sent.sums.get(name)]
            sent.fingerprints.update(dict.fromkeys(changed))
            is_as_sent = not changed
        else:
            is_as_sent = sent.changes == _changes(model)
        if not is_as_sent:
            warnings.warn(
                f"the weights have changed since they were sent as step {train_step}, but the step has not: they are "
                "sent again, and tokens of both carry this version. Pass another step.",
                stacklevel=8,
            )
        return is_as_sent

    def _inspect(self, weight_sets: Sequence[WeightSet]) -> Mapping[str, Inspection]:
        """Look at the weights on all ranks before any is written; raise what is wrong, return what this rank's are."""
        if not (self._verify or self._settings.check_finite):
            return {}

        def look() -> list[Inspection]:
            return [self._inspection(each, self._settings.check_finite) for each in weight_sets]

        by_rank = self._engine_ranks.on_all_ranks("inspect the weights", look)
        for of_ranks in zip(*by_rank, strict=True):
            require_sound(of_ranks)
        names = (each.name for each in weight_sets)
        return dict(zip(names, by_rank[self._topology.rank], strict=True))

    def _inspection(self, weight_set: WeightSet, check_finite: bool) -> Inspection:
        inspect: Callable[..., Inspection] | None = getattr(weight_set.source, "inspect", None)
        if inspect is None:
            return Inspection({}, ())
        return inspect(self._layouts[weight_set.name], self._verify, check_finite)

    def _weight_sets(self, model: Any) -> Sequence[WeightSet]:
        """Wrap `model` in the sources that send it; they check that this rank can send its shards."""
        from vectorlm.sampling.weights.lora_source import lora_weight_sets
        from vectorlm.sampling.weights.module_source import ModuleSource

        if isinstance(model, WeightSource):
            return [WeightSet(BASE, model)]
        if adapter_prefixes(model):
            return lora_weight_sets(model, self._topology, self._arenas, self._settings.lora_mode)
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

    def _state(self, weight_set: WeightSet) -> SetState:
        name = weight_set.name
        held = None if self._sent is None else self._sent.fingerprints.get(name)
        if held is not None and held == weight_set.fingerprint:
            return SetState(name, is_held=True, fits=True, is_open=True)
        fits = self._fits(weight_set)
        is_open = fits and name in self._opened and self._chosen_transport.is_current(weight_set)
        return SetState(name, is_held=False, fits=fits, is_open=is_open)

    def _connect(self, weight_set: WeightSet) -> None:
        """Have the first engine of each node make an arena for the set, if there is one, and the others open it."""
        name, manifest = weight_set.name, tuple(weight_set.source.manifest())
        arena_bytes = self._chosen_transport.arena_bytes
        first = self._engine_ranks.first_of_node
        make = messages.Connect(manifest, None, name, arena_bytes)
        layout: Layout = self._ask_engines(f"connect the {name}", make, first)[self._topology.node]
        join = messages.Connect(manifest, layout.path, name, arena_bytes)
        others = tuple(rank for rank in self._engine_ranks.ranks if rank not in first)
        self._ask_engines(f"share the arena of the {name}", join, others)
        if name in self._layouts:
            self._arenas.drop(self._layouts[name])
        self._layouts[name] = layout

    def _open(self, weight_sets: Sequence[WeightSet]) -> None:
        """Make every rank ready to send, and open in the engines of each node what its ranks export."""

        def check_and_open() -> list[Sequence[Export]]:
            for each in weight_sets:
                require_same(each.source.manifest(), self._layouts[each.name].slots)
            return [self._chosen_transport.open(each, self._layouts[each.name]) for each in weight_sets]

        self._opened -= {each.name for each in weight_sets}
        near = self._near(self._while_engines_live("open the transport", check_and_open))
        for each, *exports in zip(weight_sets, *near, strict=True):
            command = messages.OpenHandles(each.name, [export for theirs in exports for export in theirs])
            if command.exports:
                self._ask_engines("open the handles", command)
        self._opened |= {each.name for each in weight_sets}

    def _publish_rounds(self, weight_sets: Sequence[WeightSet]) -> list[int]:
        """Let all ranks send their rows; return the sums over this node's ranks, which send a whole model together.

        The engines copy all rounds but the last, which they load with `FinishUpdate`. A set of fewer rounds is not
        written to again.
        """
        rounds = {each.name: self._layouts[each.name].rounds() for each in weight_sets}
        found: dict[str, list[int]] = {each.name: [] for each in weight_sets}
        num_rounds = max(map(len, rounds.values()), default=1)
        for number in range(num_rounds):
            now = [
                (each, rounds[each.name][number]) for each in weight_sets if number < len(rounds[each.name])
            ]
            sums = self._while_engines_live("publish weights", functools.partial(self._publish, now))
            for (each, _), *parts in zip(now, *self._near(sums), strict=True):
                found[each.name] += [sum(rows) % 2**64 for rows in zip(*parts, strict=True)]
            self._look_at_arenas(now)
            if number + 1 < num_rounds:
                names = (each.name for each, _ in now if number + 1 < len(rounds[each.name]))
                self._ask_engines("copy a round", messages.CopyRound(dict.fromkeys(names, number)))
        return [total for each in weight_sets for total in found[each.name]]

    def _look_at_arenas(self, now: Sequence[tuple[WeightSet, Layout]]) -> None:
        """Look for numbers that are not finite in what sources that cannot be inspected have written."""
        unseen = [(each, layout) for each, layout in now if not hasattr(each.source, "inspect")]
        if not (unseen and self._settings.check_finite):
            return

        def look() -> None:
            for _, layout in unseen:
                finite = FiniteCheck()
                for name, place in self._arenas.slots_of(layout).items():
                    finite.look_at(name, place, place.dtype)
                if wrong := finite.wrong():
                    raise NonFiniteWeights(
                        f"{len(wrong)} tensors were written with NaN or infinity: {shortened(wrong)}. The engine "
                        "samples nothing until the next update; check_finite=False lets them in."
                    )

        self._engine_ranks.on_engine_ranks("look at the arenas", look)

    def _publish(self, now: Sequence[tuple[WeightSet, Layout]]) -> list[Sequence[int]]:
        """Send this rank's rows of one round; return their checksums by weight set, if updates are verified."""
        found = []
        for each, layout in now:
            sums = self._chosen_transport.publish(each, layout, self._verify)
            if len(sums) != len(layout.slots) * self._verify:
                raise WeightMismatch(
                    f"publish returned {len(sums)} checksums for {len(layout.slots)} tensors."
                )
            found.append(sums)
        return found

    def _while_engines_live(self, place: str, work: Callable[[], Any]) -> list[Any]:
        """Do `work` on every rank; where an arena was gone, let the rank of its engine say how that ended."""
        try:
            return self._engine_ranks.on_all_ranks(place, work)
        except EngineDied:
            # Any command would do: the arena goes when its engine does, and its rank may hear of it a moment later.
            self._ask_engines(place, messages.BeginUpdate("keep"))
            raise

    def _ask_engines(self, place: str, command: Any, ranks: tuple[int, ...] | None = None) -> list[Any]:
        """Send a command to all engines, or those of `ranks`; return their answers on every rank."""
        return self._engine_ranks.on_engine_ranks(place, lambda: self._call(command), ranks)

    def _call(self, command: Any) -> Any:
        assert self._channel is not None
        return self._channel.call(command, self._settings.timeout_s)

    def _near(self, of_ranks: Sequence[Any]) -> Sequence[Any]:
        """Return the part of this node's ranks."""
        per_node = self._topology.local_world_size
        return of_ranks[self._topology.node * per_node :][:per_node]


def _reference(model: Any) -> Callable[[], Any]:
    """Return a call that gives the model while it lives."""
    try:
        return weakref.ref(model)
    except TypeError:  # A source with slots, say.
        return lambda: model


def _changes(model: Any) -> dict[int, int]:
    """Return, by tensor, a number that grows with every change in place; nothing for other sources."""
    tensors = list(getattr(model, "parameters", list)())
    tensors += persistent_buffers(model).values() if hasattr(model, "named_modules") else ()
    # An operation on a DTensor counts on the DTensor alone, one on its shard on the shard alone.
    return {id(each): each._version + getattr(each, "_local_tensor", each)._version for each in tensors}
