"""Demonstrations next to a policy's completions: their share of the gradient, and the texts of a step."""

from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from kit.rank_processes import on_ranks
from tiny_rl import build, gradients, one_step, random_groups, random_rows, scored
from transformers import AutoModelForCausalLM

from vectorlm.data.loader import Collator, StepLoader
from vectorlm.rl.prompts import Demonstrations
from vectorlm.rl.rollout import make_batch
from vectorlm.rl.settings import SFTSettings
from vectorlm.rl.update import Updater

SHARE = 0.3
TEXTS = [[5, 9, 3, 20, 11], [7, 7, 30], [12, 40, 6, 2, 2, 33, 19], [8, 15, 22, 4]]
PROMPTS = [2, 1, 3, 0]
"""Number of a text's first tokens that count in no loss."""


def demonstrations(topology, policy, **settings):
    rows = [
        {"input_ids": text, "labels": [-100] * count + text[count:]}
        for text, count in zip(TEXTS, PROMPTS, strict=True)
    ]
    size = 4 // topology.num_data_shares
    collator = Collator(0, -100, 16)
    loader = StepLoader(
        Dataset.from_list(rows), collator, topology, micro_batch_size=size, seed=0, shuffle=True
    )
    plain = policy.untruncated(temperature=1.0)
    return Demonstrations(plain, loader, SFTSettings(dataset="texts", **settings), num_batches=11)


def change(topology, folder, weighting):
    """Return the change of the weights in one plain step of size 1, and its metrics."""
    run = one_step(topology, folder, "grpo", entropy_coef=0.0)
    before, batch = run.weights(), run.prepare(random_rows("grpo"))
    texts = None
    if weighting is not None:
        texts = demonstrations(topology, run.models.policy, share=SHARE, weighting=weighting)
    metrics = Updater(run.models, run.spec, run.settings, topology, texts).update(batch, 2)
    after = run.weights()
    return {name: before[name] - after[name] for name in before}, metrics


def changes(topology, folder, shared_by):
    topology = replace(topology, context_parallel=shared_by)
    return {weighting: change(topology, folder, weighting) for weighting in (None, "none", "chord", "luffy")}


def expected(folder, weighting):
    """Return the gradient and the loss of the texts, token by token in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    losses = []
    for text, count in zip(TEXTS, PROMPTS, strict=True):
        logprobs = torch.log_softmax(model(torch.tensor([text])).logits[0], dim=-1)
        for place in range(max(count, 1), len(text)):
            logp = logprobs[place - 1, text[place]]
            p = logp.exp()
            losses.append(
                {"none": -logp, "chord": -(p * (1 - p)).detach() * logp, "luffy": -p / (p + 0.1)}[weighting]
            )
    loss = torch.stack(losses).mean()
    loss.backward()
    return gradients(model), loss.item()


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "shared_by"), [(2, 1), (2, 2)])
def test_the_gradient_is_the_sum_of_both_by_their_shares(folder, world_size, shared_by):
    found = on_ranks(world_size, changes, folder, shared_by)
    alone, without = found[0][None]
    assert "sft/loss" not in without
    for weighting in ("none", "chord", "luffy"):
        of_texts, loss = expected(folder, weighting)
        for by_weighting in found:
            gradient, metrics = by_weighting[weighting]
            assert metrics["sft/loss"] == pytest.approx(loss, rel=1e-5)
            assert metrics["policy/loss"] == pytest.approx(without["policy/loss"], rel=1e-5)
            both = {name: (1 - SHARE) * alone[name].double() + SHARE * of_texts[name] for name in alone}
            torch.testing.assert_close(gradient, both, rtol=1e-3, atol=2e-6, check_dtype=False)


def changes_without_completions(topology, folder):
    """Return the changes of the weights and the metrics of steps of size 1 on texts, with and without a batch."""
    found = []
    for num_mini_batches, has_batch in ((1, False), (2, True), (4, False)):
        run = one_step(topology, folder, "grpo", entropy_coef=0.0)
        settings = replace(
            run.settings, update=replace(run.settings.update, num_mini_batches=num_mini_batches)
        )
        texts = demonstrations(topology, run.models.policy, share=SHARE)
        updater = Updater(run.models, run.spec, settings, topology, texts)
        before = run.weights()
        if has_batch:
            # One group with equal rewards: the second mini-batch of the batch has no group.
            rows = make_batch(scored(random_groups()[:1], torch.ones(1, 4)), run.spec)
            metrics = updater.update(run.prepare(rows), 2)
        else:
            metrics = updater.update_on_texts(2)
        found.append(({name: before[name] - after for name, after in run.weights().items()}, metrics))
    return found


@pytest.mark.slow
def test_optimizer_steps_without_completions_train_on_texts(folder):
    ((alone, metrics), (twice, others), (_, of_four)), *_ = on_ranks(1, changes_without_completions, folder)
    of_texts, loss = expected(folder, "none")
    assert metrics["sft/loss"] == pytest.approx(loss, rel=1e-5)
    assert [found["policy/optimizer_steps"] for found in (metrics, others, of_four)] == [1, 2, 4]
    # A run ends if no step has a policy loss.
    assert "policy/loss" not in metrics
    wanted = {name: SHARE * gradient for name, gradient in of_texts.items()}
    torch.testing.assert_close(alone, wanted, rtol=1e-3, atol=2e-6, check_dtype=False)
    assert any(not twice[name].allclose(change) for name, change in alone.items())


@pytest.mark.parametrize(
    ("settings", "shares"),
    [({"share": 0.5}, [0.5, 0.5, 0.5]), ({"share": 0.5, "share_at_end": 0.0}, [0.5, 0.25, 0.0])],
)
def test_the_share_goes_in_a_straight_line(settings, shares):
    texts = Demonstrations(None, None, SFTSettings(dataset="texts", **settings), num_batches=11)
    assert [texts.share(batch) for batch in (0, 5, 10)] == shares


def ids_of_steps(topology, folder):
    run = build(topology, folder, "grpo")
    texts = demonstrations(topology, run.models.policy)
    texts = replace(
        texts,
        loader=StepLoader(
            texts.loader.dataset, Collator(0, -100, 16), topology, micro_batch_size=1, seed=0, shuffle=True
        ),
    )
    return [
        (texts.micro_batches(index)[0][0].ids.tolist(), texts.micro_batches(index)[1]) for index in range(8)
    ]


def test_which_texts_a_step_has_follows_from_its_place_alone(folder):
    (found,) = on_ranks(1, ids_of_steps, folder)
    first, second = ([ids[0] for ids, _ in found[start : start + 4]] for start in (0, 4))
    assert sorted(first) == sorted(second) == [0, 1, 2, 3]
    assert first != second
    for (index,), count in found:
        assert count == len(TEXTS[index]) - max(PROMPTS[index], 1)
