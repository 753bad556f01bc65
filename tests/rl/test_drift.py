"""What a run keeps of the distance of engine and trainer, and when it warns."""

import json
import math

import pytest
import torch

from vectorlm.rl.diary import Diary
from vectorlm.rl.drift import drift_of, gap_of
from vectorlm.rl.gather import Gathered
from vectorlm.rl.update import TrainBatch
from vectorlm.rollout.batch import RolloutBatch


def batch_of(log_ratios, mask):
    """Return rows whose trainer finds these log-ratios, and its log-probabilities."""
    old = torch.tensor(log_ratios) - 1.0
    mask = torch.tensor(mask).bool()
    rows = RolloutBatch(
        input_ids=mask.long(),
        attention_mask=mask.long(),
        mask=mask,
        sampler_logprobs=torch.full_like(old, -1.0),
        rewards=torch.zeros(1, len(mask)),
        valid=torch.ones(1, len(mask), dtype=torch.bool),
        columns=torch.arange(len(mask))[None],
        num_tokens=(mask.shape[1],) * len(mask),
    )
    return rows, old


def test_log_ratios_are_counted_by_size_and_by_place():
    # Prompts of one and of two tokens; the places of completions begin at their own first tokens.
    rows, old = batch_of([[9.0, 0.01, -5.0, 5.0], [9.0, 9.0, 0.01, 1.0]], [[0, 1, 1, 1], [0, 0, 1, 1]])
    found = drift_of(rows, old, (0.5, 2.0))
    assert found["tokens_per_place"] == 1
    assert found["tokens"] == [2, 2, 1]
    assert found["out_of_band"] == [0, 2, 1]
    counts = dict(enumerate(found["histogram"]))
    assert {index: count for index, count in counts.items() if count} == {0: 1, 40: 2, 60: 1, 79: 1}
    gap = gap_of(rows, old)
    assert gap["sampler/logprob_gap_mean"] == pytest.approx((0.01 + 5 + 5 + 0.01 + 1) / 5)
    assert gap["sampler/logprob_gap_max"] == pytest.approx(5.0)


def test_long_completions_share_places():
    rows, old = batch_of([[0.0] * 100], [[1] * 100])
    found = drift_of(rows, old, (0.5, 2.0))
    assert found["tokens_per_place"] == 4
    assert found["tokens"] == [4] * 25


def test_a_token_whose_ratio_is_not_a_number_is_counted_nowhere():
    rows, old = batch_of([[0.0, math.nan]], [[1, 1]])
    found = drift_of(rows, old, (0.5, 2.0))
    assert sum(found["histogram"]) == sum(found["tokens"]) == 1


def test_a_low_effective_sample_size_is_said_once_until_it_has_recovered(tmp_path):
    said = []
    diary = Diary(tmp_path, show_every=0, min_ess=0.5, say=said.append)
    rows, old = batch_of([[0.0, 0.0]], [[1, 1]])
    gathered = Gathered([], rows.rewards, {}, None, 0, 0, None)
    for step, ess in enumerate([0.9, 0.4, 0.3, 0.8, 0.2], start=1):
        drift = drift_of(rows, old, (0.5, 2.0))
        batch = TrainBatch(
            rows, rows.rewards, old, old, None, None, None, metrics={"correction/ess": ess}, drift=drift
        )
        diary.write(step, gathered, batch)
    assert [text.split(":")[1] for text in said] == [" step 2", " step 5"]
    assert "40% of their number" in said[0]
    lines = [json.loads(line) for line in (tmp_path / "correction.jsonl").read_text().splitlines()]
    assert [line["train_step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[0]["tokens"] == [1, 1]
