"""The distance between engine and trainer: a run logs it, and warns if it is large."""

import json
import math
from datetime import date, datetime, timedelta
from decimal import Decimal

import pyarrow as pa
import pytest
import torch
from kit.batches import batch_of, rollout_of
from pyarrow import parquet

from vectorlm.data.prompts import read_prompts
from vectorlm.rl.metrics import count_log_ratios, mismatch_metrics
from vectorlm.rl.rollout import RolloutGroup, TrainBatch
from vectorlm.rl.rollouts.logger import RolloutLogger
from vectorlm.types import PromptRecord

BAND = (0.5, 2.0)


def drifted(log_ratios, mask):
    """Return rows with these log-ratios of trainer and engine, and the trainer's log-probabilities."""
    old = torch.tensor(log_ratios) - 1.0
    return batch_of(mask, sampler_logprobs=torch.full_like(old, -1.0)), old


def test_log_ratios_are_counted_by_size_and_by_place():
    # The prompts have one and two tokens; places count from the first token of each completion.
    rows, old = drifted([[9.0, 0.01, -5.0, 5.0], [9.0, 9.0, 0.01, 1.0]], [[0, 1, 1, 1], [0, 0, 1, 1]])
    found = count_log_ratios(rows, old, BAND)
    assert found["tokens_per_place"] == 1
    assert found["tokens"] == [2, 2, 1]
    assert found["out_of_band"] == [0, 2, 1]
    counts = dict(enumerate(found["histogram"]))
    assert {index: count for index, count in counts.items() if count} == {0: 1, 40: 2, 60: 1, 79: 1}
    gap = mismatch_metrics(rows, old, BAND)
    assert gap["sampler/logprob_gap_mean"] == pytest.approx((0.01 + 5 + 5 + 0.01 + 1) / 5)
    assert gap["sampler/logprob_gap_max"] == pytest.approx(5.0)
    # In long completions several tokens share a place, and NaN ratios are not counted.
    found = count_log_ratios(*drifted([[0.0] * 99 + [math.nan]], [[1] * 100]), BAND)
    assert (found["tokens_per_place"], found["tokens"]) == (4, [4] * 24 + [3])
    assert sum(found["histogram"]) == 99


def test_low_effective_sample_sizes_and_steps_that_are_cut_are_said_once_until_they_have_recovered(tmp_path):
    said = []
    rollout_logger = RolloutLogger(tmp_path, show_every=0, min_ess=0.5, say=said.append)
    rows, old = drifted([[0.0, 0.0]], [[1, 1]])

    def write(step, ess, reasons):
        counts, metrics = count_log_ratios(rows, old, BAND), {"correction/ess": ess}
        batch = TrainBatch(rows, old, old, None, None, metrics=metrics, mismatch=counts)
        rollouts = [rollout_of("ab", finish_reason=reason) for reason in reasons]
        groups = [RolloutGroup(rollouts, torch.ones(len(reasons)), {})] if reasons else []
        said.clear()
        rollout_logger.write(step, groups, batch)
        return len(said)

    found = [write(step, ess, ()) for step, ess in enumerate((0.9, 0.4, 0.3, 0.8, 0.2), start=1)]
    assert found == [0, 1, 0, 0, 1]
    cut = [["length", "stop"], ["length"] * 2, ["length"] * 2, ["stop"] * 2, ["length"]]
    found = [write(9, 0.2, reasons) for reasons in cut]
    assert found == [0, 1, 0, 0, 1]
    lines = [json.loads(line) for line in (tmp_path / "correction.jsonl").read_text().splitlines()][:5]
    assert [line["train_step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[0]["tokens"] == [1, 1]


def test_a_rollout_keeps_the_columns_of_its_question_and_of_long_ones_the_beginning(tmp_path):
    columns = {"target": 24, "numbers": [4, 6], "proof": "x" * 5000, **{f"more{n}": n for n in range(50)}}
    rollout = rollout_of(PromptRecord("ab", columns))
    group = RolloutGroup([rollout], torch.tensor([0.5]), {"mine": torch.tensor([0.5])})
    RolloutLogger(tmp_path, show_every=0, say=lambda text: None).write(1, [group], None)
    (line,) = map(json.loads, (tmp_path / "rollouts.jsonl").read_text().splitlines())
    kept = line["columns"]
    assert (kept["target"], kept["numbers"]) == (24, [4, 6])
    assert kept["proof"] == '"' + "x" * 199 + "…"
    assert len(kept) == 20


@pytest.mark.parametrize(
    ("rewards", "reason", "causes"),
    [
        ([0.5, 0.5], "stop", "2 in groups of equal rewards"),
        ([math.nan, math.nan], "stop", "2 without a reward"),
        ([0.0, 1.0], "length", "2 truncated"),
        ([0.0, 1.0], "stop", "all rejected"),
    ],
)
def test_a_step_that_teaches_nothing_is_said_with_its_causes(tmp_path, rewards, reason, causes):
    rollouts = [rollout_of("ab", finish_reason=reason) for _ in rewards]
    group, said = RolloutGroup(rollouts, torch.tensor(rewards), {"mine": torch.tensor(rewards)}), []
    RolloutLogger(tmp_path, show_every=0, say=said.append).write(3, [group], None)
    assert len(said) == 1
    assert causes in said[0]


ANY = {
    "when": (datetime(2026, 1, 2, 3, 4), "2026-01-02 03:04:00"),
    "day": (date(2026, 1, 2), "2026-01-02"),
    "price": (Decimal("1.50"), "1.50"),
    "took": (timedelta(seconds=90), "0:01:30"),
    "raw": (b"ab\xff", "b'ab\\xff'"),
    "share": (math.nan, None),
    "most": (-math.inf, None),
    "deep": ([{"at": date(2026, 1, 2), "of": [math.nan, 1.5]}], [{"at": "2026-01-02", "of": [None, 1.5]}]),
}


@pytest.mark.parametrize("saves_tokens", [False, True])
def test_columns_of_any_type_are_written_as_json(tmp_path, saves_tokens):
    row = {"prompt": "ab", **{name: value for name, (value, _) in ANY.items()}}
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    (record,) = read_prompts(tmp_path / "rows.parquet")
    group = RolloutGroup([rollout_of(record)], torch.tensor([math.nan]), {"mine": torch.tensor([math.nan])})
    logger = RolloutLogger(tmp_path, show_every=0, saves_tokens=saves_tokens, say=lambda text: None)
    logger.write(1, [group], None)
    line = json.loads((tmp_path / "rollouts.jsonl").read_text(), parse_constant=pytest.fail)
    assert line["columns"] == {name: text for name, (_, text) in ANY.items()}
    assert (line["reward"], line["rewards"]) == (None, {"mine": None})
