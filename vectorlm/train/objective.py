"""The objective of a run on a dataset: what of a batch counts, and its loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from vectorlm.algorithms.offline import KTO_BETA, PairLogprobs, PreferenceSpec, kto_loss
from vectorlm.algorithms.preference import bradley_terry_loss
from vectorlm.algorithms.settings import PreferenceSettings
from vectorlm.errors import DatasetError
from vectorlm.sampling.weights.model_tensors import reshard
from vectorlm.train.language_model import LanguageModel, inner_model, prepare_packing
from vectorlm.train.packing import ContextGroup, Packing, Rows, pack
from vectorlm.types import Batch


class BatchLoader(Protocol):
    """Splits an epoch into optimizer steps, and each step into the micro-batches of this rank."""

    def __len__(self) -> int: ...  # Optimizer steps per epoch.

    def steps(self, epoch: int, start_step: int = 0) -> Iterator[list[Batch]]:
        """Yield this rank's micro-batches of every optimizer step of `epoch`, from `start_step` on."""
        ...


class Objective(Protocol):
    """A loss that is a sum over what counts in a batch, tokens or pairs; all ranks call each method alike."""

    @property
    def counts(self) -> str:
        """What counts, in the words of a message."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """What is measured beside the loss."""
        ...

    def prepare(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Take this rank's micro-batches of the next step, or of a held-out dataset, as `sum_loss` reads them."""
        ...

    def num_counted(self, batch: Batch) -> torch.Tensor:
        """Return how many tokens or pairs of a micro-batch count."""
        ...

    def sum_loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses, and of each of `names` a sum and what it is divided by, float64 [K, 2]."""
        ...


@dataclass(frozen=True)
class NextTokens:
    """The next-token loss of the target tokens."""

    language_model: LanguageModel
    ignore_index: int = -100
    """Label of tokens outside the loss."""
    counts = "token"
    names = ()

    def prepare(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Make each text a row of its own where that takes no padding, so that no text sees the one before it."""
        for batch in batches:
            is_cut = self.language_model.packs and batch.text_ids.any()
            yield apart(batch, self.ignore_index) if is_cut else batch

    def num_counted(self, batch: Batch) -> torch.Tensor:
        """Count the target tokens."""
        return is_target(batch, self.ignore_index).sum()

    def sum_loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the next-token losses of one micro-batch.

        Raises:
            DatasetError: A token, or a label that counts, is not in the model's vocabulary.
        """
        rows = known_rows(batch, self.language_model.model, self.ignore_index)
        return -self.language_model.logprobs(rows).sum(), torch.zeros(0, 2)


def is_target(batch: Batch, ignore_index: int) -> torch.Tensor:
    """Return bool [B, T], the tokens whose loss counts; the first of a row is not predicted."""
    found = batch.labels != ignore_index
    found[:, 0] = False
    return found


def known_rows(batch: Batch, model: torch.nn.Module, ignore_index: int) -> Rows:
    """Return a batch as the rows of a forward pass that asks for the target tokens.

    It looks on the CPU, where the batch still is: on CUDA an unknown token ends the process without its name.

    Raises:
        DatasetError: A token, or a label that counts, is not in the model's vocabulary.
    """
    num_tokens = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    targets = is_target(batch, ignore_index)
    labels = batch.labels.where(targets, 0)
    for name, values in (("token", batch.input_ids), ("label", labels)):
        is_unknown = (values < 0) | (values >= num_tokens)
        if is_unknown.any():
            row, column = is_unknown.nonzero()[0].tolist()
            raise DatasetError(
                f"row {batch.ids[row]} of the dataset holds the {name} {values[row, column]}, and the model has "
                f"{num_tokens} tokens; labels that do not count are dataset.ignore_index={ignore_index}. "
                "Preprocess the dataset with the model's own tokenizer, or set dataset.ignore_index."
            )
    return Rows(batch.input_ids, batch.attention_mask, targets, batch.ids.tolist(), batch.labels)


def apart(batch: Batch, ignore_index: int) -> Batch:
    """Make each text a row of its own, in the order of the batch."""
    lengths = [
        ids[mask.bool()].bincount().tolist()
        for ids, mask in zip(batch.text_ids, batch.attention_mask, strict=True)
    ]

    def cut(x: torch.Tensor, fill: int) -> torch.Tensor:
        texts = [text for row, each in zip(x, lengths, strict=True) for text in row[: sum(each)].split(each)]
        return pad_sequence(texts, batch_first=True, padding_value=fill)

    return replace(
        batch,
        input_ids=cut(batch.input_ids, 0),
        attention_mask=cut(batch.attention_mask, 0),
        labels=cut(batch.labels, ignore_index),
        ids=batch.ids.repeat_interleave(torch.tensor([len(each) for each in lengths])),
        text_ids=cut(torch.zeros_like(batch.text_ids), 0),
    )


class Scorer:
    """Computes the score of each row, where transformers reads it: at the last token that is no padding token."""

    def __init__(
        self,
        model: nn.Module,
        *,
        packs: bool = True,
        device: str | torch.device = "cpu",
        context: ContextGroup | None = None,
    ) -> None:
        """Take a sharded model of `load_scorer`; called on all ranks. `packs` and `context` as of `LanguageModel`."""
        self.model, self._device, self._context = model, torch.device(device), context
        inner = inner_model(model)
        self._score, self._padding = inner.score, inner.config.get_text_config().pad_token_id
        self.why_padded = prepare_packing(
            model, self._of_padded, self._of_packed, packs=packs, context=context
        )
        """Why rows are padded; None where they are not."""

    def __call__(self, rows: Rows, is_read: torch.Tensor | None = None) -> torch.Tensor:
        """Return float32 [B], the scores of rows on the CPU; which tokens they ask for is not read.

        With `is_read`, bool [B, T], return float32 [M], the score at each of these tokens, row by row.
        """
        if self.why_padded is None:
            return self._of_packed(rows, is_read)[0]
        if is_read is None or not is_read.any():
            return self._of_padded(rows)[0][: None if is_read is None else 0]
        # transformers reads one score of a row: each token gets a row that ends with it.
        row, place = is_read.nonzero(as_tuple=True)
        is_before = torch.arange(is_read.shape[1]) <= place[:, None]
        ended = replace(
            rows, input_ids=rows.input_ids[row], attention_mask=rows.attention_mask[row] * is_before
        )
        return self._of_padded(ended)[0]

    def _of_padded(self, rows: Rows) -> tuple[torch.Tensor, torch.dtype]:
        inputs = {
            "input_ids": rows.input_ids.where(rows.attention_mask.bool(), self._padding).to(self._device),
            "attention_mask": rows.attention_mask.to(self._device),
        }
        logits = self.model(**inputs, use_cache=False).logits
        return logits[:, 0].float(), logits.dtype

    def _of_packed(self, rows: Rows, is_read: torch.Tensor | None = None) -> tuple[torch.Tensor, Packing]:
        if is_read is None:
            places = torch.arange(rows.input_ids.shape[1])
            is_text = rows.attention_mask.bool() & (rows.input_ids != self._padding)
            is_read = F.one_hot(places.where(is_text, 0).amax(dim=1), len(places)).bool()
        # A pass returns states of the tokens before those that are asked for, and the last has none behind it.
        is_asked = F.pad(is_read, (1, 0))
        input_ids, mask = F.pad(rows.input_ids, (0, 1)), F.pad(rows.attention_mask, (0, 1))
        packing = pack(Rows(input_ids, mask, is_asked, rows.groups), self._context)
        model: Any = self.model
        # Behind the pass: FSDP2 warns of views that it returns.
        scores = model.packed_pass(packing, self._device, self._score)[:, 0].float()
        return packing.gather(scores), packing


NAMES = ("pair_accuracy", "pair_margin", "chosen_reward", "rejected_reward")
"""Of pairs: how often the chosen text has the higher reward, by how much in the mean, and the means of both."""


class Pairs:
    """What objectives of pairs have in common."""

    counts = "pair"
    names = NAMES
    ignore_index: int
    """Label of tokens outside the loss."""

    def prepare(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Make each text a row of its own."""
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
        """Return the sum of the losses of the pairs, and the sums of `names`."""
        scores = self.scorer(known_rows(batch, self.scorer.model, self.ignore_index))
        chosen, rejected = in_pairs(scores, batch)
        assert batch.values is not None
        margins = batch.values[: len(chosen)].to(chosen.device)
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
    """How often the likelier label is the given one; of the probability that a step is right the mean squared error and
    the mean error, and its means over right and over wrong steps."""

    def prepare(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Take the batches as they are."""
        return batches

    def num_counted(self, batch: Batch) -> torch.Tensor:
        """Count the steps."""
        return (batch.labels != self.ignore_index).sum()

    def sum_loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses of the steps, and the sums of `names`."""
        is_end = batch.labels != self.ignore_index
        scores = self.scorer(known_rows(batch, self.scorer.model, self.ignore_index), is_end)
        labels = batch.labels[is_end].to(scores)
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
    """What objectives of a policy have in common: log-probabilities of the completions of both texts of a row."""

    language_model: LanguageModel
    averages: bool
    """Whether these are divided by the number of tokens."""
    ignore_index: int = -100
    """Label of tokens that belong to no completion."""

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """Return float32 [B], of each row of texts that are apart."""
        rows = known_rows(batch, self.language_model.model, self.ignore_index)
        sums = self.language_model.logprobs(rows).sum(dim=1)
        return sums / rows.is_asked.sum(dim=1).clamp(min=1).to(sums) if self.averages else sums

    @torch.no_grad()
    def table(self, loader: BatchLoader, num_rows: int) -> torch.Tensor:
        """Return what the model says of both texts of each row of a dataset, float32 [N, 2] on the CPU of all ranks."""
        model = self.language_model.model
        found = torch.zeros(num_rows, 2, device=self.language_model.device)
        model.eval()
        for step in loader.steps(0):
            for batch in step:
                texts = apart(batch, self.ignore_index)
                both = torch.stack(in_pairs(self.logprobs(texts), texts), dim=1)
                found[batch.ids[batch.ids >= 0].to(found.device)] = both
        model.train()
        reshard(model)
        # Each row was computed by one rank, or by all that share it.
        dist.all_reduce(found)
        return found.cpu() / self.language_model.shared_by


@dataclass(frozen=True)
class PreferencePairs(Pairs):
    """A loss of the log-probabilities of pairs: DPO and the like."""

    completions: Completions
    spec: PreferenceSpec
    settings: PreferenceSettings

    @property
    def ignore_index(self) -> int:  # type: ignore[override]
        """Label of tokens that belong to no completion."""
        return self.completions.ignore_index

    def sum_loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses of the pairs, and the sums of `names`."""
        chosen, rejected = in_pairs(self.completions.logprobs(batch), batch)
        references = [torch.zeros_like(chosen)] * 2
        if batch.references is not None:
            references = list(batch.references[: len(chosen)].to(chosen.device).unbind(1))
        beta = self.settings.beta or self.spec.beta
        loss = self.spec.loss(PairLogprobs(chosen, rejected, *references), self.settings, beta)
        return loss.sum(), measured(beta * (chosen - references[0]), beta * (rejected - references[1]))


@dataclass
class GoodAndBad:
    """KTO's loss of completions that are good or bad; the second text of a row estimates the KL divergence."""

    completions: Completions
    settings: PreferenceSettings
    _kl: float = 0.0
    counts = "completion"
    names = ("chosen_reward", "rejected_reward", "kl")

    def prepare(self, batches: Iterable[Batch]) -> list[Batch]:
        """Estimate the divergence of all batches together, and leave out the texts that it is estimated from."""
        model = self.completions.language_model.model
        sums = torch.zeros(2, dtype=torch.float64, device=self.completions.language_model.device)
        firsts = []
        for batch in batches:
            texts = apart(batch, self.completions.ignore_index)
            num_rows = int((batch.ids >= 0).sum())
            is_second = (torch.arange(len(texts.ids)) % 2 == 1) & (texts.ids >= 0)
            firsts.append(rows_of(texts, ~is_second))
            # A rank without rows takes part with those that fill up its batch.
            others = rows_of(texts, is_second if num_rows else ~is_second)
            with torch.no_grad():
                logprobs = self.completions.logprobs(others)[:num_rows]
            assert batch.references is not None
            sums[0] += (logprobs - batch.references[:num_rows, 1].to(logprobs)).sum()
            sums[1] += num_rows
        reshard(model)
        dist.all_reduce(sums)
        self._kl = max((sums[0] / sums[1].clamp(min=1)).item(), 0.0)
        return firsts

    def num_counted(self, batch: Batch) -> torch.Tensor:
        """Count the completions."""
        return (batch.ids >= 0).sum()

    def sum_loss(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the losses of the completions, and the sums of `names`."""
        num_rows = int((batch.ids >= 0).sum())
        logprobs = self.completions.logprobs(batch)[:num_rows]
        assert batch.references is not None
        assert batch.values is not None
        references = batch.references[:num_rows, 0].to(logprobs)
        is_good = batch.values[:num_rows].to(logprobs.device) > 0.5
        beta = self.settings.beta or KTO_BETA
        loss = kto_loss(logprobs, references, is_good, self._kl, self.settings, beta)
        rewards = (beta * (logprobs - references)).detach().double()
        sums = [[rewards[kind].sum().item(), int(kind.sum())] for kind in (is_good, ~is_good)]
        return loss.sum(), torch.tensor([*sums, [self._kl * num_rows, num_rows]], dtype=torch.float64)


def rows_of(batch: Batch, is_kept: torch.Tensor) -> Batch:
    """Return some rows of a batch; what is known of pairs stays as it is."""
    names = ("input_ids", "attention_mask", "labels", "ids", "text_ids")
    return replace(batch, **{name: getattr(batch, name)[is_kept] for name in names})


def in_pairs(values: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, ...]:
    """Return the values of first texts and of second ones, [P] each; rows that fill up a batch come last."""
    return values[: int((batch.ids >= 0).sum())].unflatten(0, (-1, 2)).unbind(1)


def measured(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Return the sums of `NAMES` over pairs with these rewards, and what they are divided by, float64 [4, 2]."""
    chosen, rejected = chosen.detach().double(), rejected.detach().double()
    sums = [(chosen > rejected).sum(), (chosen - rejected).sum(), chosen.sum(), rejected.sum()]
    found = torch.stack([each.double() for each in sums])
    return torch.stack([found, torch.full_like(found, len(chosen))], dim=1)
