"""Random rows of tokens for the tests of the algorithms, in float64."""

import torch


def random_batch():
    """Return log-probabilities of two policies, advantages and a mask with gaps and one empty row."""
    generator = torch.Generator().manual_seed(0)

    def draw():
        return torch.randn(5, 7, generator=generator, dtype=torch.float64)

    policy, old, advantages = -1 + 0.3 * draw(), -1 + 0.3 * draw(), draw()
    mask = torch.rand(5, 7, generator=generator) < 0.7
    mask[-1] = False
    return policy.requires_grad_(), old, advantages, mask


def places(*tensors):
    """Yield the numbers of several tensors of one shape, position by position."""
    return zip(*(tensor.flatten().tolist() for tensor in tensors), strict=True)
