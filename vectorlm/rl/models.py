"""The models of a run: the policy, the reference that a KL penalty compares it with, the critic, and the teacher."""

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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig

from vectorlm.algorithms.batch import RolloutBatch
from vectorlm.algorithms.kl import generalised_jsd
from vectorlm.algorithms.logprobs import Comparison, align
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
from vectorlm.train.packing import Rows, num_needed, pack
from vectorlm.types import TrainedModel

LoadSharded = Callable[[Callable[[bool], nn.Module]], nn.Module]
"""Shards a model over the ranks, in place."""
NOISE = re.compile("drop|jitter|noise")
"""Part of the names of most settings of noise."""
NUM_SMALL, NUM_DRAWS = 64, 256
"""Up to how many numbers a draw counts as small, and how many draws `require_quiet` makes of it."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size in bytes: the integers that show a number's bits."""


class Reference:
    """The frozen policy that the KL penalty compares with: another model, or the policy with its first adapters."""

    def __init__(
        self,
        policy: LanguageModel,
        model: nn.Module | None,
        first_adapters: Callable[[Any], AbstractContextManager[None]] = lambda model: model.disable_adapter(),
    ) -> None:
        """Take a sharded copy of the policy's starting point; None goes back to the policy's first LoRA adapters.

        `first_adapters` does so to the policy's model for a block; by default they were zeros.
        """
        self._policy, self.model, self._first_adapters = policy, model, first_adapters
        # Of all tokens: the reference has another support than the policy.
        self._frozen = policy.untruncated() if model is None else beside(policy, model)
        self.why_padded = self._frozen.why_padded
        """Why its rows are padded; None where they are not."""

    def __call__(self, rows: Rows) -> torch.Tensor:
        """Return float32 [B, T] as `LanguageModel.logprobs` does, without gradient."""
        with torch.no_grad(), self._with_first_adapters():
            return self._frozen.logprobs(rows)

    @torch.no_grad()
    def sync(self) -> None:
        """Copy the weights of the policy, shard by shard."""
        assert self.model is not None, "with LoRA the reference does not move"
        reshard(self._policy.model)
        reshard(self.model)
        for mine, theirs in zip(self.model.parameters(), self._policy.model.parameters(), strict=True):
            mine.copy_(theirs)

    @contextmanager
    def _with_first_adapters(self) -> Iterator[None]:
        if self.model is not None:
            yield
            return
        # PEFT writes `requires_grad` of the parameters that it finds: they must be the same, the shards, both times.
        reshard(self._policy.model)
        with self._first_adapters(self._policy.model):
            yield
            reshard(self._policy.model)


class Critic:
    """A model with a value head: the expected reward of the rest of a completion, at each token."""

    def __init__(self, model: nn.Module, policy: LanguageModel) -> None:
        """Take a sharded token-classification model with one label; rows are packed as the policy's, if it is alike."""
        self.model, self._device, self._context = model, policy.device, policy.context
        inner = inner_model(model)
        is_alike = type(inner.base_model) is type(inner_model(policy.model).base_model)
        self.why_padded = policy.why_padded if is_alike else "it is of another family than the policy"
        """Why its rows are padded; None where they are not."""
        require_packed(self._context, self.why_padded)
        if self.why_padded is None:
            inner.set_attn_implementation(PACKED)

    def __call__(self, rows: Rows) -> torch.Tensor:
        """Return float32 [B, T]: the value of the state in which each token that is asked for was chosen."""
        device = self._device
        is_asked = rows.is_asked.to(device)
        if self.why_padded is None:
            packing = pack(rows, self._context)
            logits = self.model(**packing.arguments(device)).logits[0, packing.places.to(device)]
            found = packing.gather(logits[:, 0].float())
            return torch.zeros(is_asked.shape, device=device).masked_scatter(is_asked, found)
        inputs = {"input_ids": rows.input_ids.to(device), "attention_mask": rows.attention_mask.to(device)}
        values = align(self.model(**inputs, use_cache=False).logits[..., 0].float())
        return torch.where(is_asked, values, 0.0)


@dataclass(frozen=True)
class RLModels:
    """The models of a run, and the optimizer steps of those that are trained."""

    policy: LanguageModel
    policy_step: OptimizerStep
    reference: Reference | None = None
    critic: Critic | None = None
    critic_step: OptimizerStep | None = None
    teacher: Teacher | ServerTeacher | None = None

    @property
    def why_padded(self) -> str | None:
        """Why rows are padded; None where all models, which share their micro-batches, compute rows laid end to end."""
        roles = zip(("policy", "reference", "critic", "teacher"), self._roles, strict=True)
        reasons = ((name, role.why_padded) for name, role in roles if role is not None)
        return next((f"{name}: {reason}" for name, reason in reasons if reason is not None), None)

    @property
    def _roles(self) -> tuple[Any, ...]:
        return self.policy, self.reference, self.critic, self.teacher

    @property
    def schedules(self) -> list[Schedule]:
        """The learning rate schedules, of the policy first."""
        steps = (self.policy_step, self.critic_step)
        return [each.schedule for each in steps if each is not None and each.schedule is not None]

    def reshard(self) -> None:
        """Free what forward passes gathered, so that whoever reads the parameters next sees shards."""
        for role in self._roles:
            if role is not None and role.model is not None:
                reshard(role.model)

    def trained(self, *, with_reference: bool) -> dict[str, TrainedModel]:
        """Return what a checkpoint holds; the reference where it moves."""
        found = {"policy": TrainedModel(self.policy.model, self.policy_step.optimizer)}
        if self.critic is not None and self.critic_step is not None:
            found["critic"] = TrainedModel(self.critic.model, self.critic_step.optimizer)
        if with_reference and self.reference is not None and self.reference.model is not None:
            found["reference"] = TrainedModel(self.reference.model, None)
        return found


def load_reference(
    read: Callable[..., Any], load_sharded: LoadSharded, num_tokens: int | None = None
) -> nn.Module:
    """Load a frozen copy of the policy's starting point, or a teacher, whose logits beyond `num_tokens` are dropped.

    ``read(is_empty=…)`` is as `load_model` of one folder.
    """

    def load(is_empty: bool) -> nn.Module:
        model = read(is_empty=is_empty)
        if num_tokens is not None and num_logits(model) > num_tokens:
            model.resize_token_embeddings(num_tokens, mean_resizing=False)
        # Frozen: noise of training mode is of no use to it.
        return model.eval().requires_grad_(False)

    return load_sharded(load)


def num_logits(model: Any) -> int:
    """Return the size of a model's vocabulary, padding included."""
    return inner_model(model).config.get_text_config().vocab_size


def load_critic(path: str, load_sharded: LoadSharded, dtype: str = "float32") -> nn.Module:
    """Load a model with a value head of zeros, so that the first advantages are the rewards.

    Raises:
        ConfigError: transformers has no token classification for this architecture.
    """
    from transformers import AutoModelForTokenClassification

    def load(is_empty: bool) -> nn.Module:
        try:
            # transformers calls the output layer by either name.
            new = ("score.", "classifier.")
            model = load_pretrained(AutoModelForTokenClassification, path, dtype, is_empty, new, num_labels=1)
            head = model.score if hasattr(model, "score") else model.classifier
        except (ValueError, AttributeError) as error:
            raise ConfigError(
                f"rl.critic.model={path!r} cannot be a critic: transformers has no token classification for it "
                f"({str(error)[:120]}). Choose an algorithm without a critic, or another model for it."
            ) from error
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.zero_()
        return disable_dropout(model.train())

    return load_sharded(load)


def disable_dropout(model: Any) -> Any:
    """Set noise of training mode to 0, as far as its name tells; the model stays in training mode.

    ``model.training_noise`` keeps what the config had, for the export. `require_quiet` shows whether noise is left.
    """
    for module in model.modules():
        names = {*_noise_names(type(module)), *filter(NOISE.search, vars(module))}
        for name in names | ({"p"} if "drop" in type(module).__name__.lower() else set()):
            if _is_noise(inspect.getattr_static(module, name, None)):
                setattr(module, name, 0.0)
    inner, found = inner_model(model), []
    configs: list[Any] = [inner.config]
    for config in configs:
        # Some models read their config in each pass.
        values = vars(config)
        for name in {*_noise_names(type(config)), *filter(NOISE.search, values)}:
            if _is_noise(value := inspect.getattr_static(config, name, None)):
                found.append((config, name, value))
                setattr(config, name, 0.0)
        configs += [each for each in values.values() if isinstance(each, PreTrainedConfig)]
    inner.training_noise = found
    return model


def _noise_names(kind: type) -> list[str]:
    return list(filter(NOISE.search, dir(kind)))


def _is_noise(value: Any) -> bool:
    return isinstance(value, float) and 0 < value <= 1


class _Extremes(TorchDispatchMode):
    """Replaces small random draws by the least or the largest of many, which shows noise that is seldom drawn."""

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

    The random generators stay as they are.

    Raises:
        ConfigError: The passes differ; the text names the first module whose outputs do.
    """
    rows, before = probe(model), capture_rng()
    passes: list[list[tuple[str, torch.Tensor]]] = []

    def note(name: str, module: nn.Module, _: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                bits = tensor.detach().reshape(-1).view(BITS[tensor.dtype.itemsize])
                passes[-1].append((f"{name} ({type(module).__name__})", bits.sum(dtype=torch.int64)))

    hooks = [each.register_forward_hook(partial(note, name)) for name, each in model.named_modules()]
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
    sums = [torch.stack([value for _, value in each]).tolist() for each in passes]
    first, second = (
        [(name, value) for (name, _), value in zip(each, values, strict=True)]
        for each, values in zip(passes, sums, strict=True)
    )
    where = next((one[0] for one, two in zip_longest(first, second, fillvalue=("", 0)) if one != two), None)
    if after["cuda"] is not None and all(
        torch.equal(after[each], before[each]) for each in ("torch", "cuda")
    ):
        # Nothing was drawn; some kernels of CUDA add in another order each time.
        where = None
    found: list[str | None] = [where]
    if dist.is_initialized():
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, where)
    if where := next((each for each in found if each is not None), None):
        raise ConfigError(
            f"model: the {role} draws at random in training mode, and its log-probabilities or scores would be noise: "
            f"two passes of the same tokens first differ at {where}. Set the noise that it draws, such as a dropout "
            "or a jitter, to 0 in its config.json, or choose another model."
        )


AllRows = Callable[[RolloutBatch, RowFunction], torch.Tensor]
"""Applies a model to every row of a batch, as `vectorlm.rl.micro_batch.map_rows` does."""
ScoreTokens = Callable[[Sequence[Sequence[int]]], list[list[float]]]
"""From rows of token ids to the log-probability of each token."""


def beside(policy: LanguageModel, model: nn.Module) -> LanguageModel:
    """Return what computes a frozen model's rows as the policy's are: of all tokens, at the policy's temperature."""
    return LanguageModel(
        model, policy.temperature, packs=policy.packs, device=policy.device, context=policy.context
    )


class Teacher:
    """A frozen model that is sharded like the policy, at the policy's temperature."""

    def __init__(self, policy: LanguageModel, model: nn.Module) -> None:
        """Take a sharded model with as many logits as the policy."""
        self.model: nn.Module | None = model
        self._frozen = beside(policy, model)
        self.why_padded = self._frozen.why_padded
        """Why its rows are padded; None where they are not."""

    def logprobs(self, batch: RolloutBatch, all_rows: AllRows) -> torch.Tensor:
        """Return the log-probability of each token that the policy chose, float32 [B, T] on the CPU."""
        return all_rows(batch, self._frozen.logprobs)

    def comparison(self, rows: Rows, beta: float) -> Comparison:
        """Compute rows, and return what compares the policy's distributions of their tokens with the teacher's.

        Its two numbers of each token are the divergence to learn from, with gradient, and KL(policy || teacher).
        """
        scores = self._frozen.scores(rows)

        def compare(places: slice, logprobs: torch.Tensor) -> torch.Tensor:
            teacher = scores.logprobs(places)
            divergence = generalised_jsd(logprobs, teacher, beta)
            reverse = divergence if beta == 1 else generalised_jsd(logprobs.detach(), teacher, 1.0)
            return torch.stack([divergence, reverse.detach()], dim=-1)

        return compare


class ServerTeacher:
    """A teacher behind a server, which returns only the log-probabilities of the sampled tokens."""

    model: nn.Module | None = None
    why_padded: str | None = None

    def __init__(self, score: ScoreTokens, topology: Topology) -> None:
        """Take what asks the server."""
        self._score, self._topology = score, topology

    def logprobs(self, batch: RolloutBatch, all_rows: AllRows) -> torch.Tensor:
        """Return the log-probability of each token that the policy chose, float32 [B, T] on the CPU.

        Each rank asks for a share of the rows, up to the last token that is trained on. What one rank's server call
        raises, all ranks raise.
        """
        ends = {row: count + 1 for row, count in enumerate(num_needed(batch.mask)) if count}
        rows = list(ends)[self._topology.rank :: self._topology.world_size]
        asked = [batch.input_ids[row, : ends[row]].tolist() for row in rows]
        mine: Any = capture(lambda: dict(zip(rows, self._score(asked), strict=True)))
        by_rank = gather(self._topology, mine)
        found = torch.zeros(batch.input_ids.shape)
        for answers in results_or_first_error(by_rank):
            for row, values in answers.items():
                found[row, : len(values)] = torch.tensor(values)
        return found
