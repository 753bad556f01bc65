"""torch's flash kernel for rows of any length, reimplemented row by row in float64 for devices without the kernel."""

from contextlib import contextmanager
from itertools import pairwise

import torch
from torch.nn.attention.varlen import _varlen_attn, _varlen_attn_backward


@contextmanager
def written_down(device_type, calls=None):
    """Replace torch's two operators on a kind of device by the functions below; note windows and dtypes in `calls`."""
    kernels = _varlen_attn._backend_fns, _varlen_attn_backward._backend_fns
    before = [dict(item) for item in kernels]

    def forward_noted(*arguments):
        if calls is not None:
            calls.append((tuple(arguments[9]), arguments[0].dtype))
        return forward(*arguments)

    _varlen_attn.register_kernel(device_type, forward_noted)
    _varlen_attn_backward.register_kernel(device_type, backward)
    try:
        yield
    finally:
        for mine, others in zip(kernels, before, strict=True):
            mine.pop(device_type, None)
            mine.update(others)


def forward(query, key, value, ends_q, ends_k, max_q, max_k, is_causal, scale, window, enable_gqa, *others):
    """Return the output, float [N, H, D], the log-sums [H, N], and zeros as the random state."""
    assert others in ((), (None, None, None)), others
    check(query, key, value, ends_q, ends_k, max_q, max_k)
    assert is_causal == (list(window) == [-1, 0])
    assert enable_gqa or query.shape[1] == key.shape[1]
    found = torch.empty(query.shape, dtype=query.dtype)
    sums = torch.empty(query.shape[1], query.shape[0])
    for mine, theirs in rows(ends_q, ends_k):
        scores, *_, v = scores_of(query[mine], key[theirs], value[theirs], scale, window)
        found[mine] = (scores.softmax(-1) @ v).transpose(0, 1).to(found)
        sums[:, mine] = scores.logsumexp(-1).to(sums)
    random = torch.zeros(2, dtype=torch.uint64).to(query.device)
    return found.to(query.device), sums.to(query.device), random


def backward(
    grad, query, key, value, found, sums, ends_q, ends_k, max_q, max_k, is_causal, random, scale, window
):
    """Return the gradients of queries, keys and values."""
    check(query, key, value, ends_q, ends_k, max_q, max_k)
    assert grad.dtype == found.dtype == query.dtype
    gradients = [torch.zeros(item.shape, dtype=torch.float64) for item in (query, key, value)]
    for mine, theirs in rows(ends_q, ends_k):
        scores, factor, q, k, v = scores_of(query[mine], key[theirs], value[theirs], scale, window)
        given, probabilities = grad[mine].cpu().double().transpose(0, 1), scores.softmax(-1)
        of_probabilities = given @ v.mT
        of_scores = probabilities * (
            of_probabilities - (of_probabilities * probabilities).sum(-1, keepdim=True)
        )
        for place, gradient, where in (
            (0, of_scores @ k * factor, mine),
            (1, of_scores.mT @ q * factor, theirs),
            (2, probabilities.mT @ given, theirs),
        ):
            heads = gradients[place].shape[1]
            gradients[place][where] += gradient.unflatten(0, (heads, -1)).sum(1).transpose(0, 1)
    return tuple(item.to(query.dtype).to(query.device) for item in gradients)


def rows(ends_q, ends_k):
    """Yield the slices of each row's queries and keys."""
    pairs = [list(pairwise(item)) for item in (ends_q.tolist(), ends_k.tolist())]
    for mine, theirs in zip(*pairs, strict=True):
        yield slice(*mine), slice(*theirs)


def scores_of(query, key, value, scale, window):
    """Return float64 scores [H, q, k] (-inf if masked), the factor, and queries, keys and values of all heads."""
    repeats = query.shape[1] // key.shape[1]
    q = query.cpu().double().transpose(0, 1)
    k, v = (item.cpu().double().transpose(0, 1).repeat_interleave(repeats, 0) for item in (key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    # The last query sees the last key.
    place = torch.arange(len(query))[:, None] + len(key) - len(query)
    other, (left, right) = torch.arange(len(key)), window
    is_seen = (left < 0) | (other >= place - left)
    is_seen = is_seen & ((right < 0) | (other <= place + right))
    return (q @ k.mT * factor).masked_fill(~is_seen, -torch.inf), factor, q, k, v


def check(query, key, value, ends_q, ends_k, max_q, max_k):
    """Refuse arguments that torch's kernel refuses, except for the dtype, or for which it would read out of bounds."""
    assert {item.device for item in (query, key, value, ends_q, ends_k)} == {query.device}
    assert query.dtype == key.dtype == value.dtype
    assert query.shape[2] == key.shape[2] == value.shape[2] <= 256
    assert query.shape[2] % 8 == 0
    assert all(item.stride(-1) == 1 for item in (query, key, value))
    for ends, longest, tensor in ((ends_q, max_q, query), (ends_k, max_k, key)):
        assert ends.dtype == torch.int32
        assert ends.is_contiguous()
        assert ends.diff().max() == longest
        assert int(ends[-1]) == len(tensor)
    assert bool((ends_q.diff() <= ends_k.diff()).all())
