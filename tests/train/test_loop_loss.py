"""The loss of fine-tuning: a batch's loss is the sum of its examples' losses, packed and padded."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from kit.rank_processes import on_ranks
from kit.tensors import full
from kit.tiny_runs import build_loop, loader

from vectorlm.types import Batch


def random_batch():
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(1, 48, (5, 14), generator=generator)
    attention_mask = (torch.arange(14) < torch.tensor([14, 3, 9, 1, 12])[:, None]).long()
    labels = torch.where(attention_mask.bool(), input_ids, -100)
    labels[0, :6], labels[2, 4] = -100, -100
    # A label may differ from its token.
    labels[4, 7] = 11
    return Batch(input_ids, attention_mask, labels, torch.arange(5), torch.zeros_like(input_ids))


def loss_and_gradient(optimizer_step, loss):
    # Between forward and backward the model has whole weights, and the optimizer has their shards.
    optimizer_step.optimizer.zero_grad()
    loss.backward()
    return loss.detach(), [full(item.grad).clone() for item in optimizer_step.model.parameters()]


def losses(topology, folder, packs):
    """Return loss and gradient of a batch, of its examples one by one, and of the batch without targets."""
    loop, batch = build_loop(topology, folder, packs=packs), random_batch()
    assert loop.objective.language_model.packs is packs
    model = loop.optimizer_step.model
    found = loss_and_gradient(loop.optimizer_step, loop.objective.sum_loss(batch)[0])
    one_by_one = torch.zeros(())
    for ids, mask, labels in zip(batch.input_ids, batch.attention_mask, batch.labels, strict=True):
        length = int(mask.sum())
        logits = model(input_ids=ids[None, :length], use_cache=False).logits[0, :-1]
        one_by_one = one_by_one + F.cross_entropy(
            logits, labels[1:length], ignore_index=-100, reduction="sum"
        )
    expected = loss_and_gradient(loop.optimizer_step, one_by_one)
    batch.labels.fill_(-100)
    return found, expected, loss_and_gradient(loop.optimizer_step, loop.objective.sum_loss(batch)[0])


@pytest.mark.parametrize("packs", [True, False])
def test_the_loss_of_a_batch_is_the_sum_of_its_examples_by_themselves(folder, packs):
    ((found, expected, nothing),) = on_ranks(1, losses, folder, packs)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5)
    # All ranks make the same backward passes, also for a batch without targets.
    assert nothing[0] == 0
    assert all(gradient.eq(0).all() for gradient in nothing[1])


TEXTS = [[5, 6, 7, 8, 9], [10, 11, 12], [13], [14, 15, 16, 17], [18, 19, 20, 21, 22, 23, 24], [5, 6, 30, 31]]


def packed_losses(topology, folder, packs):
    """Return loss and gradient of packed rows, of separate texts, and of rows whose texts see each other."""
    rows = [list(chain(*some)) for some in (TEXTS[:3], TEXTS[3:5], TEXTS[5:])]
    lengths = [[len(text) for text in some] for some in (TEXTS[:3], TEXTS[3:5], TEXTS[5:])]
    examples = [
        {"input_ids": row, "labels": row, "seq_lengths": item}
        for row, item in zip(rows, lengths, strict=True)
    ]
    loop = build_loop(topology, folder, packs=packs)
    loop.train_loader = loader(topology, examples, shuffle=False)
    model = loop.optimizer_step.model

    def expected(texts):
        loss = torch.zeros(())
        for text in map(torch.tensor, texts):
            logits = model(input_ids=text[None], use_cache=False).logits[0, :-1]
            loss = loss + F.cross_entropy(logits, text[1:], reduction="sum")
        return loss_and_gradient(loop.optimizer_step, loss)

    (batch,) = next(loop.remaining_steps())
    return (
        loss_and_gradient(loop.optimizer_step, loop.objective.sum_loss(batch)[0]),
        expected(TEXTS),
        expected(rows),
    )


@pytest.mark.parametrize("packs", [True, False])
def test_a_text_does_not_see_the_one_before_it_in_its_row_unless_rows_are_padded(folder, packs):
    ((found, apart, together),) = on_ranks(1, packed_losses, folder, packs)
    right, wrong = (apart, together) if packs else (together, apart)
    torch.testing.assert_close(found[0], right[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], right[1], rtol=1e-4, atol=1e-5)
    assert abs(found[0] - wrong[0]) > 1e-2


def step_without_targets(topology, folder):
    loop, batch, said = build_loop(topology, folder), random_batch(), []
    model, schedule = loop.optimizer_step.model, loop.optimizer_step.schedule
    loop.recorder = replace(loop.recorder, say=said.append)
    loop.optimize([batch])
    before = [full(item).clone() for item in model.parameters()]
    batch.labels.fill_(-100)
    metrics = loop.optimize([batch])
    after = [full(item) for item in model.parameters()]
    moved = any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    return metrics, moved, schedule.state_dict()["num_steps_done"], said


def test_a_step_without_a_counted_token_leaves_the_weights_where_they_are(folder):
    """AdamW's momentum and decay would move them; the schedule still advances."""
    for metrics, moved, num_steps_done, said in on_ranks(2, step_without_targets, folder):
        assert not moved
        assert "train/loss" not in metrics
        assert num_steps_done == 2
        assert len(said) == 1
