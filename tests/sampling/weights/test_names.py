import pytest
import torch
from kit.families import FAMILIES, save_family
from transformers import AutoModelForCausalLM

from vectorlm.errors import WeightMismatch
from vectorlm.sampling.weights.module_source import checkpoint_pieces, manifest_of
from vectorlm.sampling.weights.plan import Piece


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_pieces_of_the_parameters_are_the_tensors_of_the_checkpoint(family, tmp_path):
    from safetensors.torch import load_file

    folder = save_family(FAMILIES[family], tmp_path)
    saved = load_file(folder / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    parameters = dict(model.named_parameters())
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
