import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from kit.metrics_page import METRICS
from kit.rank_processes import on_ranks
from kit.tensors import local
from kit.tiny_runs import GLOBAL_BATCH, LEARNING_RATE, NUM_STEPS, build_loop, loader, rows, whole_weights
from torch.distributed.tensor import DTensor

from vectorlm.errors import DatasetError, NonFiniteLoss
from vectorlm.ranks.topology import Topology
from vectorlm.train import settings
from vectorlm.train.recorder import EarlyStopping

LIMITS = APART, ONCE = 0, settings.GATHER_ONCE_BYTES
SPLITS = {
    "one rank": (1, [(ONCE, "FULL_SHARD", 1, 1), (ONCE, "FULL_SHARD", 4, 1)]),
    "two": (2, [(APART, "FULL_SHARD", 4, 1), (ONCE, "NO_SHARD", 4, 1), (ONCE, "FULL_SHARD", 2, 2)]),
    "two in other ways": (
        2,
        [
            (ONCE, "FULL_SHARD", 4, 1),
            (APART, "SHARD_GRAD_OP", 2, 1),
            (APART, "NO_SHARD", 4, 1),
            (APART, "HYBRID_SHARD", 2, 1),
        ],
    ),
    "four": (4, [(APART, "FULL_SHARD", 2, 2), (ONCE, "FULL_SHARD", 2, 2)]),
}
"""Number of ranks; then the size up to which a model is gathered once, strategy, micro-batches, and ranks per pass."""


def sum_loss(model, row):
    """Compute the loss of one row without padding or the library's code; return it and the number of tokens."""
    logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
    labels = torch.tensor(row["labels"][1:])
    kept = labels != -100
    return F.cross_entropy(logits[kept], labels[kept], reduction="sum"), int(kept.sum())


def mean_loss(model, chosen):
    parts = [sum_loss(model, row) for row in chosen]
    return sum(loss for loss, _ in parts) / sum(count for _, count in parts)


@pytest.fixture(scope="module")
def reference(folder):
    """Train with plain transformers and torch in one process; return the losses, norms, evaluations and weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
    examples, held_out = rows(21), rows(11, seed=1)
    rates = [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]
    steps = [step for epoch in (0, 1) for step in loader(Topology(), examples).steps(epoch)]
    assert [(batch.ids >= 0).sum().item() for step in steps for batch in step] == [8, 8, 5] * 2
    losses, norms, evals = [], [], {0: mean_loss(model, held_out).item()}
    for number, (step, rate) in enumerate(zip(steps, rates, strict=True), start=1):
        optimizer.param_groups[0]["lr"] = rate * LEARNING_RATE
        loss = mean_loss(model, [examples[index] for index in step[0].ids.tolist() if index >= 0])
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        losses.append(loss.item())
        if number in (4, 6):
            evals[number] = mean_loss(model, held_out).item()
    # Some gradients are clipped, and the model learns.
    assert max(norms) > 0.5
    assert losses[-1] < losses[0]
    assert evals[6] < evals[0]
    return losses, norms, evals, {name: parameter.detach() for name, parameter in model.named_parameters()}


def train_every_split(topology, folder, splits):
    found = {}
    for split in splits:
        settings.GATHER_ONCE_BYTES, strategy, num_micro_batches, size = split
        training = build_loop(
            replace(topology, context_parallel=size),
            folder,
            strategy=strategy,
            num_micro_batches=num_micro_batches,
        )
        training.run()
        found[split] = list(training.recorder.sink), whole_weights(training.optimizer_step.model)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "splits",
    [
        "one rank",
        "two",
        pytest.param("two in other ways", marks=pytest.mark.slow),
        pytest.param("four", marks=pytest.mark.slow),
    ],
)
def test_every_split_of_the_global_batch_trains_like_one_plain_process(splits, folder, reference):
    losses, norms, evals, expected = reference
    world_size, splits = SPLITS[splits]
    for found in on_ranks(world_size, train_every_split, folder, splits):
        assert list(found) == splits
        for split, (lines, weights) in found.items():
            assert [line["step"] for line in lines] == list(range(NUM_STEPS + 1)), split
            assert [line["train/loss"] for line in lines[1:]] == pytest.approx(losses, rel=1e-5), split
            assert [line["train/grad_norm"] for line in lines[1:]] == pytest.approx(norms, rel=1e-4), split
            found_evals = {line["step"]: line["eval/loss"] for line in lines if "eval/loss" in line}
            assert found_evals == pytest.approx(evals, rel=1e-5), split
            # AdamW divides by the root of tiny second moments, which magnifies fp32 round-off.
            torch.testing.assert_close(
                weights, expected, rtol=1e-3, atol=1e-5, msg=lambda text, split=split: f"{split} {text}"
            )


def gather_twice(topology, folder):
    found = []
    for limit in LIMITS:
        settings.GATHER_ONCE_BYTES = limit
        training = build_loop(topology, folder, num_micro_batches=2)
        model, batches = training.optimizer_step.model, next(training.remaining_steps())
        for index, batch in enumerate(batches):
            training.optimizer_step.backward(
                training.objective.sum_loss(batch)[0], is_last=index == len(batches) - 1
            )
            found.append(not isinstance(model.get_input_embeddings().weight, DTensor))
            found.append(not isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor))
    return found


def test_a_small_model_stays_whole_between_the_micro_batches_of_a_step(folder):
    for found in on_ranks(2, gather_twice, folder):
        assert found == [False] * 4 + [True, True, False, False]


@pytest.fixture(scope="module")
def reported(folder):
    """Return the first and third lines of a run on one rank, and of a run on two."""
    return on_ranks(1, lines_of_a_run, folder)[0], on_ranks(2, lines_of_a_run, folder)[0]


@pytest.mark.slow
def test_a_step_reports_its_learning_rate_and_its_tokens(reported):
    (first, third), _ = reported
    assert (first["train/learning_rate"], third["train/learning_rate"]) == (0.0, LEARNING_RATE)
    steps = list(loader(Topology(), rows(21)).steps(0))
    num_tokens = sum(int(batch.attention_mask.sum()) for batch in steps[0])
    assert first["train/tokens_per_s"] * first["train/step_s"] == pytest.approx(num_tokens)
    assert num_tokens < GLOBAL_BATCH * 12
    # The last step is short, and its filler rows do not count.
    assert any((batch.ids < 0).any() for batch in steps[2])
    epoch = sum(int(batch.attention_mask[batch.ids >= 0].sum()) for step in steps for batch in step)
    assert (first["perf/tokens_seen"], third["perf/tokens_seen"]) == (num_tokens, epoch)
    phases = {"time/forward_s", "time/backward_s", "time/optimizer_s"}
    assert sum(first[name] for name in phases) < first["train/step_s"]
    assert first["perf/memory_max_bytes"] > 50e6
    assert set(first) - {"step"} <= METRICS


def lines_of_a_run(topology, folder):
    """Return the first and the third line of a run; check the operations per second against a calculation by hand."""
    training = build_loop(topology, folder, device_peak_tflops=2.0)
    training.run()
    step = training.recorder.sink[1]
    names = [name for name, _ in training.optimizer_step.model.named_parameters()]
    assert any("embed_tokens" in name for name in names)
    weights = whole_weights(training.optimizer_step.model)
    num_weights = sum(weight.numel() for name, weight in weights.items() if "embed_tokens" not in name)
    by_hand = 6 * num_weights * step["train/tokens_per_s"]
    assert step["perf/model_flops_per_s"] == pytest.approx(by_hand)
    assert step["perf/mfu"] == pytest.approx(by_hand / (2e12 * topology.world_size))
    return step, training.recorder.sink[3]


def test_ranks_report_the_tokens_of_all_of_them(reported):
    assert reported[0][0]["perf/tokens_seen"] == reported[1][0]["perf/tokens_seen"]


def meet_nan(topology, folder):
    training = build_loop(topology, folder)
    batches = next(training.remaining_steps())
    my_ids = [index for batch in batches for index in batch.ids.tolist()]
    if topology.rank == topology.world_size - 1:
        # Only this row has token 47, whose embedding is in the last rank's shard.
        batches[0].input_ids[1, 0] = 47
        local(training.optimizer_step.model.model.embed_tokens.weight).detach()[-1] = math.nan
    before = whole_weights(training.optimizer_step.model)
    with pytest.raises(NonFiniteLoss) as raised:
        training.optimize(batches)
    after = whole_weights(training.optimizer_step.model)
    same = all(torch.equal(before[name], after[name]) for name in before if "embed" not in name)
    return str(raised.value), my_ids, same


class SameAnswers:
    def evaluate(self, step):
        return {"eval/accuracy": 0.5, "sampler/generate_s": 1.0}


def lines_until_answers_improve_no_more(topology, folder):
    stopping = EarlyStopping("eval/accuracy", patience=1)
    recorded = {"evaluation": SameAnswers(), "stopping": stopping}
    training = build_loop(topology, folder, logging_steps=100, **recorded)
    training.run()
    return list(training.recorder.sink)


def test_a_run_that_answers_stop_has_a_loss_of_its_last_weights(folder):
    (found,) = on_ranks(1, lines_until_answers_improve_no_more, folder)
    assert ["eval/loss" in line for line in found] == [True, False, True]
    assert found[2]["eval/stopped_early"] == 1


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loss_that_is_not_finite_stops_every_rank_and_names_step_rank_and_examples(world_size, folder):
    results = on_ranks(world_size, meet_nan, folder)
    ids = results[-1][1]
    for text, _, weights_are_unchanged in results:
        assert f"nan at step 1 (on rank {world_size - 1}, examples {ids})" in text
        assert weights_are_unchanged


def meet_infinite_gradient(topology, folder):
    training = build_loop(topology, folder)
    embedding = training.optimizer_step.model.model.embed_tokens

    def spoil(module, inputs, output):
        output.register_hook(lambda gradient: gradient * math.inf)

    embedding.register_forward_hook(spoil)
    before = whole_weights(training.optimizer_step.model)
    with pytest.raises(NonFiniteLoss) as raised:
        training.optimize(next(training.remaining_steps()))
    after = whole_weights(training.optimizer_step.model)
    return str(raised.value), all(torch.equal(before[name], after[name]) for name in before)


def test_a_gradient_norm_that_is_not_finite_stops_before_the_weights_change(folder):
    for rank, (text, weights_are_unchanged) in enumerate(on_ranks(2, meet_infinite_gradient, folder)):
        assert f"gradient norm is nan at step 1 (over all ranks, seen on rank {rank})" in text
        assert weights_are_unchanged


UNKNOWN = {
    "token 48": ([1, 2, 3, 48], [1, 2, 3, 4]),
    "token -1": ([1, 2, -1, 4], [1, 2, 3, 4]),
    "label 500": ([1, 2, 3, 4], [1, 2, 3, 500]),
    "label -1": ([1, 2, 3, 4], [-1, -1, -1, 4]),
}


def train_on_unknown_tokens(topology, folder):
    for what, (input_ids, labels) in UNKNOWN.items():
        training = build_loop(topology, folder)
        examples = [{"input_ids": [1, 2, 3, 40], "labels": [1, 2, 3, 4]} for index in range(20)]
        examples.append({"input_ids": input_ids, "labels": labels})
        training.train_loader = loader(topology, examples, shuffle=False)
        with pytest.raises(DatasetError, match=f"row 20 .* {what}.*ignore_index"):
            training.run()


@pytest.mark.slow
def test_what_the_model_has_no_token_for_is_named_with_its_row(folder):
    on_ranks(1, train_on_unknown_tokens, folder)
