import pytest
import torch

from vectorlm.errors import ChecksumMismatch, WeightMismatch
from vectorlm.sampling.backends.vllm.pack import check_packed, packable_layers, require_no_latent_attention


class Layer(torch.nn.Module):
    """A linear layer as vLLM's CPU backend has it: `cpu_linear` may hold other weights than `weight`."""

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        packed = weight.clone()
        self.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, packed, bias)


class VocabParallelEmbedding(Layer):
    """vLLM's embedding table goes by this name."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_packed_before_its_weights_changed_is_named_however_small_the_step(dtype):
    model = torch.nn.Sequential(Layer(torch.randn(64, 96).to(dtype)), Layer(torch.randn(8, 64).to(dtype)))
    check_packed(model)
    model[1].weight.mul_(1 + 2 * torch.finfo(dtype).eps)
    with pytest.raises(ChecksumMismatch, match=r"\['1'\]"):
        check_packed(model)


def test_a_nan_is_not_taken_for_agreement():
    model = torch.nn.Sequential(Layer(torch.randn(64, 96)))
    model[0].weight.fill_(torch.nan)
    with pytest.raises(ChecksumMismatch):
        check_packed(model)


def test_one_changed_column_is_found_after_some_updates():
    model = torch.nn.Sequential(Layer(torch.randn(64, 96)))
    model[0].weight[:, 17] += 1e-6

    def is_found(seed):
        try:
            check_packed(model, seed)
        except ChecksumMismatch:
            return True
        return False

    assert any(is_found(seed) for seed in range(60))


def test_an_embedding_table_is_packed_only_where_it_is_the_head():
    model = torch.nn.Module()
    model.embed_tokens = VocabParallelEmbedding(torch.randn(8, 4))
    assert [name for name, _ in packable_layers(model)] == []
    model.lm_head = model.embed_tokens
    assert [name for name, _ in packable_layers(model)] == ["embed_tokens"]


class MLAAttention(torch.nn.Module):
    """vLLM's latent attention goes by this name."""


def test_latent_attention_is_refused_by_name():
    with pytest.raises(WeightMismatch, match="latent attention"):
        require_no_latent_attention(torch.nn.Sequential(MLAAttention()))
