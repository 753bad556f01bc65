"""The ranks' side of a weight update: compare, pause the engines, send in one or several rounds, let them load."""

from __future__ import annotations

import functools
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vectorlm.errors import (
    ConfigError,
    EngineDied,
    EngineError,
    HandleRefused,
    NonFiniteWeights,
    StaleHandle,
    VectorLMError,
    WeightMismatch,
)
from vectorlm.sampling import messages
from vectorlm.sampling.contract import WeightSet, WeightSource
from vectorlm.sampling.sampler.scheduler import require_room_for_update
from vectorlm.sampling.weights.inspection import Inspection, ranks_agree, require_sound
from vectorlm.sampling.weights.plan import ADAPTER, BASE, require_same, shortened
from vectorlm.types import POLICY, InFlight, UpdateReport

if TYPE_CHECKING:
    import torch

    from vectorlm.ranks.engine_ranks import EngineRanks
    from vectorlm.ranks.topology import Topology
    from vectorlm.sampling.settings import EngineSettings
    from vectorlm.sampling.transport import Transport
    from vectorlm.sampling.weights.arena import MappedArenas
    from vectorlm.sampling.weights.exports import Export
    from vectorlm.sampling.weights.inspection import Digest
    from vectorlm.sampling.weights.model_tensors import Snapshot
    from vectorlm.sampling.weights.plan import Layout, TensorSpec
    from vectorlm.sampling.weights.shared_base import SharedBase


@dataclass(frozen=True)
class Sent:
    """The weights of an adapter's last update that succeeded."""

    train_step: int
    model: Callable[[], Any]
    """Returns the model while it lives."""
    changes: Mapping[int, int] | None
    """The result of `changes_of`; None if updates are verified, because checksums then reveal changes."""
    fingerprints: dict[str, object]
    """Fingerprints by weight set."""
    sums: Mapping[str, Mapping[str, tuple[tuple[int, ...], int]]]
    """Checksums by weight set, as in `Inspection`."""


@dataclass(frozen=True)
class SetState:
    """The state of a weight set on one rank before an update."""

    name: str
    is_held: bool
    """Whether the engines hold the current version of the set."""
    fits: bool
    """Whether the engines are connected for its tensors."""
    is_open: bool
    """Whether the transport and the engines have opened it, or need not."""


class HotSwap:
    """The sender of a trainer's weights; it remembers which weights the engines hold."""

    def __init__(
        self, engine_ranks: EngineRanks, channel: messages.Channel | None, settings: EngineSettings
    ) -> None:
        """Start with engines that hold their checkpoint; `channel` leads to this rank's engine, if it owns one."""
        self._topology = engine_ranks.topology
        self._engine_ranks = engine_ranks
        self._channel = channel
        self._settings, self._verify = settings, settings.verify_updates
        self._transport: Transport | None = None
        self._opened: set[str] = set()
        """The weight sets that transport and engines have opened; after an error they are opened again."""
        self._layouts: dict[str, Layout] = {}
        self._fitting: dict[str, tuple[Sequence[TensorSpec], Layout]] = {}
        """The last manifest of the base that fits its layout."""
        self._kept: tuple[Callable[[], Any], Snapshot, Sequence[Any]] | None = None
        """The last model, a snapshot of it, and its weight sets if later updates may use them."""
        self._shared: SharedBase | None = None
        """The base that a model shares with the engines; updates then send adapters alone."""
        self.keeps_base = False
        """Whether the engines cannot take another base; updates then send adapters alone."""
        self._sent: dict[str, Sent] = {}
        """By adapter, if known: the weights that the engines hold on top of their present base."""
        self.adapters = {BASE: -1, POLICY: -1} if settings.lora_mode == "adapter" else {POLICY: -1}
        """The training step of each adapter's last update that succeeded; -1 before the first."""

    @property
    def version(self) -> int:
        """The training step of the policy's last update that succeeded; -1 before the first."""
        return self.adapters[POLICY]

    def update(
        self,
        model: Any,
        train_step: int,
        in_flight: InFlight,
        offered: Sequence[str] = ("push",),
        num_in_flight: Callable[[], int] = lambda: 0,
        adapter: str = POLICY,
    ) -> UpdateReport:
        """Update engines that are ready and support the transports `offered`; see `SamplingEngine.update`.

        `num_in_flight` is collective, and counts the requests in flight of several engines.
        """
        from vectorlm.sampling.transport import changes_of

        start = time.perf_counter()
        sets, changed = self._prepare(model, train_step, offered, adapter)
        if changed is None:
            self._ask_engines("update", messages.RequireWhole())
            total_s = time.perf_counter() - start
            return UpdateReport(train_step, True, 0, 0.0, 0.0, total_s, verified=self._verify)
        if in_flight == "refuse":
            require_room_for_update(num_in_flight(), in_flight)
        inspected_from = time.perf_counter()
        inspections = self._inspect(changed)
        publish_s = time.perf_counter() - inspected_from
        earlier, self._sent = self._sent, {}
        names = tuple(weight_set.name for weight_set in changed)
        needs_slot = adapter != POLICY and ADAPTER in names
        begin = messages.BeginUpdate(in_flight, adapter if needs_slot else None)
        woken = self._ask_engines("begin the update", begin)
        published_from = time.perf_counter()
        totals = self._publish_rounds(changed)
        publish_s += time.perf_counter() - published_from
        checksums = totals if self._verify else None
        may_hold_nan = not self._settings.check_finite
        finish = messages.FinishUpdate(train_step, checksums, names, may_hold_nan, adapter)
        try:
            updated = self._ask_engines("finish the update", finish)
        except VectorLMError as error:
            if isinstance(error, StaleHandle):
                self._opened.clear()
            if adapter != POLICY:
                self.adapters.pop(adapter, None)  # The engines have removed it.
            raise
        # Not earlier: if warnings are errors, the other ranks would wait for this one in a collective.
        warn_of_restored(woken, self._topology, stacklevel=4)
        self.adapters |= dict.fromkeys({adapter} | ({BASE} & {*names} & self.adapters.keys()), train_step)
        fingerprints = {weight_set.name: weight_set.fingerprint for weight_set in sets}
        sums = dict(next((sent.sums for sent in earlier.values()), {}))
        sums |= {name: inspection.sums for name, inspection in inspections.items()}
        changes = None if self._verify else changes_of(model)
        sent = Sent(train_step, _reference(model), changes, fingerprints, sums)
        self._sent = {**({} if BASE in names else earlier), adapter: sent}
        return UpdateReport(
            train_step,
            skipped=False,
            num_bytes=sum(self._layouts[name].num_sent_bytes for name in names),
            publish_s=publish_s,
            load_s=max(answer.load_s for answer in updated),
            total_s=time.perf_counter() - start,
            stall_s=max(answer.stall_s for answer in updated),
            transport=self._chosen_transport.name,
            busy=updated[0].busy,
            verified=self._verify,
        )

    def share(self, model: torch.nn.Module) -> SharedBase:
        """Make the frozen weights of `model` views of the engines' parameters; see `SamplingEngine.share_base`."""
        from vectorlm.sampling.weights.model_tensors import trainer_tensors
        from vectorlm.sampling.weights.module_source import ModuleSource
        from vectorlm.sampling.weights.shared_base import SharedBase, lent_to, views_of

        if self._settings.lora_mode != "adapter":
            raise ConfigError(
                "share_base() needs an engine with LoRA layers. Build it with enable_lora=True."
            )
        if self.keeps_base:
            raise ConfigError(
                "share_base() needs an engine in 16 or 32 bits, and its base has 4. Train a second copy of the base."
            )
        if any(hasattr(tensor, "device_mesh") for tensor in trainer_tensors(model).values()):
            raise ConfigError(
                "share_base() needs a model that is not sharded yet. Call it before fully_shard."
            )
        # Every rank that has read the weights has all of them.
        alone = replace(self._topology, rank=0, local_rank=0, world_size=1, local_world_size=1)
        source = ModuleSource(model, alone)
        is_in_arena = not self._topology.is_cuda and self._settings.transport in ("auto", "push")
        self._connect(WeightSet(BASE, source), None if is_in_arena else 0)
        # An update must connect again if nothing is shared after all.
        layout = self._layouts.pop(BASE)

        def sums() -> Sequence[int] | None:
            if any(tensor.is_meta for tensor in trainer_tensors(model).values()):
                return None
            require_sound([source.inspect(layout, True, self._settings.check_finite)])
            return source.checksums_of(layout, {})

        totals = next(filter(None, self._engine_ranks.on_all_ranks("sum the base", sums)), None)
        if totals is None:
            raise WeightMismatch(
                "share_base() needs the weights on at least one rank, but the model of every rank is empty."
            )
        lent = self._ask_engines("lend the base", messages.LendBase(totals))
        node = self._topology.node
        near = [
            of_engine
            for rank, of_engine in zip(self._engine_ranks.ranks, lent, strict=True)
            if rank // self._topology.local_world_size == node
        ]
        mine: list[Any] = []

        def look() -> set[str]:
            mine[:] = [lent_to(near, self._topology)]
            mine.append(views_of(model, mine[0]))
            return set(mine[1])

        names = set.intersection(*self._engine_ranks.on_all_ranks("open the base", look))
        lent_here, views = mine
        self._shared = SharedBase(model, {name: views[name] for name in views if name in names}, lent_here)
        return self._shared

    def require_own_weights(self) -> None:
        """Raise `EngineError` if a trainer computes with the engine's weights, or no update would bring them back."""
        if self.keeps_base:
            raise EngineError(
                "the engine's weights cannot sleep: its base has 4 bits, and no update brings it back. Call "
                "sleep(weights=False)."
            )
        if self._shared is not None and not self._shared.is_over:
            raise EngineError(
                "the engine's weights cannot sleep: a trainer computes with them (share_base). Call "
                "sleep(weights=False)."
            )

    def forget(self) -> None:
        """Note that the engines' weights are lost: the next update sends them, even under the same step."""
        self._sent = {}
        self.adapters = {name: step for name, step in self.adapters.items() if name in (BASE, POLICY)}

    def remove(self, adapter: str) -> None:
        """Note that the engines do not hold this adapter any more."""
        self._sent.pop(adapter, None)
        self.adapters.pop(adapter, None)

    def close(self) -> None:
        """Close the arenas and the exports."""
        self._transport = self._kept = None
        self._opened.clear()
        if "_arenas" in vars(self):
            self._arenas.close()

    @functools.cached_property
    def _arenas(self) -> MappedArenas:
        from vectorlm.sampling.weights.arena import MappedArenas  # Imports torch, which takes seconds.

        return MappedArenas()

    @property
    def _chosen_transport(self) -> Transport:
        assert self._transport is not None, "_prepare chooses one"
        return self._transport

    def _prepare(
        self, model: Any, train_step: int, offered: Sequence[str], adapter: str
    ) -> tuple[list[WeightSet], list[WeightSet] | None]:
        """Return the model's weight sets, and those to send, after every rank has checked that it can send its shards.

        The second value is None if nothing must be sent: the engines hold `train_step`, and no rank's model has changed
        since.
        """
        from vectorlm.sampling.transport import open_transport, pull_obstacle
        from vectorlm.sampling.weights.module_source import warn_of_rounded_positions

        sets: list[WeightSet] = []

        what = adapter, train_step

        def look() -> tuple[tuple[str, int], bool, str | None, list[SetState]]:
            sets.extend(self._weight_sets_of(model))
            is_as_sent = self._is_as_sent(model, train_step, sets, adapter)
            obstacle = pull_obstacle(sets, offered, self._topology) if self._transport is None else None
            if self._settings.quantization is not None:
                obstacle = "the engine is quantised, and the ranks compute the rows that they send"
            return what, is_as_sent, obstacle, [self._state(weight_set) for weight_set in sets]

        answers = self._engine_ranks.on_all_ranks("update", look)
        if any(of_rank != what for of_rank, _, _, _ in answers):
            self._engine_ranks.check_same_args("update", what, f"name={adapter!r}, train_step={train_step}")
        if all(is_as_sent for _, is_as_sent, _, _ in answers):
            return sets, None
        names = [weight_set.name for weight_set in sets]
        if any([state.name for state in states] != names for _, _, _, states in answers):
            raise WeightMismatch("the model has active adapters on some ranks and none on others.")
        if self._transport is None:
            warn_of_rounded_positions(model)
            obstacles = [obstacle for _, _, obstacle, _ in answers]
            self._transport = open_transport(
                self._settings.transport, offered, obstacles, self._topology, self._arenas
            )
        changed, to_open = [], []
        for index, weight_set in enumerate(sets):
            on_ranks = [states[index] for _, _, _, states in answers]
            num_held = sum(state.is_held for state in on_ranks)
            if not all(state.fits for state in on_ranks):
                self._connect(weight_set, self._chosen_transport.arena_bytes)
            layout = self._layouts[weight_set.name]
            if len(layout.tensors) < len(layout.slots) and not hasattr(weight_set.source, "quantises"):
                raise ConfigError(
                    "the engine is quantised, and the weights come from your own WeightSource, which sends no "
                    "scales. Build the engine without quantization."
                )
            if num_held < len(on_ranks):
                changed.append(weight_set)
            if not all(state.is_open for state in on_ranks) or 0 < num_held < len(on_ranks):
                to_open.append(weight_set)
        if to_open:
            try:
                self._open(to_open)
            except HandleRefused as error:
                if self._settings.transport != "auto":
                    raise
                self._transport = open_transport("auto", offered, [str(error)], self._topology, self._arenas)
                if self._topology.is_main:
                    text = (
                        f"weights are sent with transport={self._transport.name!r} instead of 'pull': {error}"
                    )
                    warnings.warn(text, stacklevel=5)
                self._layouts.clear()
                for weight_set in changed:
                    self._connect(weight_set, self._chosen_transport.arena_bytes)
                self._open(changed)
        return sets, changed

    def _weight_sets_of(self, model: Any) -> Sequence[WeightSet]:
        """Return the weight sets of `model` to send: all, or the adapters of a model that shares its base."""
        sets = self._all_weight_sets_of(model)
        if self.keeps_base:
            # Without active adapters, the engine samples with its base.
            if getattr(sets[0].fingerprint, "is_trained", True):
                raise ConfigError(
                    "the engine's base has 4 bits, and updates bring adapters alone. Build it with enable_lora=True, "
                    "and send a PEFT model whose base is frozen."
                )
            return sets[1:]
        if self._shared is None or self._shared.is_over:
            self._shared = None
            return sets
        self._shared.require_intact(model, sets[0].fingerprint)
        return sets[1:]

    def _all_weight_sets_of(self, model: Any) -> Sequence[WeightSet]:
        """Return the weight sets of `model`, kept from the last update if nothing was replaced or moved since."""
        from vectorlm.sampling.transport import weight_sets_of
        from vectorlm.sampling.weights.model_tensors import Snapshot, adapter_prefixes
        from vectorlm.sampling.weights.module_source import ModuleSource

        kept, self._kept = self._kept, None
        if kept is not None and kept[0]() is model and kept[1].is_current():
            self._kept = kept
            for weight_set in kept[2]:
                weight_set.source.forget_sums()
            return [
                replace(weight_set, fingerprint=_renewed(weight_set.fingerprint)) for weight_set in kept[2]
            ]
        sets = weight_sets_of(model, self._topology, self._arenas, self._settings.lora_mode)
        # Sources of other classes may keep the model alive. On CUDA a loop may move its model to the host meanwhile;
        # then kept rows would hold the device's memory. Exported rows hold it in any case.
        holds_exports = self._transport is not None and self._transport.name == "pull"
        if not isinstance(sets[0].source, ModuleSource) or (self._topology.is_cuda and not holds_exports):
            return sets
        # Merging gathers factors, which are new at each update.
        if self._settings.lora_mode != "merged" or not adapter_prefixes(model):
            # The kept rows keep a model's memory alive, but not the model.
            this = weakref.ref(self)
            reference = weakref.ref(model, lambda _: HotSwap._drop(this()))
            self._kept = reference, Snapshot(model), sets
        return sets

    @staticmethod
    def _drop(swap: HotSwap | None) -> None:
        if swap is not None:
            swap._kept = None

    def _is_as_sent(self, model: Any, train_step: int, sets: Sequence[WeightSet], adapter: str) -> bool:
        """Return whether the engines hold this rank's `model`, unchanged, under this name and step."""
        from vectorlm.sampling.transport import changes_of

        sent = self._sent.get(adapter)
        if sent is None or sent.train_step != train_step or sent.model() is not model:
            return False
        if isinstance(model, WeightSource) and not (self._verify and hasattr(model, "inspect")):
            # Changes of its weights cannot be detected.
            return False
        if [weight_set.name for weight_set in sets] != [*sent.fingerprints] or not all(map(self._fits, sets)):
            return False
        if self._verify:
            # Compare bytes, because a write through ``.data`` does not change a tensor's version.
            changed = [
                weight_set.name
                for weight_set in sets
                if self._inspection(weight_set, check_finite=False).sums != sent.sums.get(weight_set.name)
            ]
            for known in self._sent.values():
                known.fingerprints.update(dict.fromkeys(changed))
            is_as_sent = not changed
        else:
            is_as_sent = sent.changes is not None and sent.changes == changes_of(model)
        if not is_as_sent:
            warnings.warn(
                f"train_step={train_step} was already sent with different weights. The new weights are sent too, and "
                "tokens of both have this version. Pass a new step after each change.",
                stacklevel=8,
            )
        return is_as_sent

    def _inspect(self, weight_sets: Sequence[WeightSet]) -> Mapping[str, Inspection]:
        """Check the weights on all ranks before any is sent; return the inspections of this rank's shards."""
        if not (self._verify or self._settings.check_finite):
            return {}

        found: dict[str, Inspection] = {}

        def look() -> list[Digest | None]:
            found.update(
                (weight_set.name, self._inspection(weight_set, self._settings.check_finite))
                for weight_set in weight_sets
            )
            return [inspection.digest() for inspection in found.values()]

        digests = self._engine_ranks.on_all_ranks("inspect the weights", look)
        if not all(map(ranks_agree, zip(*digests, strict=True))):
            by_rank = self._engine_ranks.on_all_ranks("compare the weights", lambda: [*found.values()])
            for of_ranks in zip(*by_rank, strict=True):
                require_sound(of_ranks)
        return found

    def _inspection(self, weight_set: WeightSet, check_finite: bool) -> Inspection:
        inspect: Callable[..., Inspection] | None = getattr(weight_set.source, "inspect", None)
        if inspect is None:
            return Inspection({}, ())
        return inspect(self._layouts[weight_set.name], self._verify, check_finite)

    def _fits(self, weight_set: WeightSet) -> bool:
        """Return whether the engines are connected for these tensors; raise if the base has other tensors."""
        if weight_set.name not in self._layouts:
            return False
        slots = self._layouts[weight_set.name].tensors
        if weight_set.name == BASE:
            manifest, layout = weight_set.source.manifest(), self._layouts[BASE]
            fitting = self._fitting.get(BASE)
            if fitting is None or fitting[0] is not manifest or fitting[1] is not layout:
                require_same(manifest, slots)
                self._fitting[BASE] = manifest, layout
            return True
        sent = [(spec.name, tuple(spec.shape)) for spec in weight_set.source.manifest()]
        return sent == [(slot.name, slot.shape) for slot in slots]

    def _state(self, weight_set: WeightSet) -> SetState:
        name = weight_set.name
        # The base is the same for all adapters, and an adapter is always sent.
        held = next((sent.fingerprints.get(name) for sent in self._sent.values()), None)
        # A refused `share` and a change of the transport leave no layout: the engines must be connected again.
        if held is not None and held == weight_set.fingerprint and name in self._layouts:
            return SetState(name, is_held=True, fits=True, is_open=True)
        fits = self._fits(weight_set)
        is_open = fits and name in self._opened and self._chosen_transport.is_current(weight_set)
        return SetState(name, is_held=False, fits=fits, is_open=is_open)

    def _connect(self, weight_set: WeightSet, arena_bytes: int | None) -> None:
        """Let the first engine of each node create an arena for the set, and the other engines open it."""
        name, manifest = weight_set.name, tuple(weight_set.source.manifest())
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
        """Make every rank ready to send, and let the engines of each node open the exports of its ranks."""

        def check_and_open() -> list[Sequence[Export]]:
            layouts = [self._layouts[weight_set.name] for weight_set in weight_sets]
            for weight_set, layout in zip(weight_sets, layouts, strict=True):
                require_same(weight_set.source.manifest(), layout.tensors)
            return list(map(self._chosen_transport.open, weight_sets, layouts))

        names = {weight_set.name for weight_set in weight_sets}
        self._opened -= names
        near = self._near(self._while_engines_live("open the transport", check_and_open))
        for weight_set, *by_rank in zip(weight_sets, *near, strict=True):
            if exports := [export for exports in by_rank for export in exports]:
                self._ask_engines("open the handles", messages.OpenHandles(weight_set.name, exports))
        self._opened |= names

    def _publish_rounds(self, weight_sets: Sequence[WeightSet]) -> list[int]:
        """Let all ranks send their rows; return the checksums, each the sum over this node's ranks.

        The ranks of a node send a whole model together. The engines copy every round but the last, which they load
        with `FinishUpdate`. Later rounds do not touch a set with fewer rounds.
        """
        rounds = {weight_set.name: self._layouts[weight_set.name].rounds for weight_set in weight_sets}
        found: dict[str, list[int]] = {name: [] for name in rounds}
        num_rounds = max(map(len, rounds.values()), default=1)
        for number in range(num_rounds):
            now = [
                (weight_set, rounds[weight_set.name][number])
                for weight_set in weight_sets
                if number < len(rounds[weight_set.name])
            ]
            sums = self._while_engines_live("publish weights", functools.partial(self._publish, now))
            for (weight_set, _), *parts in zip(now, *self._near(sums), strict=True):
                found[weight_set.name] += [sum(rows) % 2**64 for rows in zip(*parts, strict=True)]
            self._look_at_arenas(now)
            if number + 1 < num_rounds:
                names = (name for name, of_set in rounds.items() if number + 1 < len(of_set))
                self._ask_engines("copy a round", messages.CopyRound(dict.fromkeys(names, number)))
        return [total for totals in found.values() for total in totals]

    def _look_at_arenas(self, now: Sequence[tuple[WeightSet, Layout]]) -> None:
        """Check the written tensors for NaN and infinity, for sources without `inspect`."""
        unseen = [layout for weight_set, layout in now if not hasattr(weight_set.source, "inspect")]
        if not (unseen and self._settings.check_finite):
            return

        def look() -> None:
            from vectorlm.sampling.weights.inspection import Reading
            from vectorlm.sampling.weights.reader import Reader

            for layout in unseen:
                places = self._arenas.slots_of(layout)
                readings = [Reading(place, 0) for place in places.values()]
                is_finite = Reader(readings, sums=False, check_finite=True).read().is_finite
                if wrong := [name for name, is_good in zip(places, is_finite, strict=True) if not is_good]:
                    raise NonFiniteWeights(
                        f"check_finite=True: {len(wrong)} tensors have NaN or infinity: {shortened(wrong)}. The engine "
                        "samples nothing until the next update. check_finite=False allows them."
                    )

        self._engine_ranks.on_engine_ranks("look at the arenas", look)

    def _publish(self, now: Sequence[tuple[WeightSet, Layout]]) -> list[Sequence[int]]:
        """Send this rank's rows of one round; return their checksums by weight set, empty without verification."""
        found = []
        for weight_set, layout in now:
            sums = self._chosen_transport.publish(weight_set, layout, self._verify)
            if len(sums) != len(layout.slots) * self._verify:
                raise WeightMismatch(
                    f"publish returned {len(sums)} checksums for {len(layout.slots)} tensors."
                )
            found.append(sums)
        return found

    def _while_engines_live(self, place: str, work: Callable[[], Any]) -> list[Any]:
        """Do `work` on every rank; if an arena is gone, let the rank of its engine raise how the engine ended."""
        try:
            return self._engine_ranks.on_all_ranks(place, work)
        except EngineDied:
            # The arena vanishes a moment before the rank of its engine notices. Any command then raises the reason.
            self._ask_engines(place, messages.BeginUpdate("keep"))
            raise

    def _ask_engines(self, place: str, command: Any, ranks: tuple[int, ...] | None = None) -> list[Any]:
        """Send a command to all engines, or those of `ranks`; return their answers on every rank."""
        channel: Any = self._channel
        timeout_s = self._settings.timeout_s
        return self._engine_ranks.on_engine_ranks(place, lambda: channel.call(command, timeout_s), ranks)

    def _near(self, of_ranks: Sequence[Any]) -> Sequence[Any]:
        """Return the values of this node's ranks."""
        per_node = self._topology.local_world_size
        return of_ranks[self._topology.node * per_node :][:per_node]


def warn_of_restored(of_engines: Sequence[Sequence[str] | None], topology: Topology, stacklevel: int) -> None:
    """Warn on rank 0 of tensors that a sleep lost and that the engines have restored."""
    names = sorted({name for names in of_engines for name in names or ()})
    if names and topology.is_main:
        warnings.warn(
            f"sleep lost {len(names)} tensors of the engine's model that are neither parameters nor buffers: {names}. "
            "They were restored from copies, and the engine computes as before.",
            stacklevel=stacklevel,
        )


def _renewed(fingerprint: Any) -> Any:
    """Return a fingerprint of the same tensors as they are now."""
    return None if fingerprint is None else fingerprint.again()


def _reference(model: Any) -> Callable[[], Any]:
    """Return a function that returns the model while it is alive."""
    try:
        return weakref.ref(model)
    except TypeError:  # A source with slots, for example.
        return lambda: model
