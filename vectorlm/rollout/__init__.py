"""Rollouts: completions sampled in groups, and the batches that are trained on."""
