"""The models of a run: policy, reference, critic and teacher."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig

from vectorlm.algorithms.batch import RolloutBatch
from vectorlm.algorithms.kl import generalised_jsd
from vectorlm.algorithms.logprobs import (
    Comparison,
    Places,
    align,
    compute_head_in_float32,
    computes_in_float32,
)
from vectorlm.errors import ConfigError
from vectorlm.ranks.engine_ranks import capture, gather, results_or_first_error
from vectorlm.ranks.topology import Topology
from vectorlm.rl.micro_batch import RowFunction
from vectorlm.sampling.weights.model_tensors import reshard
from vectorlm.train.attention import PACKED
from vectorlm.train.checkpoint.state import capture_rng, restore_rng
from vectorlm.train.language_model import LanguageModel, inner_model, probe, require_packed
from vectorlm.train.load import load_pretrained
from vectorlm.train.optimizer_step import OptimizerStep, Schedule
from vectorlm.train.packing import Rows, num_needed, pack, to_device
from vectorlm.train.row_by_row import follow
from vectorlm.types import TrainedModel

LoadSharded = Callable[[Callable[[bool], nn.Module]], nn.Module]
"""Loads a model with the given function, and shards it over the ranks."""
NOISE = re.compile("drop|jitter|noise")
"""Matches the names of most settings of noise."""
NUM_SMALL, NUM_DRAWS = 64, 256
"""Maximum size of a small random draw, and the number of draws that `require_quiet` makes in its place."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by size in bytes, to read the bits of a number."""


class Reference:
    """The frozen reference of the KL penalty: a second model, or the policy with its initial LoRA adapters."""

    def __init__(
        self,
        policy: LanguageModel,
        model: nn.Module | None,
        first_adapters: Callable[[Any], AbstractContextManager[None]] = lambda model: model.disable_adapter(),
    ) -> None:
        """Take a sharded copy of the initial policy; None uses the policy with its initial LoRA adapters.

        `first_adapters` restores these adapters for a block; by default it disables the adapters.
        """
        self._policy, self.model, self._first_adapters = policy, model, first_adapters
        # Not truncated, because the reference has a different support than the policy.
        self._frozen = policy.untruncated() if model is None else beside(policy, model)
        # The reference chooses experts itself.
        self._frozen.routers = None
        self.why_padded = self._frozen.why_padded
        """Why rows are padded; None if they are packed."""

    def __call__(self, rows: Rows) -> torch.Tensor:
        """Return log-probabilities as `LanguageModel.logprobs` does, float32 [B, T], without gradient."""
        with torch.no_grad(), self._with_first_adapters():
            return self._frozen.logprobs(rows)

    @torch.no_grad()
    def sync(self) -> None:
        """Copy the weights of the policy, shard by shard; from a policy that ranks split, tensor by tensor."""
        assert self.model is not None, "with LoRA the reference does not move"
        reshard(self._policy.model)
        reshard(self.model)
        pairs: Any = zip(self.model.parameters(), self._policy.model.parameters(), strict=True)
        for mine, theirs in pairs:
            layouts = [(x.device_mesh, x.placements) for x in (mine, theirs) if isinstance(x, DTensor)]
            if len({*layouts}) < 2:
                mine.copy_(theirs)
                continue
            # torch copies only within a mesh.
            whole = distribute_tensor(theirs.full_tensor(), *layouts[0], src_data_rank=None)
            mine.to_local().copy_(whole.to_local())

    @contextmanager
    def _with_first_adapters(self) -> Iterator[None]:
        if self.model is not None:
            yield
            return
        # PEFT sets `requires_grad` on the parameters that it finds. Before and after, these must be the shards.
        reshard(self._policy.model)
        with self._first_adapters(self._policy.model):
            yield
            reshard(self._policy.model)


class Critic:
    """A model with a value head: the expected reward of the rest of the completion, at every token."""

    def __init__(self, model: nn.Module, policy: LanguageModel) -> None:
        """Take a sharded token-classification model with one label; with the policy's architecture it can pack rows."""
        self.model, self._device, self._context = model, policy.device, policy.context
        inner = inner_model(model)
        leader = inner_model(policy.model)
        is_alike = type(inner.base_model) is type(leader.base_model)
        self.why_padded = (
            policy.why_padded if is_alike else "it belongs to a different model family than the policy"
        )
        """Why rows are padded; None if they are packed."""
        is_recurrent = any(hasattr(module, "row_by_row") for module in leader.modules())
        if self.why_padded is None and is_recurrent and _layers(inner) != _layers(leader):
            self.why_padded = "its layers differ from the policy's, and some are recurrent"
        require_packed(self._context, self.why_padded)
        if self.why_padded is None:
            inner.set_attn_implementation(PACKED)
            follow(inner.base_model, leader.base_model)

    def __call__(self, rows: Rows) -> torch.Tensor:
        """Return float32 [B, T]: the value of the state before each requested token."""
        device = self._device
        is_asked = to_device(rows.is_asked, device)
        if self.why_padded is None:
            packing = pack(rows, self._context)
            logits = self.model(**packing.arguments(device)).logits[0, to_device(packing.places, device)]
            found = packing.gather(logits[:, 0].float())
            return torch.zeros(is_asked.shape, device=device).masked_scatter(is_asked, found)
        inputs = {
            "input_ids": to_device(rows.input_ids, device),
            "attention_mask": to_device(rows.attention_mask, device),
        }
        values = align(self.model(**inputs, use_cache=False).logits[..., 0].float())
        return torch.where(is_asked, values, 0.0)


def _layers(model: Any) -> list[tuple[str, type]]:
    return [(name, type(module)) for name, module in model.base_model.named_modules()]


@dataclass(frozen=True)
class RLModels:
    """The models of a run, and the optimizer steps of the trained ones."""

    policy: LanguageModel
    policy_step: OptimizerStep
    reference: Reference | None = None
    critic: Critic | None = None
    critic_step: OptimizerStep | None = None
    teacher: Teacher | ServerTeacher | None = None

    @property
    def why_padded(self) -> str | None:
        """Why rows are padded; None if all models, which share their micro-batches, pack them."""
        reasons = ((name, role.why_padded) for name, role in self._roles.items())
        return next((f"{name}: {reason}" for name, reason in reasons if reason is not None), None)

    @property
    def _roles(self) -> dict[str, Any]:
        names = ("policy", "reference", "critic", "teacher")
        return {name: role for name in names if (role := getattr(self, name)) is not None}

    @property
    def schedules(self) -> list[Schedule]:
        """The learning rate schedules, with the policy's schedule first."""
        steps = (self.policy_step, self.critic_step)
        return [step.schedule for step in steps if step is not None and step.schedule is not None]

    def reshard(self) -> None:
        """Free the parameters that forward passes gathered; the next reader then sees shards."""
        for role in self._roles.values():
            if role.model is not None:
                reshard(role.model)

    def trained(self, *, with_reference: bool) -> dict[str, TrainedModel]:
        """Return the models for a checkpoint; the reference only if it changes."""
        found = {"policy": TrainedModel(self.policy.model, self.policy_step.optimizer)}
        if self.critic is not None and self.critic_step is not None:
            found["critic"] = TrainedModel(self.critic.model, self.critic_step.optimizer)
        if with_reference and self.reference is not None and self.reference.model is not None:
            found["reference"] = TrainedModel(self.reference.model, None)
        return found


def load_reference(
    read: Callable[..., Any], load_sharded: LoadSharded, num_tokens: int | None = None
) -> nn.Module:
    """Load a frozen copy of the initial policy, or a teacher; logits beyond `num_tokens` are dropped.

    ``read(is_empty=…)`` reads the model, as `load_model` does.
    """

    def load(is_empty: bool) -> nn.Module:
        model = read(is_empty=is_empty)
        if num_tokens is not None and num_logits(model) > num_tokens:
            head = model.get_output_embeddings()
            model.resize_token_embeddings(num_tokens, mean_resizing=False)
            if computes_in_float32(head):
                compute_head_in_float32(model.get_output_embeddings())
        return model.eval().requires_grad_(False)

    return load_sharded(load)


def num_logits(model: Any) -> int:
    """Return the size of a model's vocabulary, padding included."""
    return inner_model(model).config.get_text_config().vocab_size


def load_critic(path: str, load_sharded: LoadSharded, dtype: str = "float32") -> nn.Module:
    """Load a model with a value head of zeros: the first values are 0.

    Raises:
        ConfigError: transformers has no token classification for this architecture.
    """
    from transformers import AutoModelForTokenClassification

    def load(is_empty: bool) -> nn.Module:
        try:
            # In transformers, the output layer has one of these names.
            new = ("score.", "classifier.")
            model = load_pretrained(AutoModelForTokenClassification, path, dtype, is_empty, new, num_labels=1)
            head = model.score if hasattr(model, "score") else model.classifier
        except (ValueError, AttributeError) as error:
            raise ConfigError(
                f"rl.critic.model={path!r} cannot be a critic: transformers has no token classification for this "
                f"architecture ({str(error)[:120]}). Choose another model, or an algorithm without a critic."
            ) from error
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.zero_()
        # A linear layer with a bias returns a view, about which FSDP warns in every forward pass.
        head.register_forward_hook(_without_view)
        return disable_dropout(model.train())

    return load_sharded(load)


def _without_view(head: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output.clone()


def disable_dropout(model: Any) -> Any:
    """Set the noise of training mode to 0; the model stays in training mode.

    The noise is found by its names; `require_quiet` finds noise with other names. ``model.training_noise`` keeps the
    values of the config for the export.
    """
    for module in model.modules():
        names = {*_noise_names(type(module)), *filter(NOISE.search, vars(module))}
        for name in names | ({"p"} if "drop" in type(module).__name__.lower() else set()):
            if _is_noise(inspect.getattr_static(module, name, None)):
                setattr(module, name, 0.0)
    inner, found = inner_model(model), []
    configs: list[Any] = [inner.config]
    for config in configs:
        # Change the config too: some models read it in every pass.
        values = vars(config)
        for name in {*_noise_names(type(config)), *filter(NOISE.search, values)}:
            if _is_noise(value := inspect.getattr_static(config, name, None)):
                found.append((config, name, value))
                setattr(config, name, 0.0)
        configs += [value for value in values.values() if isinstance(value, PreTrainedConfig)]
    inner.training_noise = found
    return model


def _noise_names(kind: type) -> list[str]:
    return list(filter(NOISE.search, dir(kind)))


def _is_noise(value: Any) -> bool:
    return isinstance(value, float) and 0 < value <= 1


class _Extremes(TorchDispatchMode):
    """Replaces small random draws by the smallest or largest of many, to find noise that is rarely drawn."""

    def __init__(self, pick: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._pick = pick

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        is_draw = torch.Tag.nondeterministic_seeded in func.tags and isinstance(found, torch.Tensor)
        if is_draw and found.numel() <= NUM_SMALL:
            draws = [found.clone(), *(func(*args, **(kwargs or {})).clone() for _ in range(NUM_DRAWS))]
            found.copy_(self._pick(torch.stack(draws), dim=0))
        return found


@torch.no_grad()
def require_quiet(role: str, model: nn.Module, compute: Callable[[Rows], Any]) -> None:
    """Raise unless two passes of a model in training mode agree bit for bit; called on all ranks.

    The random generators do not change.

    Raises:
        ConfigError: The passes differ; the message names the first module with different outputs.
    """
    rows, before = probe(model), capture_rng()
    passes: list[list[tuple[str, int]]] = []

    def note(name: str, module: nn.Module, _: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                bits = tensor.detach().reshape(-1).view(BITS[tensor.dtype.itemsize])
                passes[-1].append((f"{name} ({type(module).__name__})", int(bits.sum(dtype=torch.int64))))

    hooks = [module.register_forward_hook(partial(note, name)) for name, module in model.named_modules()]
    try:
        for pick in (torch.amin, torch.amax):
            passes.append([])
            with _Extremes(pick), torch.compiler.set_stance("force_eager"):
                compute(rows)
    finally:
        for hook in hooks:
            hook.remove()
        after = capture_rng()
        restore_rng(before)
    reshard(model)
    where = next((one[0] for one, two in zip_longest(*passes, fillvalue=("", 0)) if one != two), None)
    if after["cuda"] is not None and all(
        torch.equal(after[name], before[name]) for name in ("torch", "cuda")
    ):
        # Nothing was drawn. Some CUDA kernels add in a different order every time.
        where = None
    found: list[str | None] = [where]
    if dist.is_initialized():
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, where)
    if where := next((name for name in found if name is not None), None):
        raise ConfigError(
            f"model: the {role} must not draw random numbers in training mode, but two passes of the same tokens first "
            f"differ at {where}. Set its noise, such as dropout or jitter, to 0 in its config.json, or choose another "
            "model."
        )


AllRows = Callable[[RolloutBatch, RowFunction], torch.Tensor]
"""Applies a model to every row of a batch, as `vectorlm.rl.micro_batch.map_rows` does."""
REST = 1e-7
"""Lower bound for the total probability of the tokens that a teacher does not return."""
ScoreTop = Callable[..., list[list[list[tuple[int, float]]]]]
"""Returns the ``k`` most probable tokens at the place of each token but the first, with their log-probabilities."""
ScoreTokens = Callable[[Sequence[Sequence[int]]], list[list[float]]]
"""Returns the log-probability of every token, from rows of token ids."""


def beside(policy: LanguageModel, model: nn.Module) -> LanguageModel:
    """Return a frozen model that computes rows as the policy does, but over all tokens of the vocabulary."""
    return LanguageModel(
        model,
        policy.temperature,
        packs=policy.packs,
        device=policy.device,
        context=policy.context,
        image_tokens=policy.image_tokens,
        watches_routers=False,
    )


class Teacher:
    """A frozen model, sharded as the policy is, which computes at the policy's temperature."""

    def __init__(self, policy: LanguageModel, model: nn.Module) -> None:
        """Take a sharded model with as many logits as the policy."""
        self.model: nn.Module | None = model
        self._frozen = beside(policy, model)
        self.why_padded = self._frozen.why_padded
        """Why rows are padded; None if they are packed."""

    def logprobs(self, batch: RolloutBatch, all_rows: AllRows) -> torch.Tensor:
        """Return the log-probability of every token that the policy chose, float32 [B, T] on the CPU."""
        return all_rows(batch, self._frozen.logprobs)

    def comparison(self, rows: Rows, beta: float) -> Comparison:
        """Compute rows, and return a function that compares the policy's distributions with the teacher's.

        It returns two numbers per token: the divergence to learn from, with gradient, and KL(policy || teacher).
        """
        scores = self._frozen.scores(rows)

        def compare(places: Places, logprobs: torch.Tensor) -> torch.Tensor:
            teacher = scores.logprobs(places)
            divergence = generalised_jsd(logprobs, teacher, beta)
            reverse = divergence if beta == 1 else generalised_jsd(logprobs.detach(), teacher, 1.0)
            return torch.stack([divergence, reverse.detach()], dim=-1)

        return compare


class SelfTeacher(Teacher):
    """The policy itself as a teacher, with its current weights and another prompt before the same completion.

    Source: Hübotter et al. 2026, arXiv:2601.20802, and Shenfeld et al. 2026, arXiv:2601.19897.
    """

    def __init__(self, policy: LanguageModel) -> None:
        """Use the policy as the teacher."""
        # Not truncated, because the tokens that it would remove depend on the prompt.
        self.model, self._frozen, self.why_padded = None, policy.untruncated(), policy.why_padded

    def logprobs(self, batch: RolloutBatch, all_rows: AllRows) -> torch.Tensor:
        """Return the log-probability of every token that the policy chose, float32 [B, T] on the CPU."""
        other = batch.for_teacher
        found = torch.zeros(batch.mask.shape)
        found[batch.mask] = all_rows(other, self._frozen.logprobs)[other.mask]
        return found

    @torch.no_grad()
    def comparison(self, rows: Rows, beta: float) -> Comparison:
        """Compare as `Teacher.comparison` does; `rows` come from `RolloutBatch.for_teacher`."""
        return super().comparison(rows, beta)


def compared_with_top(token_ids: torch.Tensor, teacher: torch.Tensor, beta: float) -> Comparison:
    """Return a function that compares the policy's distributions with the most probable tokens of a teacher.

    All other tokens count as one token. The result is a lower bound of the divergence of the whole distributions, and
    equals it if all tokens are given.

    Args:
        token_ids: int64 [M, k], the most probable tokens.
        teacher: float32 [M, k], the teacher's log-probabilities of these tokens; -inf for a token to ignore.
        beta: See `generalised_jsd`.
    """

    def with_rest(logprobs: torch.Tensor) -> torch.Tensor:
        # logsumexp has the gradient NaN if the policy can draw none of these tokens.
        rest = torch.log1p(-logprobs.exp().sum(-1).clamp(max=1 - REST))
        return torch.cat([logprobs, rest[:, None]], dim=-1)

    def compare(places: Places, logprobs: torch.Tensor) -> torch.Tensor:
        theirs = teacher[places]
        chosen = logprobs.gather(1, token_ids[places]).masked_fill(theirs == -torch.inf, -torch.inf)
        mine, its = with_rest(chosen), with_rest(theirs)
        divergence = generalised_jsd(mine, its, beta)
        reverse = divergence if beta == 1 else generalised_jsd(mine.detach(), its, 1.0)
        return torch.stack([divergence, reverse.detach()], dim=-1)

    return compare


class ServerTeacher:
    """A teacher on a server, which returns log-probabilities of sampled tokens, or of the most probable tokens."""

    model: nn.Module | None = None
    why_padded: str | None = None

    def __init__(
        self, score: ScoreTokens, topology: Topology, num_tokens: int, top: ScoreTop | None = None
    ) -> None:
        """Take functions that send rows to the server: for the tokens of the rows, and for the most probable tokens.

        `num_tokens` is the number of the policy's logits; a teacher of its family may have more.
        """
        self._score, self._topology, self._num_tokens, self._top = score, topology, num_tokens, top

    def logprobs(self, batch: RolloutBatch, all_rows: AllRows) -> torch.Tensor:
        """Return the log-probability of every token that the policy chose, float32 [B, T] on the CPU.

        Every rank sends its share of the rows, up to the last trained token. If a rank's call fails, all ranks raise
        its error.
        """
        found = torch.zeros(batch.input_ids.shape)
        for row, values in self._ask(batch, self._score).items():
            found[row, : len(values)] = torch.tensor(values)
        return found

    def top_logprobs(self, batch: RolloutBatch, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the teacher's `k` most probable tokens at the place of every token that the policy chose.

        Returns:
            int64 and float32 [M, k], row by row; see `TrainBatch.teacher_top`. A token that the policy does not have
            gets the log-probability -inf.
        """
        assert self._top is not None
        answers = self._ask(batch, partial(self._top, k=k))
        # The server returns nothing for the first token of a row.
        shown = [answers[row][place - 1] for row, place in batch.mask.nonzero().tolist()]
        pairs = torch.tensor(shown, dtype=torch.float64).view(-1, k, 2)
        token_ids, logprobs = pairs[..., 0].long(), pairs[..., 1].float()
        is_shared = token_ids < self._num_tokens
        return torch.where(is_shared, token_ids, 0), torch.where(is_shared, logprobs, -torch.inf)

    def _ask(
        self, batch: RolloutBatch, ask: Callable[[Sequence[Sequence[int]]], list[Any]]
    ) -> dict[int, Any]:
        """Return the server's answers by row, on every rank."""
        ends = {row: count + 1 for row, count in enumerate(num_needed(batch.mask)) if count}
        rows = list(ends)[self._topology.rank :: self._topology.world_size]
        asked = [batch.input_ids[row, : ends[row]].tolist() for row in rows]
        mine: Any = capture(lambda: dict(zip(rows, ask(asked), strict=True)))
        answers = results_or_first_error(gather(self._topology, mine))
        return {row: answer for by_row in answers for row, answer in by_row.items()}
