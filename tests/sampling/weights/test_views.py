"""Views of a parameter: the parameter keeps its memory, and every view follows an update."""

import pytest
import torch
from receivers_here import receivers_of, send

from vectorlm.sampling.weights.plan import BASE, TensorSpec

MANIFEST = [TensorSpec("table", (4, 3)), TensorSpec("scale", (5,))]


class Layer(torch.nn.Module):
    """A layer that computes with a parameter, and with a view that `keep` makes when the model is built."""

    def __init__(self, keep):
        super().__init__()
        self.table, self.scale = torch.nn.Parameter(torch.zeros(4, 3)), torch.nn.Parameter(torch.zeros(5))
        self.read = keep(self)

    def load_weights(self, weights):
        for name, tensor in weights:
            getattr(self, name).data.copy_(tensor)


def as_a_buffer(layer):
    layer.register_buffer("rows", layer.table.data.view(2, 6), persistent=False)
    return lambda: layer.rows


def as_an_attribute(layer):
    layer.rows = layer.table.data[:2]
    return lambda: layer.rows


def in_a_list(layer):
    layer.parts = [{"kernel": layer.table.data[:2]}]
    return lambda: layer.parts[0]["kernel"]


def in_a_function(layer):
    rows = layer.table.detach()
    return lambda: rows


def as_nothing(layer):
    return lambda: layer.table


def update(receivers, path=None):
    layout = receivers.connect(MANIFEST, path, BASE)
    sent, sums = send(layout)
    receivers.load(0, sums, [BASE])
    return layout.num_copied_bytes, sent["table"].flatten()


@pytest.mark.parametrize(
    "keep",
    [as_a_buffer, as_an_attribute, in_a_list, in_a_function, as_nothing],
    ids=lambda keep: keep.__name__,
)
def test_every_view_of_a_parameter_follows_each_update(keep):
    layer = Layer(keep)
    receivers = receivers_of(layer)
    for _ in range(2):  # In the second iteration, a new arena replaces the first.
        copied, sent = update(receivers)
        seen = layer.read().flatten().clone()
        assert torch.equal(seen, sent[: len(seen)])
        assert copied == (0 if keep is as_nothing else layer.table.nbytes)


def test_a_view_that_is_made_between_two_arenas_follows_the_second():
    layer = Layer(as_nothing)
    receivers = receivers_of(layer)
    assert update(receivers)[0] == 0
    transposed = layer.table.data.t()
    copied, sent = update(receivers)
    assert torch.equal(transposed.t().flatten(), sent)
    assert copied > 0
