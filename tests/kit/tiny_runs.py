"""A fine-tuning loop over a tiny Llama and 21 short rows, for the tests of the training loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from kit.tensors import full
from vectorlm.data.loader import Collator, StepLoader
from vectorlm.ranks.topology import Topology
from vectorlm.report.metrics import JsonlSink
from vectorlm.train.checkpoint.folder import newest
from vectorlm.train.checkpoint.state import CheckpointStore
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.load import load_model
from vectorlm.train.loop import FineTuningLoop
from vectorlm.train.objective import NextTokens
from vectorlm.train.optimizer_step import OptimizerStep, Schedule
from vectorlm.train.packing import ContextGroup
from vectorlm.train.recorder import Recorder
from vectorlm.train.settings import LoopSettings, ModelSettings
from vectorlm.train.shard import shard_model

LEARNING_RATE, NUM_EPOCHS, GLOBAL_BATCH, SEED = 0.01, 2, 8, 7
NUM_STEPS = 6  # two epochs of 8 + 8 + 5 rows


class ListSink(list):
    """A sink that keeps the values of each step in a list."""

    def write(self, step: int, values: Any) -> None:
        self.append({"step": step, **values})


def rows(num_rows: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Return rows of 4 to 12 tokens that count upwards; the first three labels are outside the loss."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(num_rows):
        start, length = (
            torch.randint(0, 36, (1,), generator=generator),
            torch.randint(4, 13, (1,), generator=generator),
        )
        tokens = list(range(int(start), int(start + length)))
        found.append({"input_ids": tokens, "labels": [-100] * 3 + tokens[3:]})
    return found


def loader(
    topology: Topology, examples: list, *, num_micro_batches: int = 1, shuffle: bool = True
) -> StepLoader:
    """Return a loader that splits the global batch of eight rows over ranks and micro-batches."""
    return StepLoader(
        Dataset.from_list(examples),
        Collator(pad_token_id=0, ignore_index=-100, max_seq_len=16),
        topology,
        micro_batch_size=GLOBAL_BATCH // topology.num_data_shares // num_micro_batches,
        num_micro_batches=num_micro_batches,
        seed=SEED,
        shuffle=shuffle,
    )


def build_loop(
    topology: Topology,
    model_dir: Path,
    *,
    strategy: str = "FULL_SHARD",
    num_micro_batches: int = 1,
    output: Path | None = None,
    logging_steps: int = 4,
    packs: bool = True,
    device_peak_tflops: float | None = None,
    **recorded: Any,
) -> FineTuningLoop:
    """Build the loop that all tests share; it writes checkpoints and metrics to `output`, if given."""
    model = shard_model(load_model(model_dir), topology, ModelSettings(sharding_strategy=strategy))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
    schedule = Schedule("linear", optimizer, num_warmup_steps=2, num_steps=NUM_STEPS)
    sink: Any = ListSink()
    if output is not None:
        store, found = CheckpointStore(output / "checkpoints", {"seed": SEED}), newest(output / "checkpoints")
        recorded |= {"checkpoints": store, "resume_step": found and found.step}
        if topology.is_main:
            sink = JsonlSink(output / "metrics.jsonl", recorded["resume_step"])
    torch.manual_seed(SEED + topology.rank)
    return FineTuningLoop(
        optimizer_step=OptimizerStep(model, optimizer, schedule, 0.5, topology, "model"),
        objective=NextTokens(
            LanguageModel(model, packs=packs, device=topology.device, context=ContextGroup.of(topology))
        ),
        train_loader=loader(topology, rows(21), num_micro_batches=num_micro_batches),
        eval_loaders={"": loader(topology, rows(11, seed=1), shuffle=False)},
        settings=LoopSettings(
            epochs=NUM_EPOCHS, logging_steps=logging_steps, device_peak_tflops=device_peak_tflops
        ),
        recorder=Recorder(num_steps=NUM_STEPS, sink=sink, save_every=2, **recorded),
    )


def whole_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return the full weights, on every rank."""
    return {name: full(parameter).clone() for name, parameter in model.named_parameters()}
