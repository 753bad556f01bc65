"""Learning from a teacher: advantages and loss stay the same if rows are split, packed or sharded in other ways."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from kit.allocated import most_allocated
from kit.rank_processes import on_ranks, save_tiny_llama
from kit.tensors import local
from tiny_rl import (
    assert_alike,
    build,
    distributions,
    gradients,
    one_step,
    random_groups,
    random_rewards,
    random_rows,
    scored,
)
from transformers import AutoModelForCausalLM

import vectorlm.train.language_model
from vectorlm.algorithms.logprobs import token_values
from vectorlm.algorithms.support import Support
from vectorlm.errors import EngineTimeout
from vectorlm.ranks.topology import Topology
from vectorlm.rl.micro_batch import map_rows
from vectorlm.rl.models import ServerTeacher, Teacher, compared_with_top, load_reference, num_logits
from vectorlm.rl.rollout import make_batch
from vectorlm.rl.settings import TeacherSettings
from vectorlm.train.language_model import LanguageModel, Scores
from vectorlm.train.load import load_model
from vectorlm.train.settings import ModelSettings
from vectorlm.train.shard import load_sharded

SCALE = 2.0
"""Factor on the teacher's weights; the default of `build`."""
ADAPTERS = {"r": 4, "target_modules": ["q_proj"]}


def settings(folder, kind="full", beta=1.0, coef=1.0):
    return TeacherSettings(model=str(folder), kind=kind, beta=beta, coef=coef)


def prepare(topology, folder, algorithm, coef, one_step):
    steps = {"num_epochs": 1, "num_mini_batches": 1} if one_step else {}
    teacher = settings(folder, "sampled", coef=coef)
    run = build(topology, folder, algorithm, teacher=teacher, teacher_scale=SCALE, **steps)
    rows = random_rows(algorithm)
    plain = build(topology, folder, algorithm, **steps).prepare(rows) if algorithm == "grpo" else None
    return rows, run.prepare(rows), plain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "coef", "one_step"), [("on_policy_distillation", 1.0, True), ("grpo", 0.3, False)]
)
def test_sampled_tokens_are_charged_by_how_much_less_the_teacher_likes_them(
    folder, algorithm, coef, one_step
):
    _, policy = distributions(folder)
    _, teacher = distributions(folder, SCALE)
    for rows, batch, plain in on_ranks(2, prepare, folder, algorithm, coef, one_step):
        expected = torch.zeros(rows.mask.shape) if plain is None else plain.advantages.clone()
        for row, place in rows.mask.nonzero().tolist():
            token = rows.input_ids[row, place]
            gap = teacher[row][place - 1, token] - policy[row][place - 1, token]
            expected[row, place] += coef * gap.item()
        assert batch.old_logprobs is not None
        # The comparison is of float32 with float64.
        torch.testing.assert_close(batch.advantages, expected, rtol=1e-3, atol=1e-4)
        assert batch.advantages[rows.mask].abs().max() > 0.05


def full_step(topology, folder, beta, coef, packs):
    """Make one step whose change of the weights is the gradient of the teacher's loss alone."""
    more = {"teacher": settings(folder, "full", beta, coef), "teacher_scale": SCALE, "entropy_coef": 0.0}
    run = one_step(topology, folder, "on_policy_distillation", packs=packs, **more)
    rows = random_rows("on_policy_distillation")
    return *run.descend(run.prepare(rows)), rows.mask


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "packs", "beta"), [(1, True, 0.0), (2, True, 0.5), (2, False, 1.0), (1, False, 0.5)]
)
def test_the_gradient_of_whole_distributions_is_that_of_the_formula_row_by_row(
    folder, world_size, packs, beta
):
    steps = on_ranks(world_size, full_step, folder, beta, 0.7, packs)
    model, policy = distributions(folder)
    teacher = [logprobs.detach() for logprobs in distributions(folder, SCALE)[1]]
    for gradient, metrics, mask in steps:
        values, reverse = [], []
        for row, place in mask.nonzero().tolist():
            q, p = policy[row][place - 1], teacher[row][place - 1]
            mixture = (beta * p.exp() + (1 - beta) * q.exp()).log()
            kl = lambda a, b: (a.exp() * (a - b)).sum()  # noqa: E731
            middle = beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)
            values.append({0.0: kl(p, q), 1.0: kl(q, p)}.get(beta, middle))
            reverse.append(kl(q, p).item())
        loss = torch.stack(values).mean()
        model.zero_grad()
        (0.7 * loss).backward(retain_graph=True)
        assert metrics["teacher/loss"] == pytest.approx(loss.item(), rel=1e-3)
        assert metrics["policy/loss"] == pytest.approx(0.7 * loss.item(), rel=1e-3)
        assert metrics["teacher/kl"] == pytest.approx(sum(reverse) / len(reverse), rel=1e-3)
        # The comparison is of float32 with float64.
        torch.testing.assert_close(gradient, gradients(model), rtol=2e-3, atol=5e-6, check_dtype=False)


PROMPT = [7, 3, 9, 11, 30, 2, 5, 8]
"""Prompt that the policy reads as its own teacher; the policy's prompts have two to five tokens."""


def taught_by_itself(topology, folder, kind, beta, packs, shared_by):
    topology = replace(topology, context_parallel=shared_by)
    more = {"teacher": settings("self", kind, beta, 0.7), "entropy_coef": 0.0, "packs": packs}
    run = one_step(topology, folder, "on_policy_distillation", **more)
    rows = random_rows("on_policy_distillation", teacher_prompt=lambda record: PROMPT)
    batch = run.prepare(rows)
    return batch.advantages, *run.descend(batch), rows


@pytest.mark.parametrize(
    ("world_size", "packs", "shared_by"),
    [(1, True, 1), (2, True, 2), pytest.param(2, False, 1, marks=pytest.mark.slow)],
)
def test_the_policy_teaches_itself_by_another_prompt(folder, world_size, packs, shared_by):
    model, policy = distributions(folder)
    teacher = [logprobs.detach() for logprobs in distributions(folder, prompt=PROMPT)[1]]
    sampled = on_ranks(world_size, taught_by_itself, folder, "sampled", 1.0, packs, shared_by)
    for advantages, _, metrics, rows in sampled:
        places = rows.mask.nonzero().tolist()
        expected, reverse = torch.zeros(rows.mask.shape), []
        for row, place in places:
            token = rows.input_ids[row, place]
            gap = (teacher[row][place - 1, token] - policy[row][place - 1, token]).item()
            expected[row, place] = 0.7 * gap
            reverse.append(-gap)
        torch.testing.assert_close(advantages, expected, rtol=1e-3, atol=1e-5)
        assert expected.abs().max() > 0.01
        assert metrics["teacher/kl"] == pytest.approx(sum(reverse) / len(reverse), rel=1e-3, abs=1e-6)
    learned = on_ranks(world_size, taught_by_itself, folder, "full", 0.0, packs, shared_by)
    for _, gradient, metrics, rows in learned:
        values = []
        for row, place in rows.mask.nonzero().tolist():
            q, p = policy[row][place - 1], teacher[row][place - 1]
            values.append((p.exp() * (p - q)).sum())
        loss = torch.stack(values).mean()
        model.zero_grad()
        (0.7 * loss).backward(retain_graph=True)
        assert metrics["teacher/loss"] == pytest.approx(loss.item(), rel=1e-3)
        torch.testing.assert_close(gradient, gradients(model), rtol=2e-3, atol=5e-6, check_dtype=False)


def taught_with_the_same_prompt(topology, folder, options):
    more = {"teacher": settings("self", "full", 1.0), "entropy_coef": 0.0, **options}
    run = one_step(topology, folder, "on_policy_distillation", **more)
    with torch.no_grad():
        for name, weight in run.models.policy.model.named_parameters():
            if "lora_B" in name or "magnitude" in name or "modules_to_save" in name:
                # A shift by a constant would not change the distributions.
                shard = local(weight)
                shard += torch.linspace(-0.3, 0.3, len(shard)).view(-1, *[1] * (shard.ndim - 1))
    assert run.models.why_padded is None
    groups = [[replace(x, prompt_token_ids=tuple(PROMPT)) for x in group] for group in random_groups()]
    batch = make_batch(scored(groups, random_rewards()), run.spec, teacher_prompt=lambda record: PROMPT)
    return run.update(run.prepare(batch))


HEADS = {
    "adapted": {"adapters": {"r": 2, "target_modules": ["q_proj", "lm_head"]}},
    "dora": {"adapters": {"r": 2, "target_modules": ["q_proj", "lm_head"], "use_dora": True}},
    "saved": {"adapters": {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}},
    "split": {"split": ModelSettings(tensor_parallel=2)},
    "split adapted": {
        "split": ModelSettings(tensor_parallel=2),
        "adapters": {"r": 2, "target_modules": ["q_proj", "lm_head"]},
    },
}


@pytest.mark.parametrize(
    ("head", "world_size"),
    [
        ("adapted", 1),
        ("split", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("adapted", 2), ("dora", 1), ("saved", 2))
        ),
        pytest.param("split adapted", 2, marks=pytest.mark.slow),
    ],
)
def test_the_policy_with_its_own_prompt_is_its_own_distribution(tmp_path, head, world_size):
    folder = save_tiny_llama(tmp_path, num_key_value_heads=2)
    for metrics in on_ranks(world_size, taught_with_the_same_prompt, folder, HEADS[head]):
        assert abs(metrics["teacher/kl"]) < 1e-6
        assert abs(metrics["teacher/loss"]) < 1e-6


def taught_by_a_truncated_policy(topology, folder):
    more = {"teacher": settings("self", "sampled"), "entropy_coef": 0.0, "support": Support(top_p=0.5)}
    run = one_step(topology, folder, "on_policy_distillation", **more)
    rows = random_rows("on_policy_distillation", teacher_prompt=lambda record: PROMPT)
    batch = run.prepare(rows)
    return batch.advantages, batch.old_logprobs, rows


def test_the_policy_is_not_truncated_as_its_own_teacher(folder):
    teacher = distributions(folder, prompt=PROMPT)[1]
    for advantages, old, rows in on_ranks(1, taught_by_a_truncated_policy, folder):
        for row, place in rows.mask.nonzero().tolist():
            gap = teacher[row][place - 1, rows.input_ids[row, place]] - old[row, place]
            assert advantages[row, place].item() == pytest.approx(gap.item(), rel=1e-3, abs=1e-4)


def taught_by_a_server(topology, folder, beta, k, shared_by):
    topology = replace(topology, context_parallel=shared_by)
    model = load_model(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(SCALE)

    @torch.no_grad()
    def top(rows, k):
        found = []
        for row in rows:
            values, ids = model(torch.tensor([row])).logits[0, :-1].log_softmax(-1).topk(k)
            found.append(
                [list(zip(*place, strict=True)) for place in zip(ids.tolist(), values.tolist(), strict=True)]
            )
        return found

    teacher = TeacherSettings(server="http://a", kind="full", beta=beta, coef=0.7, top_k=k)
    more = {"teacher": teacher, "teacher_top": top, "entropy_coef": 0.0}
    run = one_step(topology, folder, "on_policy_distillation", **more)
    rows = random_rows("on_policy_distillation")
    return *run.descend(run.prepare(rows)), rows.mask


@pytest.mark.parametrize(
    ("world_size", "k", "beta", "shared_by"),
    [(1, 3, 1.0, 1), (2, 3, 1.0, 2), pytest.param(2, 47, 0.5, 1, marks=pytest.mark.slow)],
)
def test_the_most_probable_tokens_of_a_server_are_compared_and_the_rest_as_one(
    folder, world_size, k, beta, shared_by
):
    model, policy = distributions(folder)
    teacher = [logprobs.detach() for logprobs in distributions(folder, SCALE)[1]]
    for gradient, metrics, mask in on_ranks(world_size, taught_by_a_server, folder, beta, k, shared_by):
        values, whole = [], []
        for row, place in mask.nonzero().tolist():
            q, p = policy[row][place - 1], teacher[row][place - 1]
            top = p.topk(k).indices
            q_top, p_top = (torch.cat([x[top].exp(), 1 - x[top].exp().sum()[None]]).log() for x in (q, p))
            for found, mine, its in ((values, q_top, p_top), (whole, q, p)):
                mixture = (beta * its.exp() + (1 - beta) * mine.exp()).log()
                kl = lambda a, b: (a.exp() * (a - b)).sum()  # noqa: E731
                middle = beta * kl(its, mixture) + (1 - beta) * kl(mine, mixture)
                found.append(kl(mine, its) if beta == 1 else middle)
        loss = torch.stack(values).mean()
        assert loss < torch.stack(whole).mean() + 1e-12
        model.zero_grad()
        (0.7 * loss).backward(retain_graph=True)
        assert metrics["teacher/loss"] == pytest.approx(loss.item(), rel=1e-3)
        torch.testing.assert_close(gradient, gradients(model), rtol=2e-3, atol=5e-6, check_dtype=False)


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_a_policy_that_can_draw_none_of_the_most_probable_tokens_has_a_gradient(beta):
    logits = torch.zeros(2, 6, requires_grad=True)
    masked = logits.masked_fill(torch.arange(6) >= torch.tensor([[3], [6]]), -torch.inf)
    teacher = torch.tensor([[0.5, 0.3], [0.5, 0.3]]).log()
    compare = compared_with_top(torch.tensor([[3, 4], [3, 4]]), teacher, beta)
    found = compare(slice(0, 2), masked.log_softmax(-1))
    (gradient,) = torch.autograd.grad(found[:, 0].sum(), logits)
    assert found.isfinite().all()
    assert gradient[0].eq(0).all()
    assert gradient.isfinite().all()
    assert gradient[1].any()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_tokens_that_only_a_server_has_count_as_the_rest(beta):
    rows = random_rows("grpo")
    teacher = ServerTeacher(
        None,
        Topology(),
        48,
        lambda asked, k: [[[(48, math.log(0.4)), (2, math.log(0.5))]] * (len(row) - 1) for row in asked],
    )
    token_ids, logprobs = teacher.top_logprobs(rows, 2)
    count = int(rows.mask.sum())
    assert token_ids.tolist() == [[0, 2]] * count
    policy = torch.randn(count, 48, generator=torch.Generator().manual_seed(0)).requires_grad_()
    results = []
    for compare in (
        compared_with_top(token_ids, logprobs, beta),
        compared_with_top(token_ids[:, 1:], logprobs[:, 1:], beta),
    ):
        found = compare(slice(count), policy.log_softmax(-1))
        results.append((found.detach(), torch.autograd.grad(found[:, 0].sum(), policy)[0]))
    torch.testing.assert_close(*results)
    assert results[0][1].any()


@pytest.mark.parametrize(("beta", "expected"), [(0.0, 12 + 13), (0.5, 12 + 30), (1.0, 12 + 9)])
def test_distributions_take_as_many_bytes_for_each_logit_as_the_memory_plan_says(beta, expected):
    states = torch.randn(256, 8, requires_grad=True)
    head, other = (torch.nn.Linear(8, 4096, bias=False) for _ in range(2))
    frozen = SimpleNamespace(scores=lambda rows: Scores(states.detach(), other, 0.7))

    def learn():
        compare = Teacher.comparison(SimpleNamespace(_frozen=frozen), None, beta)
        targets = torch.zeros(256, dtype=torch.long)
        found = token_values(states, targets, 0.7, head=head, entropy="value", compare=compare)
        (found.logprobs.sum() + found.compared[:, 0].sum()).backward()

    assert most_allocated(learn) / (256 * 4096) == pytest.approx(expected, rel=0.02)


def train(topology, folder, algorithm, kind, max_tokens, packs=True, adapters=None):
    """Make two optimizer steps with both losses; with small micro-batches, compute in chunks of three tokens."""
    if max_tokens < 2000:
        vectorlm.train.language_model.chunk_tokens = lambda vocab_size: 3
    teacher = settings(folder, kind, *((0.5,) if kind == "full" else ()))
    more = {"max_tokens_per_micro_batch": max_tokens, "num_epochs": 1, "packs": packs, "adapters": adapters}
    run = build(topology, folder, algorithm, teacher=teacher, **more)
    if adapters is not None:
        with torch.no_grad():
            for name, parameter in run.models.policy.model.named_parameters():
                if "lora_B" in name:
                    parameter.add_(0.05)
    assert (run.models.why_padded is None) is packs
    metrics = run.update(run.prepare(random_rows(algorithm)), 3)
    return run.weights(), metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "kind", "adapters"),
    [
        ("grpo", "sampled", None),
        ("grpo", "full", ADAPTERS),
        pytest.param("online_dpo", "full", None, marks=pytest.mark.slow),
    ],
)
def test_ranks_micro_batches_chunks_and_padding_change_nothing(folder, algorithm, kind, adapters):
    (wide,) = on_ranks(1, train, folder, algorithm, kind, 2000, True, adapters)
    assert wide[1]["teacher/kl"] > 0.01
    for packs in (True,) if adapters is None else (True, False):
        for other in on_ranks(2, train, folder, algorithm, kind, 60, packs, adapters):
            assert_alike(other, wide, rel=2e-3)


def padded_teacher(topology, folder, wide):
    policy = LanguageModel(load_model(folder))
    load = lambda load: load_sharded(load, topology)  # noqa: E731
    teacher = Teacher(
        policy, load_reference(partial(load_model, wide), load, num_tokens=num_logits(policy.model))
    )
    rows = random_rows("on_policy_distillation")
    run = build(topology, folder, "on_policy_distillation", teacher=settings(wide, "full"))
    found = teacher.logprobs(rows, partial(map_rows, topology=topology, max_tokens=200, packs=True))
    return rows, found, run.update(run.prepare(rows))


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_logits_beyond_the_policys_vocabulary_are_dropped(folder, tmp_path, tied):
    """The expected values are a softmax over the policy's tokens."""
    wide = save_tiny_llama(tmp_path / "wide", vocab_size=64, tied=tied)
    model = AutoModelForCausalLM.from_pretrained(wide, dtype=torch.float64)
    for rows, found, metrics in on_ranks(2, padded_teacher, folder, wide):
        for row in range(0, len(rows.mask), 3):
            logits = model(rows.input_ids[row : row + 1, : rows.num_tokens[row]]).logits[0, :, :48]
            for place in rows.mask[row].nonzero()[:, 0].tolist():
                expected = torch.log_softmax(logits[place - 1], -1)[rows.input_ids[row, place]]
                assert found[row, place].item() == pytest.approx(expected.item(), abs=1e-4)
        assert metrics["teacher/kl"] > 0


def ask_a_server(topology, fails_on):
    asked = []

    def score(rows):
        if topology.rank == fails_on:
            raise EngineTimeout("the server said nothing.")
        asked.extend(rows)
        return [[float(token) for token in row] for row in rows]

    # With an algorithm that learns from rewards, completions without a reward are not trained on.
    rows = random_rows("grpo")
    try:
        return rows, ServerTeacher(score, topology, 48).logprobs(rows, None), asked
    except EngineTimeout as error:
        return str(error)


def test_a_server_is_asked_for_each_row_once_and_up_to_its_last_trained_token():
    results = on_ranks(2, ask_a_server, None)
    asked = [tuple(row) for _, _, asked in results for row in asked]
    for rows, found, _ in results:
        trained = rows.mask.any(dim=1)
        assert len(asked) == int(trained.sum()) < len(trained)
        for row in trained.nonzero()[:, 0].tolist():
            end = int(rows.mask[row].nonzero().max()) + 1
            assert tuple(rows.input_ids[row, :end].tolist()) in asked
            assert torch.equal(found[row, :end], rows.input_ids[row, :end].float())
        assert found[rows.mask].eq(rows.input_ids[rows.mask]).all()


def test_what_a_server_does_to_one_rank_all_ranks_hear():
    assert on_ranks(2, ask_a_server, 1) == ["the server said nothing."] * 2
