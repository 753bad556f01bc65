"""Names of the trainer's tensors in the checkpoint, and advice if names do not match."""

import warnings

import pytest
import torch
from kit.families import FAMILIES, save_family
from kit.rank_processes import on_ranks
from transformers import AutoModelForCausalLM

from vectorlm.errors import WeightMismatch
from vectorlm.sampling.weights.model_tensors import trainer_tensors
from vectorlm.sampling.weights.module_source import checkpoint_pieces, manifest_of, warn_of_rounded_positions
from vectorlm.sampling.weights.plan import Piece, Slot, TensorSpec, naming_advice, require_same
from vectorlm.sampling.weights.record import record_loading

ENGINE = [
    "model.embed_tokens.weight",
    "model.layers.0.qkv_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
]
MODEL = ["model.embed_tokens.weight", "model.layers.0.q_proj.weight", "model.norm.weight", "lm_head.weight"]


def test_a_wrapper_is_named_by_the_attribute_that_holds_the_model():
    wrapped = [f"inner.lm.{name}" for name in MODEL]
    for names in (wrapped, [*wrapped, "v_head.weight"]):
        assert "wrapper.inner.lm." in naming_advice(names, ENGINE)


def test_a_part_of_the_model_is_not_enough():
    part = [name.removeprefix("model.") for name in MODEL[:3]]
    assert "'model'" in naming_advice(part, ENGINE)


def test_a_layer_of_ones_own_belongs_beside_the_model():
    advice = naming_advice([*MODEL, "v_head.weight", "v_head.bias"], ENGINE)
    assert "The engine has no ['v_head']" in advice
    assert "pass wrapper.lm" in advice


def test_a_head_that_one_side_ties_is_named():
    for theirs, ours, untied in ((MODEL, MODEL[:3], "trainer"), (MODEL[:3], MODEL, "engine")):
        assert f"the {untied}'s is another tensor" in naming_advice(theirs, ours)


def test_rotary_frequencies_that_were_rounded_are_warned_of(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_rounded_positions(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    with pytest.warns(UserWarning, match="inv_freq"):
        warn_of_rounded_positions(AutoModelForCausalLM.from_pretrained(folder).to(torch.bfloat16))


def test_equal_names_need_no_advice():
    assert naming_advice(MODEL, ENGINE) == naming_advice(MODEL, MODEL) == ""


def test_long_lists_of_names_are_cut_and_the_advice_follows():
    held = [Slot(name, (1,), "float32", 0) for name in MODEL]
    sent = [TensorSpec(f"lm.{name}", (1,)) for name in MODEL] + [
        TensorSpec(f"heads.{index}", (1,)) for index in range(20)
    ]
    with pytest.raises(WeightMismatch, match="and 16 more") as caught:
        require_same(sent, held)
    assert str(caught.value).count("heads.") == 4


def test_what_a_loader_rejects_is_cut_and_the_advice_follows():
    def load(weights):
        raise ValueError(f"There is no module named 'lm'. Those that exist: {ENGINE * 100}")

    parameters = {name: torch.zeros(1) for name in ENGINE}
    with pytest.raises(WeightMismatch, match=r"no module named 'lm'.* … The model is wrapped") as caught:
        record_loading(load, parameters, [TensorSpec(f"lm.{name}", (1,)) for name in MODEL])
    assert len(str(caught.value)) < 500


def test_integers_are_no_weights():
    model = torch.nn.Linear(2, 2)
    model.counts = torch.nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    with pytest.raises(WeightMismatch, match="'counts'"):
        trainer_tensors(model)


def wrap_by_fsdp1(topology, folder):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(WeightMismatch, match="fully_shard"):
        trainer_tensors(FullyShardedDataParallel(model, device_id=torch.device("cpu")))


def test_fsdp1_is_refused_by_its_name(folder):
    on_ranks(1, wrap_by_fsdp1, folder)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_pieces_of_the_parameters_are_the_tensors_of_the_checkpoint(family, tmp_path):
    from safetensors.torch import load_file

    folder = save_family(FAMILIES[family], tmp_path)
    saved = load_file(folder / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    parameters = trainer_tensors(model)
    found = {}
    for spec in manifest_of(model):
        whole = parameters[spec.name].detach()
        for piece in spec.pieces or [Piece(spec.name, spec.shape, whole.stride(), 0)]:
            found[piece.name] = whole.as_strided(piece.shape, piece.stride, piece.offset)
    assert set(found) == set(saved)
    assert all(torch.equal(found[name], saved[name]) for name in saved)


def test_a_plain_module_has_the_names_that_it_has():
    assert checkpoint_pieces(torch.nn.Linear(2, 3), {"weight": (3, 2), "bias": (3,)}) == {}


def test_a_checkpoint_that_joins_parameters_is_refused(tmp_path, monkeypatch):
    from transformers import core_model_loading

    model = AutoModelForCausalLM.from_pretrained(save_family(FAMILIES["Llama"], tmp_path))

    def join(model, tensors):
        return {"both": torch.cat([tensors["model.norm.weight"], tensors["model.norm.weight"]])}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", join)
    with pytest.raises(WeightMismatch, match="'both'"):
        manifest_of(model)
