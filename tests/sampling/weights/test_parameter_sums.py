"""Sums over an engine's tensors, however they were loaded; tests/sampling/test_verify.py covers vLLM's tensors."""

from types import SimpleNamespace

import pytest
import torch
from test_parallel import HIDDEN, MANIFEST, Half

from vectorlm.errors import ChecksumMismatch, WeightMismatch
from vectorlm.sampling.weights.plan import TensorSpec
from vectorlm.sampling.weights.receive import parameter_sums, require_same_weights, tensor_sum

SHAPES = {"embed_tokens.weight": (6, 4), "up.weight": (8, 4), "up.bias": (8,)}


class Engine(torch.nn.Module):
    """A model with a tied head in separate memory."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=True)
        self.embed_tokens, self.up = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 8)
        self.lm_head = torch.nn.Linear(4, 6, bias=False)

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)


def loaded(tensors):
    """Return an engine with these tensors."""
    engine = Engine()
    engine.load_weights(tensors.items())
    engine.lm_head.load_state_dict(engine.embed_tokens.state_dict())
    return engine


def stale_head(engine):
    engine.lm_head.weight.data[5, 3] += 1


def stale_bias(engine):
    engine.up.bias.data.zero_()


def rounded(engine):
    engine.up.weight.data.copy_(engine.up.weight.bfloat16().float())


@pytest.mark.parametrize(
    ("spoil", "unsent", "text"),
    [
        (stale_head, None, r"no tensor fills these parameters: \['lm_head.weight'\]"),
        (stale_bias, None, r"1 of 3 tensors differ: \['up.bias'\]"),
        (None, "up.bias", r"no tensor fills these parameters: \['up.bias'\]"),
        (rounded, None, r"1 of 3 tensors differ: \['up.weight'\]"),
        (torch.nn.Module.bfloat16, None, None),
        (None, None, None),
    ],
)
def test_what_an_engine_holds_otherwise_is_found_by_name(spoil, unsent, text):
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    engine = loaded(tensors)
    if spoil is not None:
        spoil(engine)
    manifest = [TensorSpec(name, shape) for name, shape in SHAPES.items() if name != unsent]

    def check():
        return require_same_weights(
            manifest, lambda name, dtype: tensor_sum(tensors[name], dtype), [parameter_sums(engine, manifest)]
        )

    if text is None:
        assert check() == dict.fromkeys(SHAPES, str(engine.up.weight.dtype).removeprefix("torch."))
    else:
        with pytest.raises(ChecksumMismatch, match=text):
            check()


def test_workers_that_hold_slices_are_summed_up_and_another_model_is_refused():
    halves = [Half(worker) for worker in range(2)]
    tensors = {spec.name: torch.randn(spec.shape) for spec in MANIFEST}
    for half in halves:
        half.load_weights(tensors.items())

    def expected(name, dtype):
        return tensor_sum(tensors[name], dtype)

    assert (
        require_same_weights(MANIFEST, expected, [parameter_sums(half, MANIFEST) for half in halves]).keys()
        == tensors.keys()
    )
    halves[1].down.data[4, 2] = 0
    halves[0].key.data[0, 0] = 0
    with pytest.raises(ChecksumMismatch, match=r"2 of 8 .*\['down', 'key'\]"):
        require_same_weights(MANIFEST, expected, [parameter_sums(half, MANIFEST) for half in halves])
    with pytest.raises(WeightMismatch, match=r"sends .tabel. .* rejects"):
        parameter_sums(halves[0], [TensorSpec("tabel", (6, HIDDEN))])
