"""Supervised fine-tuning: the loop that every rank runs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from vectorlm.errors import DatasetError
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.optimizer_step import OptimizerStep
from vectorlm.train.packing import Rows
from vectorlm.train.recorder import Recorder, memory_bytes, num_multiplied
from vectorlm.train.settings import LoopSettings
from vectorlm.types import Batch, TrainedModel
from vectorlm.weights.plan import reshard


class BatchLoader(Protocol):
    """Splits an epoch into optimizer steps, and each step into the micro-batches of this rank."""

    def __len__(self) -> int: ...  # Optimizer steps per epoch.

    def steps(self, epoch: int, start_step: int = 0) -> Iterator[list[Batch]]:
        """Yield this rank's micro-batches of every optimizer step of `epoch`, from `start_step` on."""
        ...


@dataclass(kw_only=True)
class FineTuningLoop:
    """Minimise the mean next-token loss over the target tokens of each global batch.

    The loss of an optimizer step is the sum over all its tokens, on every rank and in every micro-batch,
    divided by the number of those tokens; so no result depends on how a global batch is split.
    """

    optimizer_step: OptimizerStep
    train_loader: BatchLoader
    eval_loaders: Mapping[str, BatchLoader]
    """The held-out datasets by name; the name of a single one is empty."""
    settings: LoopSettings
    recorder: Recorder
    ignore_index: int = -100
    """Label of tokens outside the loss."""
    packs: bool = True
    """Whether rows are laid end to end; models whose attention does not allow it are padded."""
    step: int = 0
    """Optimizer steps done."""

    def __post_init__(self) -> None:
        model = self.optimizer_step.model
        self.language_model = LanguageModel(model, packs=self.packs, device=self._device)
        self._num_weights = num_multiplied(model, bool(model.config.tie_word_embeddings))
        self._tokens_seen = 0

    def run(self) -> None:
        """Train to the end of the last epoch, from the start or from the recorder's checkpoint."""
        schedule, recorder = self.optimizer_step.schedule, self.recorder
        models = {"policy": TrainedModel(self.optimizer_step.model, self.optimizer_step.optimizer)}
        assert schedule is not None
        saved = recorder.resume(models)
        if saved is None:
            recorder.write(0, self.evaluate_if_due())
        else:
            schedule.load_state_dict(saved["schedule"])
            self._tokens_seen = saved.get("tokens_seen", 0)
            self.step = recorder.resume_step or 0
        for micro_batches in self.remaining_steps():
            metrics = self.optimize(micro_batches)
            self.step += 1
            recorder.write(self.step, metrics | self.evaluate_if_due())
            if self.step % len(self.train_loader) == 0:
                recorder.end_epoch(self.step // len(self.train_loader))
            recorder.save_if_due(self.step, models, self._state)

    def _state(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides model and optimizer."""
        assert self.optimizer_step.schedule is not None
        return {"schedule": self.optimizer_step.schedule.state_dict(), "tokens_seen": self._tokens_seen}

    def remaining_steps(self) -> Iterator[list[Batch]]:
        """Yield this rank's micro-batches of each remaining optimizer step."""
        for epoch in range(self.step // len(self.train_loader), self.settings.epochs):
            for step in self.train_loader.steps(epoch, start_step=self.step % len(self.train_loader)):
                if self.recorder.stopping.is_over:
                    return
                yield [self._apart(batch) for batch in step]

    def optimize(self, micro_batches: Sequence[Batch]) -> dict[str, float]:
        """Make one optimizer step, and return its metrics."""
        start_s = time.perf_counter()
        span = self.recorder.timer.span
        num_targets, num_tokens, most_bytes = self._count(micro_batches)
        my_loss = torch.zeros((), dtype=torch.float64, device=self._device)
        for index, batch in enumerate(micro_batches):
            with span("time/forward_s"):
                loss = self.sum_loss(batch) / max(num_targets, 1)
            with span("time/backward_s"):
                self.optimizer_step.backward(loss, is_last=index == len(micro_batches) - 1)
            my_loss += loss.detach()
        with span("time/optimizer_s"):
            loss_value = self._add_up_finite(my_loss, micro_batches)
            finished = self.optimizer_step.finish(self.step + 1)
        step_s = time.perf_counter() - start_s
        self._tokens_seen += num_tokens
        flops_per_s = 6 * self._num_weights * num_tokens / step_s
        metrics = {
            "train/learning_rate": finished["learning_rate"],
            "train/grad_norm": finished["grad_norm"],
            "train/tokens_per_s": num_tokens / step_s,
            "train/step_s": step_s,
            "perf/tokens_seen": float(self._tokens_seen),
            "perf/memory_max_bytes": float(most_bytes),
            "perf/model_flops_per_s": flops_per_s,
        }
        if num_targets:
            metrics["train/loss"] = loss_value
        else:
            self.recorder.say(
                f"step {self.step + 1}: no token counts in the loss; the weights stay as they are"
            )
        if self.settings.device_peak_tflops is not None:
            peak = self.settings.device_peak_tflops * 1e12 * self.optimizer_step.topology.world_size
            metrics["perf/mfu"] = flops_per_s / peak
        return metrics

    def evaluate_if_due(self) -> dict[str, float]:
        """Evaluate the held-out text and the engine's answers where either is due, and return the metrics."""
        metrics: dict[str, float] = {}
        if self.recorder.is_due(self.settings.logging_steps, self.step):
            with self.recorder.timer.span("time/held_out_s"):
                metrics |= self.held_out_losses()
            assert self.optimizer_step.schedule is not None
            self.optimizer_step.schedule.observe(metrics["eval/loss"])
            metrics |= self.recorder.stopping.observe(self.step, metrics)
        of_answers = self.recorder.evaluate_if_due(self.step)
        return metrics | of_answers | self.recorder.stopping.observe(self.step, of_answers)

    @torch.no_grad()
    def held_out_losses(self) -> dict[str, float]:
        """Return the mean loss over all target tokens of the held-out text, and over those of each named dataset."""
        model = self.optimizer_step.model
        model.eval()
        totals = torch.zeros(len(self.eval_loaders), 2, dtype=torch.float64, device=self._device)
        for sums, loader in zip(totals, self.eval_loaders.values(), strict=True):
            for micro_batches in loader.steps(0):
                for batch in map(self._apart, micro_batches):
                    sums[0] += self.sum_loss(batch)
                    sums[1] += self._is_target(batch).sum()
        model.train()
        reshard(model)
        dist.all_reduce(totals)
        found = {
            f"eval/{name}/loss": sums for name, sums in zip(self.eval_loaders, totals, strict=True) if name
        }
        found["eval/loss"] = totals.sum(dim=0)
        return {name: (total / num.clamp(min=1)).item() for name, (total, num) in found.items()}

    def sum_loss(self, batch: Batch) -> torch.Tensor:
        """Return the sum of the next-token losses of one micro-batch.

        Raises:
            DatasetError: A token, or a label that counts, is not in the model's vocabulary.
        """
        self._require_known_tokens(batch)
        rows = Rows(
            batch.input_ids, batch.attention_mask, self._is_target(batch), batch.ids.tolist(), batch.labels
        )
        return -self.language_model.logprobs(rows).sum()

    def _require_known_tokens(self, batch: Batch) -> None:
        """Look on the CPU, where the batch still is: on CUDA an unknown token ends the process without its name."""
        num_tokens = self.optimizer_step.model.config.get_text_config().vocab_size
        labels = batch.labels.where(self._is_target(batch), 0)
        for name, values in (("token", batch.input_ids), ("label", labels)):
            is_unknown = (values < 0) | (values >= num_tokens)
            if is_unknown.any():
                row, column = is_unknown.nonzero()[0].tolist()
                raise DatasetError(
                    f"row {batch.ids[row]} of the dataset holds the {name} {values[row, column]}, and the model has "
                    f"{num_tokens} tokens; labels that do not count are dataset.ignore_index={self.ignore_index}. "
                    "Preprocess the dataset with the model's own tokenizer, or set dataset.ignore_index."
                )

    def _apart(self, batch: Batch) -> Batch:
        """Make each text a row of its own where that takes no padding, so that no text sees the one before it."""
        if not (self.language_model.packs and batch.text_ids.any()):
            return batch
        lengths = [
            ids[mask.bool()].bincount().tolist()
            for ids, mask in zip(batch.text_ids, batch.attention_mask, strict=True)
        ]

        def cut(x: torch.Tensor, fill: int) -> torch.Tensor:
            texts = [
                text for row, each in zip(x, lengths, strict=True) for text in row[: sum(each)].split(each)
            ]
            return pad_sequence(texts, batch_first=True, padding_value=fill)

        return Batch(
            cut(batch.input_ids, 0),
            cut(batch.attention_mask, 0),
            cut(batch.labels, self.ignore_index),
            batch.ids.repeat_interleave(torch.tensor([len(each) for each in lengths])),
            cut(torch.zeros_like(batch.text_ids), 0),
        )

    @property
    def _device(self) -> str:
        return self.optimizer_step.topology.device

    def _is_target(self, batch: Batch) -> torch.Tensor:
        """Return bool [B, T], the tokens whose loss counts; the first of a row is not predicted."""
        is_target = batch.labels != self.ignore_index
        is_target[:, 0] = False
        return is_target

    def _count(self, micro_batches: Sequence[Batch]) -> tuple[int, int, int]:
        """Count the target tokens and the tokens of a step, and the bytes of the fullest rank."""
        topology = self.optimizer_step.topology
        totals = torch.zeros(2 + topology.world_size, dtype=torch.int64, device=self._device)
        for batch in micro_batches:
            totals[0] += self._is_target(batch).sum()
            totals[1] += batch.attention_mask[batch.ids >= 0].sum()  # Without rows that fill up a short step.
        totals[2 + topology.rank] = memory_bytes(self._device)
        dist.all_reduce(totals)
        num_targets, num_tokens, *each_bytes = totals.tolist()
        return num_targets, num_tokens, max(each_bytes)

    def _add_up_finite(self, my_loss: torch.Tensor, micro_batches: Sequence[Batch]) -> float:
        """Return the sum of all ranks' losses; stop every rank if one of them is not finite."""
        topology = self.optimizer_step.topology
        losses = torch.zeros(topology.world_size, dtype=torch.float64, device=self._device)
        losses[topology.rank] = my_loss
        dist.all_reduce(losses)
        values = losses.tolist()
        bad = next((rank for rank, value in enumerate(values) if not math.isfinite(value)), None)
        if bad is not None:
            ids: list[Any] = [None] * topology.world_size
            dist.all_gather_object(ids, [i for batch in micro_batches for i in batch.ids.tolist() if i >= 0])
            where = f"on rank {bad}, examples {ids[bad]}"
            self.optimizer_step.require_finite(values[bad], self.step + 1, where, "these examples")
        return losses.sum().item()
