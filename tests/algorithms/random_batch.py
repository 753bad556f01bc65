"""Random rows of tokens for the tests of the algorithms, in float64."""

import torch


def random_batch(seed=0, num_rows=5, length=7):
    """Return log-probabilities of two policies, advantages and a mask with gaps and one empty row."""
    generator = torch.Generator().manual_seed(seed)

    def draw():
        return torch.randn(num_rows, length, generator=generator, dtype=torch.float64)

    policy, old, advantages = -1 + 0.3 * draw(), -1 + 0.3 * draw(), draw()
    mask = torch.rand(num_rows, length, generator=generator) < 0.7
    mask[-1] = False
    return policy.requires_grad_(), old, advantages, mask
