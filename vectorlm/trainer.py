"""Supervised fine-tuning: the loop that every rank runs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from vectorlm.checkpoint.state import Part
from vectorlm.errors import NonFiniteLoss
from vectorlm.model.gradient import clip_gradient
from vectorlm.model.loss import next_tokens, token_losses
from vectorlm.weights.plan import reshard

if TYPE_CHECKING:
    from vectorlm.checkpoint.state import CheckpointStore
    from vectorlm.data.loader import Batch, StepLoader
    from vectorlm.exam import Exam
    from vectorlm.model.schedule import Schedule
    from vectorlm.ranks.topology import Topology
    from vectorlm.telemetry.metrics import MetricSink


class Trainer:
    """Minimise the mean next-token loss over the target tokens of each global batch.

    The loss of an optimizer step is the sum over all its tokens, on every rank and in every micro-batch,
    divided by the number of those tokens; so no result depends on how a global batch is split.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        train_loader: StepLoader,
        eval_loader: StepLoader,
        *,
        topology: Topology,
        sink: MetricSink,
        num_epochs: int,
        eval_every: int,
        max_grad_norm: float = math.inf,
        ignore_index: int = -100,
        exam: Exam | None = None,
        exam_every: int = 1,
        store: CheckpointStore | None = None,
        save_every: int = 1,
    ) -> None:
        """Take everything that the loop needs; training starts with `run`.

        Args:
            model: The sharded model.
            optimizer: Over its trainable parameters.
            schedule: Sets the optimizer's learning rate.
            train_loader: Micro-batches of this rank for each optimizer step.
            eval_loader: The same for one pass over the held-out text.
            topology: This rank's place.
            sink: Takes the metrics of every step.
            num_epochs: Passes over the training data.
            eval_every: Optimizer steps between evaluations; the end of training is always evaluated.
            max_grad_norm: Norm above which the gradient of a step is scaled down.
            ignore_index: Label of tokens outside the loss.
            exam: Asks the engine the held-out questions, before training and at its end too.
            exam_every: Optimizer steps between exams.
            store: Keeps checkpoints.
            save_every: Optimizer steps between checkpoints.
        """
        self.model, self.optimizer, self.schedule = model, optimizer, schedule
        self.train_loader, self.eval_loader = train_loader, eval_loader
        self.topology, self.sink = topology, sink
        self.num_epochs, self.num_steps = num_epochs, num_epochs * len(train_loader)
        self.eval_every, self.exam_every, self.save_every = eval_every, exam_every, save_every
        self.max_grad_norm, self.ignore_index = max_grad_norm, ignore_index
        self.exam, self.store = exam, store
        self.step = 0

    def run(self, resume_step: int | None = None) -> None:
        """Train to the end of the last epoch, from the start or from the checkpoint of `resume_step`.

        Raises:
            NonFiniteLoss: A loss or a gradient norm is NaN or infinite; that step changed no weights.
        """
        if resume_step is None:
            self.sink.write(0, self.look())
        else:
            self.resume(resume_step)
        for micro_batches in self.remaining_steps():
            metrics = self.optimize(micro_batches)
            self.step += 1
            self.sink.write(self.step, metrics | self.look())
            if self.store and self.step % self.save_every == 0:
                loop = {"schedule": self.schedule.state_dict()}
                self.store.save(self.step, self.parts(), loop)

    def resume(self, step: int) -> None:
        """Put everything back to where the checkpoint of `step` found it."""
        assert self.store is not None
        loop = self.store.load(step, self.parts())
        self.schedule.load_state_dict(loop["schedule"])
        self.step = step

    def parts(self) -> dict[str, Part]:
        """Return what a checkpoint holds of model and optimizer."""
        return {"policy": Part(self.model, self.optimizer)}

    def remaining_steps(self) -> Iterator[list[Batch]]:
        """Yield this rank's micro-batches of each optimizer step that is left."""
        for epoch in range(self.step // len(self.train_loader), self.num_epochs):
            yield from self.train_loader.steps(epoch, start_step=self.step % len(self.train_loader))

    def optimize(self, micro_batches: Sequence[Batch]) -> dict[str, float]:
        """Make one optimizer step: accumulate the gradient, clip it once, update the weights."""
        start_s, learning_rate = time.perf_counter(), self.schedule.learning_rate
        num_targets, num_tokens = self.count(micro_batches)
        my_loss = torch.zeros((), dtype=torch.float64, device=self.topology.device)
        for index, batch in enumerate(micro_batches):
            self.model.set_requires_all_reduce(index == len(micro_batches) - 1)
            loss = self.sum_loss(batch) / num_targets
            # FSDP averages gradients over ranks; the loss is already a share of the global mean.
            (loss * self.topology.world_size).backward()
            my_loss += loss.detach()
        loss_value = self.add_up_finite(my_loss, micro_batches)
        grad_norm = self.clip_gradient()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        step_s = time.perf_counter() - start_s
        return {
            "train/loss": loss_value,
            "train/learning_rate": learning_rate,
            "train/grad_norm": grad_norm,
            "train/tokens_per_s": num_tokens / step_s,
            "train/step_s": step_s,
        }

    def look(self) -> dict[str, float]:
        """Evaluate and examine the model where that is due at this step."""
        metrics: dict[str, float] = {}
        if self.is_due(self.eval_every):
            metrics["eval/loss"] = self.evaluate()
            self.schedule.observe(metrics["eval/loss"])
        if self.exam and self.is_due(self.exam_every):
            metrics |= self.exam.hold(self.model, self.step)
        return metrics

    def is_due(self, every: int) -> bool:
        """Whether something done `every` so many steps, at the start and at the end, is due now."""
        return self.step % every == 0 or self.step == self.num_steps

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean loss over all target tokens of the held-out text."""
        self.model.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=self.topology.device)
        for micro_batches in self.eval_loader.steps(0):
            for batch in micro_batches:
                totals[0] += self.sum_loss(batch)
                totals[1] += self.targets(batch).ne(self.ignore_index).sum()
        self.model.train()
        reshard(self.model)
        dist.all_reduce(totals)
        return (totals[0] / totals[1].clamp(min=1)).item()

    def sum_loss(self, batch: Batch) -> torch.Tensor:
        """Return the sum of the next-token losses of one micro-batch."""
        logits = self.model(
            input_ids=batch.input_ids.to(self.topology.device),
            attention_mask=batch.attention_mask.to(self.topology.device),
            use_cache=False,
        ).logits
        return token_losses(logits, self.targets(batch), self.ignore_index).sum()

    def targets(self, batch: Batch) -> torch.Tensor:
        """Return what each position of `batch` has to predict."""
        return next_tokens(batch.labels.to(self.topology.device), self.ignore_index)

    def count(self, micro_batches: Sequence[Batch]) -> tuple[int, int]:
        """Count the target tokens and the tokens of a step, on all ranks; at least one of each."""
        totals = torch.zeros(2, dtype=torch.int64, device=self.topology.device)
        for batch in micro_batches:
            totals[0] += self.targets(batch).ne(self.ignore_index).sum()
            totals[1] += batch.attention_mask.sum()
        dist.all_reduce(totals)
        num_targets, num_tokens = totals.clamp(min=1).tolist()
        return num_targets, num_tokens

    def add_up_finite(self, my_loss: torch.Tensor, micro_batches: Sequence[Batch]) -> float:
        """Return the sum of all ranks' shares of the loss; stop every rank if one of them is not finite."""
        shares = torch.zeros(self.topology.world_size, dtype=torch.float64, device=self.topology.device)
        shares[self.topology.rank] = my_loss
        dist.all_reduce(shares)
        bad = [rank for rank, share in enumerate(shares.tolist()) if not math.isfinite(share)]
        if bad:
            ids: list[Any] = [None] * self.topology.world_size
            dist.all_gather_object(ids, [i for batch in micro_batches for i in batch.ids.tolist() if i >= 0])
            raise NonFiniteLoss(
                f"the loss is {shares[bad[0]].item()} at step {self.step + 1} on rank {bad[0]} "
                f"(examples {ids[bad[0]]}): training stops before the weights change. "
                "Look at these examples, or lower the learning rate."
            )
        return shares.sum().item()

    def clip_gradient(self) -> float:
        """Scale the gradient of the whole step down to `max_grad_norm`, and return its norm before that."""
        value = clip_gradient(self.model, self.max_grad_norm)
        if not math.isfinite(value):
            raise NonFiniteLoss(
                f"the gradient norm is {value} at step {self.step + 1} (over all ranks, seen on rank "
                f"{self.topology.rank}) although every loss is finite: training stops before the weights "
                "change. Lower the learning rate, or train without use_mp."
            )
        return value
