"""A custom algorithm with a median baseline. In a config: ``rl.algorithm: examples/my_algorithm.py:MEDIAN``."""

from vectorlm.algorithms.policy_loss import reinforce_policy_loss
from vectorlm.algorithms.settings import TokenSettings
from vectorlm.algorithms.spec import AlgorithmSpec

MEDIAN = AlgorithmSpec(
    name="median",
    advantages=lambda scores, hparams: scores.spread(scores.rewards - scores.rewards.nanmedian()),
    loss=lambda inputs, hparams: reinforce_policy_loss(inputs.policy_logprobs, inputs.advantages),
    settings=TokenSettings(reduction="sequence_mean_token_sum"),
    scales_with_advantage=True,
    sums_turns=True,
)
