import math

import torch

from vectorlm.train.loop import next_tokens, token_losses


def test_each_position_predicts_the_label_after_it():
    labels = torch.tensor([[-100, 5, 6, 7]])
    assert next_tokens(labels, -100).tolist() == [[5, 6, 7, -100]]
    assert labels.tolist() == [[-100, 5, 6, 7]]


def test_token_losses_are_minus_log_probabilities_and_zero_where_ignored():
    # softmax of (0, ln 3) is (1/4, 3/4)
    logits = torch.tensor([[[0.0, math.log(3)]] * 3])
    losses = token_losses(logits, torch.tensor([[1, 0, -100]]), -100)
    torch.testing.assert_close(losses, torch.tensor([[-math.log(0.75), -math.log(0.25), 0.0]]))


def test_token_losses_of_bf16_logits_are_computed_in_fp32():
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.tensor([[1, 2, 3], [4, 5, 6]])
    expected = -logits.double().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(token_losses(logits, targets, -100).double(), expected, rtol=1e-6, atol=1e-6)


def test_a_row_without_targets_has_loss_and_gradient_zero():
    logits = torch.randn(1, 3, 5, requires_grad=True)
    token_losses(logits, torch.full((1, 3), -100), -100).sum().backward()
    assert logits.grad.abs().max() == 0
