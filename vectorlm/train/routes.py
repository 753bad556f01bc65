"""Routers of mixture-of-experts models: record or replay their choices, and measure the balance of the choices.

Sources: Ma et al. 2025, arXiv:2510.11370 (replay of the engine); Zheng et al. 2025, arXiv:2507.18071 (replay of the old
policy); Fedus et al. 2021, arXiv:2101.03961, eq. 4 (load-balancing loss).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vectorlm.errors import ConfigError
from vectorlm.sampling.settings import has_experts
from vectorlm.sampling.weights.model_tensors import reshard
from vectorlm.train.packing import Packing, Rows, to_device
from vectorlm.types import route_dtype

TOPK = (torch.topk, torch.Tensor.topk)
Take = Callable[[Any, Tensor], Any]
"""Receives the result of a `topk` and its input, and returns the result to use."""


class _Watch(TorchFunctionMode):
    """Passes every call of `topk` through `take`."""

    def __init__(self, take: Take) -> None:
        super().__init__()
        self._take = take

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return self._take(found, args[0] if args else kwargs["input"]) if func in TOPK else found


class Layout:
    """The rows of a pass and the places of their tokens in it, for one rank."""

    def __init__(self, rows: Rows, packing: Packing | None) -> None:
        """Take the rows, with their `packing` unless they are padded."""
        self._pieces: list[tuple[Sequence[int], int, int]]
        if packing is None:
            count, length = rows.input_ids.shape
            self._pieces = [((row,), 0, length) for row in range(count)]
            self.num_tokens, self._rank, self._size = count * length, 0, 1
        else:
            self._pieces = [
                (shared, *piece[1:]) for shared, piece in zip(packing.members, packing.pieces, strict=True)
            ]
            context = packing.context
            self._rank, self._size = (0, 1) if context is None else (context.rank, context.size)
            self.num_tokens = -(-packing.num_tokens // self._size)
        self._lengths = rows.attention_mask.sum(dim=1).tolist()
        self.ends: dict[int, int] = {}
        """Number of tokens that the pass computes of each row, over all ranks."""
        for members, _, last in self._pieces:
            for row in members:
                self.ends[row] = max(self.ends.get(row, 0), min(last, self._lengths[row]))
        self._is_used = rows.is_asked.any(dim=1).tolist()

    def __iter__(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield row, indices in the row and places in the pass, for all tokens of rows with a requested token.

        The common beginning of rows is yielded once for each of them, the first row first.
        """
        start = 0
        for members, first, last in self._pieces:
            for row in members:
                index = np.arange(first, max(first, min(last, self._lengths[row])))
                place = start + index - first
                is_mine = place % self._size == self._rank
                if self._is_used[row]:
                    yield row, index[is_mine], place[is_mine] // self._size
            start += last - first

    def weights(self) -> Tensor:
        """Return float32 [n]: the number of rows that have each token of the pass."""
        found = np.zeros(self.num_tokens, np.float32)
        for _, _, place in self:
            found[place] += 1
        return torch.from_numpy(found)

    def pairs(self, routes: Sequence[np.ndarray | None]) -> tuple[Tensor, Tensor] | None:
        """Return places in the pass, int64 [M], and their tokens' routes, [M, L, K]; None if no row has routes."""
        places, parts = [], []
        for row, index, place in self:
            if row < len(routes) and (found := routes[row]) is not None:
                known = index < len(found)
                places.append(place[known])
                parts.append(found[index[known]])
        if not parts:
            return None
        return torch.from_numpy(np.concatenate(places)), torch.from_numpy(
            np.concatenate(parts).astype(np.int16)
        )

    def table(self, routes: Sequence[np.ndarray | None]) -> tuple[Tensor, Tensor] | None:
        """Return the routes of a pass, [n, L, K], and which of its tokens have routes; None if no row has routes."""
        if (pairs := self.pairs(routes)) is None:
            return None
        places, found = (x.numpy()[::-1] for x in pairs)
        table, has = (
            np.zeros((self.num_tokens, *found.shape[1:]), np.int16),
            np.zeros(self.num_tokens, np.bool_),
        )
        # Of the rows that share a token, the first one counts: numpy writes it last.
        table[places], has[places] = found, True
        return torch.from_numpy(table), torch.from_numpy(has)


@dataclass(frozen=True)
class Balance:
    """The load of the experts in some passes, summed over layers and tokens."""

    counts: Tensor
    """[E], how often each expert is among the K most probable experts of a token."""
    shares: Tensor
    """[E], the sum of each expert's probabilities, with gradient if the loss is trained."""
    num: Tensor
    """Number of tokens times layers."""

    def loss(self, whole: Balance) -> Tensor:
        r"""Return these passes' share of the loss of `whole`, :math:`E \sum_e f_e P_e`.

        f is the share of tokens whose K most probable experts include e, and P the mean probability of e.
        """
        num = whole.num.clamp(min=1)
        return len(self.counts) * (whole.counts / num * self.shares / num).sum()


class Routers:
    """The routers of one model, in the order of its layers."""

    def __init__(self, found: Sequence[tuple[nn.Module, int]], num_experts: int) -> None:
        """Wrap the forward passes of `found`: routers, each with the index of the `topk` call that makes its choice."""
        self.num_layers, self.dtype = len(found), route_dtype(num_experts)
        self.balance_coef = 0.0
        """Weight of the load-balancing loss."""
        self.has_balance = True
        """Whether transformers has a load-balancing loss for the model; if so, passes compute rows to their ends."""
        self.last: Balance | None = None
        """The load of the experts in the last pass; None if the routers return no logits."""
        self.compares = False
        """Whether to compare the choices with the routes of the rows."""
        self.layout: Layout | None = None
        """The layout of the last pass; its choices are in `own`."""
        self.own: Tensor | None = None
        """The experts that the routers chose in the last pass, int16 [n, L, K]."""
        self._differ: list[Tensor] = []
        self._table: tuple[Tensor, Tensor] | None = None
        self._is_running = False
        self._device = torch.device("cpu")
        self._chosen: list[Tensor] = []
        self._logits: list[Tensor] = []
        for layer, (module, place) in enumerate(found):
            self._wrap(module, place, layer)

    def _wrap(self, module: nn.Module, place: int, layer: int) -> None:
        plain = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Outside of `running`, only a backward pass computes the routers of the last pass again.
            is_again = self._table is not None and torch._C._current_graph_task_id() != -1
            if not self._is_running and not is_again:
                return plain(*args, **kwargs)
            calls: list[tuple[Any, Tensor]] = []

            def take(found: Any, scores: Tensor) -> Any:
                calls.append((found, scores))
                if len(calls) != place + 1 or self._table is None:
                    return found
                table, has = self._table
                own = found[1]
                chosen = torch.where(has[:, None], table[:, layer].long(), own.view(len(has), -1)).view_as(
                    own
                )
                return torch.return_types.topk((scores.gather(-1, chosen), chosen))

            with _Watch(take):
                output = plain(*args, **kwargs)
            if self._is_running:
                (_, own), scores = calls[place]
                self._chosen.append(own.detach().flatten(0, -2).short())
                self._logits += [
                    x for x in output if x.is_floating_point() and x.shape[-1] == scores.shape[-1]
                ][:1]
            return output

        # torch.compile would recompile for every layout, and cannot trace the list of choices.
        module.forward = torch.compiler.disable(forward)  # type: ignore[method-assign]

    @contextmanager
    def running(self, rows: Rows, packing: Packing | None, device: torch.device) -> Iterator[None]:
        """Record the choices in one pass; replay `rows.replayed`, also when the backward pass computes blocks again."""
        before, self.layout, self._device = self._table, Layout(rows, packing), device
        found = None if rows.replayed is None else self.layout.table(rows.replayed)
        self._table = None
        if found is not None:
            if found[0].shape[1] != self.num_layers:
                raise ConfigError(
                    f"rl.router_replay: the rollouts have the experts of {found[0].shape[1]} layers, but the model has "
                    f"{self.num_layers} routers. Use rollouts of this model, or set it to off."
                )
            self._table = to_device(found[0], device), to_device(found[1], device)
        self._chosen, self._logits, self._is_running = [], [], True
        try:
            yield
        finally:
            self._is_running = False
            if not torch.is_grad_enabled():
                self._table = before
        self.own = torch.stack(self._chosen, dim=1)
        self._measure()
        pairs = self.layout.pairs(rows.routes) if self.compares and rows.routes is not None else None
        # An engine may return the experts of other layers; only a replay needs the same layers.
        if pairs is not None and pairs[1].shape[1:] == self.own.shape[1:]:
            self._compare(*(to_device(x, device) for x in pairs))

    @torch.no_grad()
    def _compare(self, places: Tensor, routes: Tensor) -> None:
        assert self.own is not None
        own = self.own.index_select(0, places).sort(dim=-1).values
        differs = (own != routes.sort(dim=-1).values).flatten(1).any(dim=1)
        self._differ.append(torch.stack([differs.sum(), differs.new_tensor(len(differs), dtype=torch.int64)]))

    def begin_batch(self) -> None:
        """Compare the choices with the routes of the rows from now on."""
        self.compares, self._differ = True, []

    def differing_share(self) -> float | None:
        """Return the share of compared tokens that have other experts in any layer; all ranks call this.

        None if no rank has compared tokens.
        """
        self.compares = False
        found = torch.stack(self._differ).sum(dim=0) if self._differ else torch.zeros(2, dtype=torch.int64)
        if dist.is_initialized():
            found = to_device(found, self._device)
            dist.all_reduce(found)
        num_differing, num = found.tolist()
        return num_differing / num if num else None

    def _measure(self) -> None:
        logits, self._logits, self._chosen = self._logits, [], []
        self.last = None
        if len(logits) != self.num_layers or not self.has_balance or self.layout is None or self.own is None:
            return
        weights = to_device(self.layout.weights(), logits[0].device)
        counts = shares = torch.zeros(logits[0].shape[-1], device=weights.device)
        with torch.set_grad_enabled(self.balance_coef > 0 and torch.is_grad_enabled()):
            for found in logits:
                probs = torch.softmax(found.flatten(0, -2), dim=-1)
                best = probs.topk(self.own.shape[-1], dim=-1).indices
                counts = counts.index_add(0, best.flatten(), weights.repeat_interleave(best.shape[-1]))
                shares = shares + weights @ probs.float()
        self.last = Balance(counts, shares, weights.sum() * self.num_layers)

    def own_by_row(self) -> dict[int, np.ndarray]:
        """Return the choices of the last pass by row, [t, L, K]; 0 for tokens of other ranks."""
        assert self.own is not None
        assert self.layout is not None
        own, found = self.own.cpu().numpy().astype(self.dtype), dict[int, np.ndarray]()
        for row, index, place in self.layout:
            length = self.layout.ends[row]
            found.setdefault(row, np.zeros((length, *own.shape[1:]), own.dtype))[index] = own[place]
        return found


class BalanceMeter:
    """The load-balancing loss of one optimizer step, over all micro-batches and ranks."""

    def __init__(self, routers: Routers | None, model_parallel: int = 1) -> None:
        """Measure the passes of a model with these routers; None measures nothing.

        Groups of `model_parallel` ranks compute the same tokens.
        """
        self._model_parallel = model_parallel
        self._routers, self._coef = routers, 0.0 if routers is None else routers.balance_coef
        self._whole: Balance | None = None
        self._parts: list[Balance] = []

    def count(self, passes: Sequence[Callable[[], Any]], model: nn.Module) -> None:
        """Count the load of the whole step before training, in extra passes if there are several passes or ranks.

        The loss is a product of two means over the step: the gradient of a micro-batch depends on all others.
        """
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if self._routers is None or self._coef == 0 or (len(passes) == 1 and world_size == 1):
            return
        with torch.no_grad():
            for run in passes:
                run()
                self._add()
        reshard(model)
        self._whole, self._parts = self._summed(), []

    def share(self) -> Tensor | float:
        """Return the last pass's share of the weighted loss, to be added to its loss."""
        part = self._add()
        if part is None or self._coef == 0:
            return 0.0
        return self._coef * part.loss(part if self._whole is None else self._whole)

    def value(self) -> float | None:
        """Return the loss of the step, without its weight; all ranks call this. None without routers' logits."""
        whole = self._summed()
        return None if whole is None else whole.loss(whole).item()

    def _add(self) -> Balance | None:
        last = None if self._routers is None else self._routers.last
        if last is not None:
            self._parts.append(Balance(last.counts.detach(), last.shares.detach(), last.num))
        return last

    def _summed(self) -> Balance | None:
        if not self._parts:
            return None
        flat = torch.stack(
            [torch.cat([part.counts, part.shares, part.num[None]]).double() for part in self._parts]
        )
        total = flat.sum(dim=0)
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= self._model_parallel
        size = len(self._parts[0].counts)
        return Balance(total[:size], total[size : 2 * size], total[-1])


def weigh_balance(routers: Routers | None, causal: Any, given: float | None) -> None:
    """Set the weight of the load-balancing loss: `given`, or the config's if transformers would train it.

    Raises:
        ConfigError: A weight is given, but the model has no such loss.
    """
    config = causal.config.get_text_config()
    is_trained = getattr(config, "output_router_logits", False)
    coef = getattr(config, "router_aux_loss_coef", 0.0) if given is None and is_trained else given or 0.0
    if given and (routers is None or not hasattr(config, "router_aux_loss_coef")):
        raise ConfigError(
            f"train_parameters.router_aux_loss_coef={coef} needs a model with a load-balancing loss, and transformers "
            f"has none for {type(causal).__name__}. Leave it out."
        )
    if routers is not None:
        routers.balance_coef = float(coef)
        routers.has_balance = hasattr(config, "router_aux_loss_coef")


def routers_of(model: Any) -> Routers | None:
    """Return the routers that `find_routers` found in a transformers model; None if there are none."""
    found: Routers | None = vars(model).get("routers")
    return found


@torch.no_grad()
def find_routers(model: nn.Module, causal: Any, compute: Callable[[], Any]) -> Routers | None:
    """Find the routers of a model in one pass, `compute`, and wrap them; None if it has none.

    A router is the innermost module that returns the indices of a `topk` it has made. All ranks call this.
    """
    if "routers" in vars(causal) or not has_experts(causal.config.to_dict()):
        return routers_of(causal)
    running: list[list[Tensor]] = []
    found: list[tuple[nn.Module, int]] = []
    sizes: list[int] = []

    def enter(module: nn.Module, args: Any) -> None:
        running.append([])

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        chosen, parts = running.pop(), output if isinstance(output, tuple) else ()
        numbers = [x for x in parts if isinstance(x, Tensor) and not x.is_floating_point()]
        for place, indices in reversed([*enumerate(chosen)]):
            if any(x.shape == indices.shape and torch.equal(x, indices) for x in numbers):
                found.append((module, place))
                break

    def take(chosen: Any, scores: Tensor) -> Any:
        if running:
            running[-1].append(chosen[1])
            sizes.append(scores.shape[-1])
        return chosen

    hooks = [x.register_forward_pre_hook(enter, prepend=True) for x in model.modules()]
    hooks += [x.register_forward_hook(leave) for x in model.modules()]
    was_training = model.training
    model.eval()
    try:
        with _Watch(take), torch.compiler.set_stance("force_eager"):
            compute()
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    reshard(model)
    causal.routers = Routers(found, max(sizes)) if found else None
    return routers_of(causal)
