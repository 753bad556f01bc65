"""Routers: record their choices, replay others, and balance the load."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from kit.families import FAMILIES, RECURRENT, WITH_BUFFERS, save_family
from kit.rank_processes import forked
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from vectorlm import Topology
from vectorlm.errors import ConfigError
from vectorlm.train.language_model import LanguageModel, inner_model
from vectorlm.train.load import load_model
from vectorlm.train.lora import add_lora
from vectorlm.train.packing import ContextGroup, Rows
from vectorlm.train.recorder import num_multiplied
from vectorlm.train.routes import Balance, BalanceMeter, weigh_balance
from vectorlm.train.shard import recompute

ALL = {**FAMILIES, **RECURRENT, **WITH_BUFFERS}
FAST = ("Qwen3-MoE", "GLM-4-MoE")
FURTHER = ("Mixtral", "OLMoE", "gpt-oss", "DeepSeek-V2", "GLM-4-MoE-Lite", "dots.llm1", "Qwen3-Next")
FURTHER += ("Qwen3.5-MoE", "Granite 4 hybrid MoE")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that saves a family's model once and returns its folder."""
    folder = tmp_path_factory.mktemp("models")

    def path(name):
        return folder / name if (folder / name).exists() else save_family(ALL[name], folder / name)

    return path


@pytest.fixture
def rows():
    """Return three rows with one prompt and a single row, of different lengths."""
    ids = torch.randint(1, 48, (4, 12), generator=torch.Generator().manual_seed(0))
    ids[1:3, :6] = ids[0, :6]
    mask = (torch.arange(12) < torch.tensor([12, 9, 12, 7])[:, None]).long()
    return Rows(ids, mask, mask.bool() & (torch.arange(12) > 2), (0, 0, 0, 1))


def learned(language_model, rows):
    """Return log-probabilities and gradients of rows."""
    model = language_model.model
    model.zero_grad()
    logprobs = language_model.logprobs(rows)
    logprobs.sum().backward()
    return logprobs, {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def are_equal(one, other):
    return torch.equal(one[0], other[0]) and all(torch.equal(one[1][name], other[1][name]) for name in one[1])


@pytest.mark.parametrize("name", ["Qwen3-MoE", "GLM-4-MoE", "Mixtral", "OLMoE"])
def test_the_weights_that_multiply_a_token_are_those_that_torch_counts(saved, name):
    model = load_model(saved(name))
    # torch does not count grouped products.
    model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(24)[None])
    # Norms and attention scores are the difference.
    assert num_multiplied(model) == pytest.approx(counter.get_total_flops() / 2 / 24, rel=0.02)


def choices(language_model):
    found = language_model.routers.own_by_row()
    return [found[row] for row in sorted(found)]


def check_replay(folder, rows, packs, recomputes):
    """Replay a model's own choices, then other choices; return the model's plain results."""
    model = load_model(folder)
    if recomputes:
        recompute(model, True, None)
    language_model = LanguageModel(model, packs=packs)
    plain, routers = learned(language_model, rows), language_model.routers
    own = choices(language_model)
    routers.begin_batch()
    assert are_equal(learned(language_model, replace(rows, routes=own, replayed=own)), plain)
    assert routers.differing_share() == 0
    num_experts = len(routers.last.counts)
    others = [(routes + 1) % num_experts for routes in own]
    routers.begin_batch()
    logprobs, gradients = learned(language_model, replace(rows, routes=others, replayed=others))
    assert routers.differing_share() == 1
    assert (logprobs - plain[0]).abs().max() > 1e-4
    # The routers have gradients from the shares of the given experts.
    of_routers = [x for name, x in gradients.items() if "gate.weight" in name or "router" in name]
    assert all(gradient.abs().sum() > 0 for gradient in of_routers)
    # Without replay, the model uses its own choices again.
    assert are_equal(learned(language_model, rows), plain)
    return plain


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("name", FAST)
def test_the_own_choice_changes_no_bit_and_another_one_is_used(saved, rows, name, packs):
    plain = check_replay(saved(name), rows, packs, recomputes=False)
    assert are_equal(check_replay(saved(name), rows, packs, recomputes=True), plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", FURTHER)
def test_routers_of_further_families_replay(saved, rows, name):
    check_replay(saved(name), rows, packs=True, recomputes=True)
    check_replay(saved(name), rows, packs=False, recomputes=False)


def test_a_dense_model_has_no_routers(saved):
    assert LanguageModel(load_model(saved("Llama"))).routers is None


def test_a_missing_token_keeps_the_own_choice_and_the_first_of_shared_rows_decides(saved, rows):
    language_model = LanguageModel(load_model(saved("Qwen3-MoE")))
    learned(language_model, rows)
    own = choices(language_model)
    first = [own[0][:4], (own[1] + 1) % 6, None, None]
    learned(language_model, replace(rows, replayed=first))
    layout = language_model.routers.layout
    table, has = layout.table(first)
    for row, index, place in layout:
        for routes, is_theirs in ((first[0], index < 4), (first[1], (index >= 4) & (index < 6))):
            if row < 3:
                assert has[place[is_theirs]].all()
                np.testing.assert_array_equal(table[place[is_theirs]], routes[index[is_theirs]])
        if row in (2, 3):
            assert not has[place[index >= (6 if row == 2 else 0)]].any()


def test_routes_of_another_model_are_refused(saved, rows):
    language_model = LanguageModel(load_model(saved("Qwen3-MoE")))
    routes = [np.zeros((12, 5, 2), np.uint8)] * 4
    with pytest.raises(ConfigError, match="router_replay"):
        language_model.logprobs(replace(rows, replayed=routes))


def test_two_models_with_adapters_of_one_policy_do_not_share_a_replay(saved, rows):
    model = add_lora(load_model(saved("Qwen3-MoE")), {"r": 2, "target_modules": ["q_proj"]})
    language_model = LanguageModel(model)
    whole = language_model.untruncated()
    whole.routers = None
    plain = whole.logprobs(rows)
    learned(language_model, rows)
    others = [(routes + 1) % 6 for routes in choices(language_model)]
    learned(language_model, replace(rows, replayed=others))
    with torch.no_grad():
        assert torch.equal(whole.logprobs(replace(rows, replayed=others)), plain)
    assert torch.equal(whole.logprobs(rows), plain)


def expected_balance(folder, rows, coef):
    """Return transformers' load-balancing loss of all rows, and the gradient of `coef` times it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    loss = model(rows.input_ids, attention_mask=rows.attention_mask, output_router_logits=True).aux_loss
    (coef * loss).backward()
    return loss.item(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def balanced(folder, all_rows, packs, coef):
    """Return the load-balancing loss of an optimizer step with several passes, and its gradient alone."""
    language_model = LanguageModel(load_model(folder), packs=packs)
    model = language_model.model
    weigh_balance(language_model.routers, inner_model(model), coef)
    meter = BalanceMeter(language_model.routers)
    meter.count([lambda rows=rows: language_model.logprobs(rows) for rows in all_rows], model)
    for rows in all_rows:
        logprobs = language_model.logprobs(rows)
        (0 * logprobs.sum() + meter.share()).backward()
    return meter.value(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def part(rows, indices):
    names = ("input_ids", "attention_mask", "is_asked")
    groups = [rows.groups[index] for index in indices]
    return replace(rows, groups=groups, **{name: getattr(rows, name)[indices] for name in names})


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("name", ["Qwen3-MoE", pytest.param("gpt-oss", marks=pytest.mark.slow)])
def test_the_balance_is_that_of_transformers_however_a_step_is_split(saved, rows, name, packs):
    expected, gradients = expected_balance(saved(name), rows, 0.5)
    for split in ([[0, 1, 2, 3]], [[0, 1], [2], [3]]):
        loss, found = balanced(saved(name), [part(rows, indices) for indices in split], packs, 0.5)
        assert loss == pytest.approx(expected, rel=1e-6)
        for key, gradient in gradients.items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("packs", [True, False])
def test_a_pass_measures_the_balance_of_transformers_without_training_it(saved, rows, packs):
    language_model = LanguageModel(load_model(saved("Qwen3-MoE")), packs=packs)
    language_model.logprobs(rows)
    last = language_model.routers.last
    assert last.loss(last).item() == pytest.approx(
        expected_balance(saved("Qwen3-MoE"), rows, 1.0)[0], rel=1e-6
    )
    assert not last.shares.requires_grad


def test_the_balance_of_a_uniform_router_is_the_number_of_chosen_experts():
    uniform = Balance(torch.full((4,), 6.0), torch.full((4,), 3.0), torch.tensor(12.0))
    assert uniform.loss(uniform).item() == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("name", "declared", "given", "weight"),
    [
        ("Qwen3-MoE", False, None, 0.0),
        ("Qwen3-MoE", True, None, 0.001),
        ("Qwen3-MoE", True, 0.0, 0.0),
        ("Qwen3-MoE", False, 0.5, 0.5),
        ("GLM-4-MoE", False, None, 0.0),
        ("GLM-4-MoE", False, 0.5, None),
        ("Llama", False, 0.5, None),
    ],
)
def test_the_config_weighs_the_balance_unless_a_setting_does(saved, name, declared, given, weight):
    model = load_model(saved(name))
    model.config.output_router_logits = declared
    routers = LanguageModel(model).routers
    if weight is None:
        with pytest.raises(ConfigError, match="router_aux_loss_coef"):
            weigh_balance(routers, model, given)
    else:
        weigh_balance(routers, model, given)
        assert routers.balance_coef == weight


def shared_pass(folder, rows):
    """Let two ranks share a pass that replays other choices than the model's own."""
    context = ContextGroup.of(replace(Topology.from_environment(), context_parallel=2))
    language_model = LanguageModel(load_model(folder), context=context)
    plain = language_model.logprobs(rows).detach()
    parts = language_model.routers.own_by_row()
    routes = [torch.from_numpy(parts[row].astype(np.int64)) for row in sorted(parts)]
    for x in routes:
        torch.distributed.all_reduce(x)
    others = [((x + 1) % 6).numpy().astype(np.uint8) for x in routes]
    language_model.routers.begin_batch()
    replayed = language_model.logprobs(replace(rows, routes=others, replayed=others)).detach()
    return plain, replayed, [x.numpy() for x in routes], language_model.routers.differing_share()


@pytest.mark.slow
def test_ranks_that_share_a_pass_replay_their_tokens(saved, rows):
    language_model = LanguageModel(load_model(saved("Qwen3-MoE")))
    plain, _ = learned(language_model, rows)
    own = choices(language_model)
    others = [((routes + 1) % 6).astype(np.uint8) for routes in own]
    replayed, _ = learned(language_model, replace(rows, replayed=others))
    for found in forked(shared_pass, saved("Qwen3-MoE"), rows):
        torch.testing.assert_close(found[0], plain.detach())
        torch.testing.assert_close(found[1], replayed.detach())
        assert all(map(np.array_equal, found[2], own))
        assert found[3] == 1
