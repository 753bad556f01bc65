"""Objectives of training: the tokens, pairs or steps of a batch that count, and their loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from vectorlm.algorithms.preference import (
    KTO_BETA,
    PairLogprobs,
    PreferenceSpec,
    bradley_terry_loss,
    kto_loss,
)
from vectorlm.algorithms.settings import PreferenceSettings
from vectorlm.data.loader import StepLoader
from vectorlm.errors import DatasetError
from vectorlm.sampling.weights.model_tensors import reshard
from vectorlm.train.language_model import LanguageModel, inner_model, prepare_packing
from vectorlm.train.packing import ContextGroup, Packing, Rows, pack, to_device
from vectorlm.types import Batch


class Objective(Protocol):
    """A loss summed over the tokens or pairs of a batch; all ranks call its methods alike."""

    @property
    def counts(self) -> str:
        """Noun for one counted unit, for messages."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the values that are measured in addition to the loss."""

    def prepare(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Convert this rank's micro-batches of a step, or of a held-out dataset, for `sum_loss`."""

    def num_counted(self, batch: Batch) -> torch.Tensor:
        """Count the tokens or pairs of a micro-batch."""

    def sum_loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss, and float64 [K, 2]: for each of `names` a sum and its divisor."""


@dataclass(frozen=True)
class NextTokens:
    """The next-token loss of the target tokens."""

    language_model: LanguageModel
    ignore_index: int = -100
    """Label of tokens outside the loss."""
    counts = "token"
    names = ()

    def prepare(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Give every text its own row if rows are packed: no text may attend to the text before it."""
        for batch in batches:
            is_cut = self.language_model.packs and batch.text_ids.any()
            yield apart(batch, self.ignore_index) if is_cut else batch

    def num_counted(self, batch: Batch) -> torch.Tensor:
        """Count the target tokens."""
        return is_target(batch, self.ignore_index).sum()

    def sum_loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed next-token loss of a micro-batch.

        Raises:
            DatasetError: A token or a counted label is outside the model's vocabulary.
        """
        rows = known_rows(batch, self.language_model.model, self.ignore_index)
        logprobs = self.language_model.logprobs(rows)
        return -logprobs.sum(), logprobs.new_zeros(0, 2, dtype=torch.float64)


def is_target(batch: Batch, ignore_index: int) -> torch.Tensor:
    """Return the tokens that count in the loss, bool [B, T]. The first token of a row has no prediction."""
    found = batch.labels != ignore_index
    found[:, 0] = False
    return found


def known_rows(batch: Batch, model: nn.Module, ignore_index: int) -> Rows:
    """Return the rows of a batch for a forward pass that computes its target tokens.

    The check runs on the CPU: on CUDA an unknown token aborts the process without naming the token.

    Raises:
        DatasetError: A token or a counted label is outside the model's vocabulary, or a row without images has an
            image token.
    """
    num_tokens = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    targets = is_target(batch, ignore_index)
    labels = batch.labels.where(targets, 0)
    for name, values in (("token", batch.input_ids), ("label", labels)):
        is_unknown = (values < 0) | (values >= num_tokens)
        if is_unknown.any():
            row, column = is_unknown.nonzero()[0].tolist()
            raise DatasetError(
                f"row {batch.ids[row]} of the dataset holds the {name} {values[row, column]}, but the model has "
                f"{num_tokens} tokens. Preprocess the dataset with the model's own tokenizer, or set "
                f"dataset.ignore_index={ignore_index} to the label of tokens outside the loss."
            )
    image_token = getattr(model.config, "image_token_id", None)
    has_token = (batch.input_ids == image_token).any(dim=1).tolist() if image_token is not None else []
    for row, is_wrong in enumerate(has_token):
        if is_wrong and not (batch.images and batch.images[row]):
            raise DatasetError(
                f"row {batch.ids[row]} of the dataset holds the image token {image_token}, but no image. Preprocess "
                "the dataset again, which leaves the row out."
            )
    return Rows(
        batch.input_ids, batch.attention_mask, targets, batch.ids.tolist(), batch.labels, images=batch.images
    )


def apart(batch: Batch, ignore_index: int) -> Batch:
    """Give every text its own row, in the order of the batch."""
    lengths = [
        ids[mask.bool()].bincount().tolist()
        for ids, mask in zip(batch.text_ids, batch.attention_mask, strict=True)
    ]

    def cut(x: torch.Tensor, fill: int) -> torch.Tensor:
        texts = [
            text for row, sizes in zip(x, lengths, strict=True) for text in row[: sum(sizes)].split(sizes)
        ]
        return pad_sequence(texts, batch_first=True, padding_value=fill)

    images = None
    if batch.images is not None:
        places = zip(lengths, batch.images, strict=True)
        images = [text for sizes, placed in places for text in _images_apart(placed, sizes)]
    return replace(
        batch,
        images=images,
        input_ids=cut(batch.input_ids, 0),
        attention_mask=cut(batch.attention_mask, 0),
        labels=cut(batch.labels, ignore_index),
        ids=batch.ids.repeat_interleave(torch.tensor([len(sizes) for sizes in lengths])),
        text_ids=cut(torch.zeros_like(batch.text_ids), 0),
    )


def _images_apart(placed: Sequence[Any], sizes: Sequence[int]) -> Iterator[list[Any]]:
    """Yield the pictures of each text of a row, with their places in the text."""
    first = 0
    for size in sizes:
        yield [replace(one, start=one.start - first) for one in placed if first <= one.start < first + size]
        first += size


class Scorer:
    """A reward model's score of each row, read at the last token that is not padding, as in transformers."""

    def __init__(
        self,
        model: nn.Module,
        *,
        packs: bool = True,
        device: str | torch.device = "cpu",
        context: ContextGroup | None = None,
    ) -> None:
        """Take a sharded model of `load_scorer`; all ranks call this. `packs`, `context`: see `LanguageModel`."""
        self.model, self._device, self._context = model, torch.device(device), context
        inner = inner_model(model)
        self._score, self._padding = inner.score, inner.config.get_text_config().pad_token_id
        self.why_padded = prepare_packing(model, self._padded, self._packed, packs=packs, context=context)
        """Why rows are padded; None if they are packed."""

    def __call__(self, rows: Rows, is_read: torch.Tensor | None = None) -> torch.Tensor:
        """Return float32 [B], the score of each row, on the CPU; `rows.is_asked` is not read.

        With `is_read`, bool [B, T], return float32 [M]: the score at each of these tokens, row by row.
        """
        if self.why_padded is None:
            return self._packed(rows, is_read)[0]
        if is_read is None or not is_read.any():
            return self._padded(rows)[0][: None if is_read is None else 0]
        # transformers computes one score per row: make one row for each token, ending there.
        row, place = is_read.nonzero(as_tuple=True)
        mask = rows.attention_mask[row] * (torch.arange(is_read.shape[1]) <= place[:, None])
        return self._padded(replace(rows, input_ids=rows.input_ids[row], attention_mask=mask))[0]

    def _padded(self, rows: Rows) -> tuple[torch.Tensor, torch.dtype]:
        input_ids = rows.input_ids.where(rows.attention_mask.bool(), self._padding)
        input_ids, mask = (to_device(x, self._device) for x in (input_ids, rows.attention_mask))
        logits = self.model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits
        return logits[:, 0].float(), logits.dtype

    def _packed(self, rows: Rows, is_read: torch.Tensor | None = None) -> tuple[torch.Tensor, Packing]:
        if is_read is None:
            places = torch.arange(rows.input_ids.shape[1])
            is_text = rows.attention_mask.bool() & (rows.input_ids != self._padding)
            is_read = F.one_hot(places.where(is_text, 0).amax(dim=1), len(places)).bool()
        # A pass returns the state before each requested token. Request the token after each token to read.
        is_asked = F.pad(is_read, (1, 0))
        input_ids, mask = F.pad(rows.input_ids, (0, 1)), F.pad(rows.attention_mask, (0, 1))
        packing = pack(Rows(input_ids, mask, is_asked, rows.groups), self._context)
        model: Any = self.model
        # Select the column after the pass: FSDP2 warns if a pass returns a view.
        scores = model.packed_pass(packing, self._device, self._score)[:, 0].float()
        return packing.gather(scores), packing


class Pairs:
    """Methods shared by the objectives of pairs."""

    counts = "pair"
    names = ("pair_accuracy", "pair_margin", "chosen_reward", "rejected_reward")
    """Metrics: the share of pairs whose chosen text has the higher reward, the mean margin, and both mean rewards."""
    ignore_index: int
    """Label of tokens outside the loss."""

    def prepare(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Give every text its own row."""
        return (apart(batch, self.ignore_index) for batch in batches)

    def num_counted(self, batch: Batch) -> torch.Tensor:
        """Count the pairs."""
        return (batch.ids >= 0).sum() // 2


@dataclass(frozen=True)
class RewardPairs(Pairs):
    """The Bradley-Terry loss of a reward model's scores."""

    scorer: Scorer
    center_coef: float = 0.0
    ignore_index: int = -100

    def sum_loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss of the pairs, and the sums of `names`."""
        scores = self.scorer(known_rows(batch, self.scorer.model, self.ignore_index))
        chosen, rejected = in_pairs(scores, batch)
        assert batch.values is not None
        margins = to_device(batch.values[: len(chosen)], chosen.device)
        loss = bradley_terry_loss(chosen, rejected, margins, self.center_coef)
        return loss.sum(), measured(chosen, rejected)


@dataclass(frozen=True)
class Steps:
    """The binary cross-entropy of a reward model's score at the end of each step, whose label is 1 or 0.

    Source: Lightman et al. 2023, arXiv:2305.20050 (labels of steps); Wang et al. 2024, arXiv:2312.08935, eq. 2.
    """

    scorer: Scorer
    ignore_index: int = -100
    """Label of tokens that end no step."""
    counts = "step"
    names = ("step_accuracy", "step_brier", "step_bias", "right_probability", "wrong_probability")
    """Metrics: accuracy; mean squared error and mean error of the probability that a step is right; and the mean of
    this probability over right steps and over wrong steps."""

    def prepare(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Return the batches unchanged."""
        return batches

    def num_counted(self, batch: Batch) -> torch.Tensor:
        """Count the steps."""
        return (batch.labels != self.ignore_index).sum()

    def sum_loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss of the steps, and the sums of `names`."""
        is_end = batch.labels != self.ignore_index
        scores = self.scorer(known_rows(batch, self.scorer.model, self.ignore_index), is_end)
        labels = to_device(batch.labels[is_end], scores.device).to(scores.dtype)
        loss = F.binary_cross_entropy_with_logits(scores, labels, reduction="sum")
        found, right = scores.detach().double().sigmoid(), labels.double()
        gap = found - right
        values = torch.stack(
            [(gap.abs() < 0.5).double(), gap.square(), gap, found * right, found * (1 - right)]
        )
        weights = torch.stack([torch.ones_like(right)] * 3 + [right, 1 - right])
        return loss, torch.stack([values.sum(dim=1), weights.sum(dim=1)], dim=1)


@dataclass(frozen=True)
class Completions:
    """The log-probabilities of completions, shared by the preference objectives of a policy."""

    language_model: LanguageModel
    averages: bool
    """Whether log-probabilities are divided by the number of tokens."""
    ignore_index: int = -100
    """Label of tokens outside completions."""

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """Return the log-probabilities of texts, float32 [B]; the batch has one text per row."""
        rows = known_rows(batch, self.language_model.model, self.ignore_index)
        sums = self.language_model.logprobs(rows).sum(dim=1)
        return sums / to_device(rows.is_asked.sum(dim=1).clamp(min=1), sums.device) if self.averages else sums

    @torch.no_grad()
    def table(self, loader: StepLoader, num_rows: int) -> torch.Tensor:
        """Return the log-probabilities of both texts of every row of a dataset, float32 [N, 2], on all ranks' CPUs."""
        model = self.language_model.model
        found = torch.zeros(num_rows, 2, device=self.language_model.device)
        model.eval()
        for step in loader.steps(0):
            for batch in step:
                texts = apart(batch, self.ignore_index)
                both = torch.stack(in_pairs(self.logprobs(texts), texts), dim=1)
                found[to_device(batch.ids[batch.ids >= 0], found.device)] = both
        model.train()
        reshard(model)
        # Each row was computed by one rank, or by all ranks that share it.
        dist.all_reduce(found)
        return found.cpu() / loader.topology.ranks_per_share


@dataclass(frozen=True)
class PreferencePairs(Pairs):
    """A loss of the log-probabilities of pairs, such as DPO."""

    completions: Completions
    spec: PreferenceSpec
    settings: PreferenceSettings

    @property
    def ignore_index(self) -> int:  # type: ignore[override]
        """Label of tokens outside completions."""
        return self.completions.ignore_index

    def sum_loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss of the pairs, and the sums of `names`."""
        chosen, rejected = in_pairs(self.completions.logprobs(batch), batch)
        references = [torch.zeros_like(chosen)] * 2
        if batch.references is not None:
            references = list(to_device(batch.references[: len(chosen)], chosen.device).unbind(1))
        beta = self.settings.beta or self.spec.beta
        loss = self.spec.loss(PairLogprobs(chosen, rejected, *references), self.settings, beta)
        return loss.sum(), measured(beta * (chosen - references[0]), beta * (rejected - references[1]))


@dataclass
class GoodAndBad:
    """KTO's loss of good and bad completions; the second text of a row is for the estimate of the KL divergence."""

    completions: Completions
    settings: PreferenceSettings
    _kl: float = 0.0
    counts = "completion"
    names = ("chosen_reward", "rejected_reward", "kl")

    def prepare(self, batches: Iterable[Batch]) -> list[Batch]:
        """Estimate the divergence over all batches, and remove the texts that are only for the estimate."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.completions.language_model.device)
        firsts = []
        for batch in batches:
            texts = apart(batch, self.completions.ignore_index)
            num_rows = int((batch.ids >= 0).sum())
            is_second = (torch.arange(len(texts.ids)) % 2 == 1) & (texts.ids >= 0)
            firsts.append(rows_of(texts, ~is_second))
            # A rank without rows computes filler rows, because all ranks must join the pass.
            others = rows_of(texts, is_second if num_rows else ~is_second)
            with torch.no_grad():
                logprobs = self.completions.logprobs(others)[:num_rows]
            assert batch.references is not None
            sums[0] += (logprobs - to_device(batch.references[:num_rows, 1], logprobs.device)).sum()
            sums[1] += num_rows
        reshard(self.completions.language_model.model)
        dist.all_reduce(sums)
        self._kl = max((sums[0] / sums[1].clamp(min=1)).item(), 0.0)
        return firsts

    def num_counted(self, batch: Batch) -> torch.Tensor:
        """Count the completions."""
        return (batch.ids >= 0).sum()

    def sum_loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss of the completions, and the sums of `names`."""
        num_rows = int((batch.ids >= 0).sum())
        logprobs = self.completions.logprobs(batch)[:num_rows]
        assert batch.references is not None
        assert batch.values is not None
        references = to_device(batch.references[:num_rows, 0], logprobs.device)
        is_good = to_device(batch.values[:num_rows] > 0.5, logprobs.device)
        beta = self.settings.beta or KTO_BETA
        loss = kto_loss(logprobs, references, is_good, self._kl, self.settings, beta)
        rewards = (beta * (logprobs - references)).detach().double()
        kinds = torch.stack([is_good, ~is_good]).double()
        sums = torch.stack([(kinds * rewards).sum(dim=1), kinds.sum(dim=1)], dim=1)
        last = torch.tensor([[self._kl * num_rows, num_rows]], dtype=torch.float64)
        return loss.sum(), torch.cat([sums, to_device(last, sums.device)])


def rows_of(batch: Batch, is_kept: torch.Tensor) -> Batch:
    """Return some rows of a batch; the values of pairs stay as they are."""
    names = ("input_ids", "attention_mask", "labels", "ids", "text_ids")
    images = None if batch.images is None else list(compress(batch.images, is_kept.tolist()))
    return replace(batch, images=images, **{name: getattr(batch, name)[is_kept] for name in names})


def in_pairs(values: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, ...]:
    """Return the values of first texts and of second texts, [P] each; filler rows come last and are dropped."""
    return values[: int((batch.ids >= 0).sum())].unflatten(0, (-1, 2)).unbind(1)


def measured(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Return the sums of `Pairs.names` over pairs with these rewards, and their divisors, float64 [4, 2]."""
    chosen, rejected = chosen.detach().double(), rejected.detach().double()
    sums = [(chosen > rejected).sum(), (chosen - rejected).sum(), chosen.sum(), rejected.sum()]
    found = torch.stack([total.double() for total in sums])
    return torch.stack([found, torch.full_like(found, len(chosen))], dim=1)
