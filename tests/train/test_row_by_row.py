"""Recurrent layers in packed passes: no state crosses rows, and kernels that read row starts get all rows at a time."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from kit.families import RECURRENT, save_family
from kit.rank_processes import on_ranks
from test_packing import (
    TEMPERATURE,
    assert_alike,
    assert_rows_say_the_same,
    both_ways,
    random_rows,
    values_and_gradient,
)
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_next import modeling_qwen3_next

from vectorlm.rl.models import Critic, disable_dropout, load_critic
from vectorlm.train import language_model
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.load import load_model
from vectorlm.train.row_by_row import RowByRow
from vectorlm.train.settings import ModelSettings


def layers_of(model):
    return [module.row_by_row for module in model.modules() if hasattr(module, "row_by_row")]


def load(name, folder):
    model = disable_dropout(load_model(save_family(RECURRENT[name], folder)))
    with torch.no_grad():
        for item in model.parameters():
            item.mul_(3 if item.dim() > 1 else 1)
    return model


def test_a_hybrid_of_linear_attention_says_what_its_rows_say_one_by_one(tmp_path):
    assert_rows_say_the_same("Qwen3-Next", tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "LFM2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name, family in RECURRENT.items()
            if name != "LFM2"
            and not {"num_experts", "n_routed_experts"} & {*family.settings}
            and not family.settings.get("num_local_experts")
        ),
    ],
)
def test_no_row_changes_a_bit_of_another(name, tmp_path):
    """Families with experts are excluded, because experts round differently if they get other tokens."""
    model, rows = load(name, tmp_path), random_rows()
    computes = LanguageModel(model, TEMPERATURE)
    assert computes.packs
    assert layers_of(model)
    before = computes.logprobs(rows)
    for row in range(len(rows.input_ids)):
        changed = replace(rows, input_ids=rows.input_ids.clone())
        # Changes after the common beginnings keep the layout.
        changed.input_ids[row, 12:] = (changed.input_ids[row, 12:] + 5) % 48
        found = computes.logprobs(changed)
        others = torch.arange(len(found)) != row
        assert torch.equal(found[others], before[others])
        assert not torch.equal(found[row], before[row]) or not rows.is_asked[row, 12:].any()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.25)])
def test_the_trial_sees_a_state_that_leaks_although_values_hardly_change(
    dtype, tolerance, tmp_path, monkeypatch
):
    monkeypatch.setattr(RowByRow, "_take", lambda *_: None)
    model = load_model(save_family(RECURRENT["LFM2"], tmp_path), dtype=dtype)
    why = LanguageModel(model).why_padded
    assert why.startswith("its packed rows would change each other by")
    assert float(why.rpartition(" ")[2]) < tolerance


def reading_numbers(compute):
    """Return a convolution that reads each token's row number, like causal-conv1d's kernel."""

    def convolve(x, weight, bias=None, activation=None, seq_idx=None, **_):
        run = partial(compute, weight=weight, bias=bias, activation=activation)
        if seq_idx is None:
            return run(x)
        assert (seq_idx.dtype, seq_idx.shape) == (torch.int32, (1, x.shape[2]))
        lengths = seq_idx[0].bincount().tolist()
        return torch.cat([run(piece) for piece in x.split(lengths, dim=2)], dim=2)

    return convolve


def reading_borders(compute):
    """Return a delta rule that reads the starts of rows, like fla's kernel."""

    def attend(*heads, g, beta, cu_seqlens=None, **options):
        if cu_seqlens is None:
            return compute(*heads, g=g, beta=beta, **options)
        lengths = cu_seqlens.diff().tolist()
        pieces = zip(*(x.split(lengths, dim=1) for x in (*heads, g, beta)), strict=True)
        found = [compute(*piece, g=g, beta=beta, **options)[0] for *piece, g, beta in pieces]
        return torch.cat(found, dim=1), None

    return attend


@pytest.mark.parametrize("name", ["LFM2", "Qwen3-Next"])
def test_kernels_that_read_where_rows_start_get_all_rows_in_one_call(name, tmp_path, monkeypatch):
    model, rows = load(name, tmp_path), random_rows()
    expected = values_and_gradient(model, rows, LanguageModel(model, TEMPERATURE))
    assert not any(item.in_one_call for item in layers_of(model))
    for module in (modeling_lfm2, modeling_qwen3_next):
        monkeypatch.setattr(module, "causal_conv1d_fn", reading_numbers(module.causal_conv1d_fn))
    delta_rule = modeling_qwen3_next.torch_chunk_gated_delta_rule
    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", reading_borders(delta_rule))
    model = load(name, tmp_path)
    computes = LanguageModel(model, TEMPERATURE)
    assert computes.packs
    assert all(item.in_one_call for item in layers_of(model))
    assert_alike(values_and_gradient(model, rows, computes), expected, 1e-5)


def test_a_model_that_cannot_be_packed_stays_as_it_was(tmp_path, monkeypatch):
    model = load("LFM2", tmp_path)
    monkeypatch.setattr(language_model, "_head", lambda causal, layer: lambda states: 2 * layer(states))
    assert "off by" in LanguageModel(model).why_padded
    assert not layers_of(model)
    assert model.training
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("packs", [True, False])
def test_a_critic_computes_row_by_row_what_the_policy_does(packs, tmp_path):
    policy = LanguageModel(load("Qwen3-Next", tmp_path), packs=packs)
    model = load_critic(str(tmp_path), lambda load: load(False))
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(1))
    rows = random_rows()
    critic = Critic(model, policy)
    assert bool(layers_of(model)) is packs
    alone = torch.zeros(rows.input_ids.shape)
    for row, length in enumerate(rows.attention_mask.sum(dim=1).tolist()):
        hidden = model.model(input_ids=rows.input_ids[row : row + 1, :length]).last_hidden_state
        alone[row, 1:length] = model.score(hidden)[0, :-1, 0]
    torch.testing.assert_close(critic(rows), alone.where(rows.is_asked, 0), rtol=1e-5, atol=1e-5)


def hybrids(topology, folders):
    settings = ModelSettings(use_activation_checkpointing=True)
    return [both_ways(topology, folder, settings, False) for folder in folders]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_sharded_hybrids_say_the_same_packed_and_padded(world_size, tmp_path):
    """The backward pass recomputes blocks after another pass has started."""
    folders = [save_family(family, tmp_path / name) for name, family in RECURRENT.items()]
    for found in on_ranks(world_size, hybrids, folders):
        for packed, padded in found:
            assert_alike(packed, padded, 1e-5)


@pytest.mark.long
def test_compiled_blocks_call_recurrent_layers_row_by_row(tmp_path):
    model, rows = load("LFM2", tmp_path), random_rows()
    expected = values_and_gradient(model, rows, LanguageModel(model, TEMPERATURE))
    for block in model.model.layers:
        block.forward = torch.compile(block.forward, dynamic=True, backend="eager")
    computes = LanguageModel(model, TEMPERATURE)
    assert computes.packs
    assert_alike(values_and_gradient(model, rows, computes), expected, 1e-5)
