"""The fine-tuning loop, which all ranks run."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from vectorlm.data.loader import StepLoader
from vectorlm.sampling.weights.model_tensors import reshard
from vectorlm.train.language_model import inner_model
from vectorlm.train.objective import Objective
from vectorlm.train.optimizer_step import OptimizerStep
from vectorlm.train.recorder import Recorder, memory_bytes, num_multiplied
from vectorlm.train.routes import BalanceMeter, routers_of
from vectorlm.train.settings import LoopSettings
from vectorlm.types import Batch, TrainedModel


@dataclass(kw_only=True)
class FineTuningLoop:
    """Minimise the mean of an objective over all tokens (or pairs) of each global batch.

    The loss of an optimizer step is summed over all ranks and micro-batches, and divided by the global count. Therefore
    the split of a global batch changes only the rounding (in bfloat16 see `shard_model`).
    """

    optimizer_step: OptimizerStep
    objective: Objective
    train_loader: StepLoader
    eval_loaders: Mapping[str, StepLoader]
    """Held-out datasets by name; a single dataset has the name ""."""
    settings: LoopSettings
    recorder: Recorder
    step: int = 0
    """Number of optimizer steps made."""

    def __post_init__(self) -> None:
        assert self.optimizer_step.schedule is not None
        self._schedule = self.optimizer_step.schedule
        self._topology = self.optimizer_step.topology
        self._device = self._topology.device
        model = self.optimizer_step.model
        self._num_weights = num_multiplied(model)
        self._tokens_seen = 0

    def run(self) -> None:
        """Train to the end of the last epoch, from the start or from the recorder's checkpoint."""
        recorder = self.recorder
        models = {"policy": TrainedModel(self.optimizer_step.model, self.optimizer_step.optimizer)}
        saved = recorder.resume(models)
        if saved is None:
            recorder.write(0, self.evaluate_if_due({}))
        else:
            self._schedule.load_state_dict(saved["schedule"])
            self._tokens_seen = saved.get("tokens_seen", 0)
            self.step = recorder.resume_step or 0
        for micro_batches in self.remaining_steps():
            metrics = self.optimize(micro_batches)
            self.step += 1
            metrics |= self.evaluate_if_due({})
            recorder.end_step(self.step, metrics)
            # A callback or an evaluation of answers may have made this step the last one.
            if recorder.stopping.is_over:
                metrics |= self.evaluate_if_due(metrics)
            recorder.write(self.step, metrics)
            if self.step % len(self.train_loader) == 0:
                recorder.end_epoch(self.step // len(self.train_loader))
            recorder.save_if_due(self.step, models, self._state)

    def _state(self) -> dict[str, Any]:
        """Return the loop's own state for a checkpoint."""
        return {"schedule": self._schedule.state_dict(), "tokens_seen": self._tokens_seen}

    def remaining_steps(self) -> Iterator[list[Batch]]:
        """Yield this rank's micro-batches of each remaining optimizer step."""
        for epoch in range(self.step // len(self.train_loader), self.settings.epochs):
            for step in self.train_loader.steps(epoch, start_step=self.step % len(self.train_loader)):
                if self.recorder.stopping.is_over:
                    return
                yield list(self.objective.prepare(step))

    def optimize(self, micro_batches: Sequence[Batch]) -> dict[str, float]:
        """Make one optimizer step, and return its metrics."""
        start_s = time.perf_counter()
        span = self.recorder.timer.span
        num_counted, num_tokens, most_bytes = self._count(micro_batches)
        meter = BalanceMeter(
            routers_of(inner_model(self.optimizer_step.model)), self._topology.model_parallel
        )
        meter.count(
            [partial(self.objective.sum_loss, batch) for batch in micro_batches], self.optimizer_step.model
        )
        my_loss = torch.zeros((), dtype=torch.float64, device=self._device)
        measured = torch.zeros(len(self.objective.names), 2, dtype=torch.float64, device=self._device)
        for index, batch in enumerate(micro_batches):
            with span("time/forward_s"):
                sum_loss, sums = self.objective.sum_loss(batch)
                loss = sum_loss / max(num_counted, 1)
            with span("time/backward_s"):
                self.optimizer_step.backward(loss + meter.share(), is_last=index == len(micro_batches) - 1)
            my_loss += loss.detach()
            measured += sums.to(measured)
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
        if (balance := meter.value()) is not None:
            metrics["train/router_aux_loss"] = balance
        if num_counted:
            metrics["train/loss"] = loss_value
        else:
            text = f"no {self.objective.counts} counts in the loss; the weights stay unchanged"
            self.recorder.say(f"step {self.step + 1}: {text}")
        if len(measured):
            dist.all_reduce(measured)
            metrics |= self._means("train", measured)
        if self.settings.device_peak_tflops is not None:
            peak = self.settings.device_peak_tflops * 1e12 * self._topology.world_size
            metrics["perf/mfu"] = flops_per_s / peak
        return metrics

    def evaluate_if_due(self, row: Mapping[str, float]) -> dict[str, float]:
        """Run the evaluations, of held-out losses and of the engine's answers, that are due and not yet in `row`."""
        metrics: dict[str, float] = {}
        is_due = self.eval_loaders and self.recorder.is_due(self.settings.logging_steps, self.step)
        if is_due and "eval/loss" not in row:
            with self.recorder.timer.span("time/held_out_s"):
                metrics |= self.held_out_losses()
            self._schedule.observe(metrics["eval/loss"])
            metrics |= self.recorder.stopping.observe(self.step, metrics)
        answers = {} if "sampler/generate_s" in row else self.recorder.evaluate_if_due(self.step)
        if (metrics or not self.eval_loaders) and (answers or self.recorder.evaluation is None):
            self.recorder.require_logged(self.step, metrics | answers)
        metrics |= answers | self.recorder.stopping.observe(self.step, answers)
        if metrics:
            self.recorder.callbacks.call("on_evaluation", self.step, metrics)
        return metrics

    @torch.no_grad()
    def held_out_losses(self) -> dict[str, float]:
        """Return the means of the loss and the objective's `names`, over all held-out rows and by named dataset."""
        model = self.optimizer_step.model
        model.eval()
        shape = (len(self.eval_loaders), 1 + len(self.objective.names), 2)
        totals = torch.zeros(shape, dtype=torch.float64, device=self._device)
        for sums, loader in zip(totals, self.eval_loaders.values(), strict=True):
            for batch in self.objective.prepare(chain.from_iterable(loader.steps(0))):
                loss, measured = self.objective.sum_loss(batch)
                sums[0, 0] += loss
                sums[0, 1] += self.objective.num_counted(batch)
                sums[1:] += measured.to(sums)
        model.train()
        reshard(model)
        dist.all_reduce(totals)
        found: dict[str, float] = {}
        for name, sums in zip(self.eval_loaders, totals, strict=True):
            found |= self._means(f"eval/{name}", sums) if name else {}
        return found | self._means("eval", totals.sum(dim=0))

    def _means(self, prefix: str, sums: torch.Tensor) -> dict[str, float]:
        """Return the means of `sums`, [K, 2] with or without the loss first, by name; leave out means of nothing."""
        names = ["loss", *self.objective.names][-len(sums) :]
        return {
            f"{prefix}/{name}": total / max(num, 1)
            for name, (total, num) in zip(names, sums.tolist(), strict=True)
            if num or name == "loss"
        }

    def _count(self, micro_batches: Sequence[Batch]) -> tuple[int, int, int]:
        """Return the global counts of a step (units of the loss, and tokens), and the bytes of the fullest rank."""
        topology = self._topology
        totals = torch.zeros(2 + topology.world_size, dtype=torch.int64, device=self._device)
        for batch in micro_batches:
            totals[0] += self.objective.num_counted(batch)
            totals[1] += batch.attention_mask[batch.ids >= 0].sum()  # Without filler rows.
        totals[2 + topology.rank] = memory_bytes(self._device)
        dist.all_reduce(totals)
        num_counted, num_tokens, *rank_bytes = totals.tolist()
        # Ranks that share rows have counted the same rows.
        shares = topology.ranks_per_share
        return num_counted // shares, num_tokens // shares, max(rank_bytes)

    def _add_up_finite(self, my_loss: torch.Tensor, micro_batches: Sequence[Batch]) -> float:
        """Return the sum of all ranks' losses; raise on every rank if one loss is not finite."""
        topology = self._topology
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
        # Ranks that share rows have the same loss.
        return losses[:: topology.ranks_per_share].sum().item()
