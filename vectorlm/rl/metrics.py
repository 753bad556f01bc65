"""What a step's rollouts look like in numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vectorlm.algorithms.groups import is_constant
from vectorlm.rl.gather import Gathered
from vectorlm.rl.update import TrainBatch
from vectorlm.rollout.rollout import Rollout

METRICS = {
    "reward/mean": "Mean reward of all sampled completions, dropped groups and penalties for length included.",
    "reward/std": "Standard deviation of the reward over the batch.",
    "reward/min": "Smallest reward.",
    "reward/max": "Largest reward.",
    "reward/<name>/mean": "Mean of one reward function, over the completions that it scored.",
    "reward/<name>/std": "Standard deviation of one reward function.",
    "reward/group_std": "Mean over groups of the reward's standard deviation within the group.",
    "reward/constant_groups": "Share of groups whose rewards are all the same; they teach nothing by themselves.",
    "reward/unscored": "Completions without a reward.",
    "reward/errors": "Calls of reward functions that raised or ran out of time.",
    "rollout/sampled_groups": "Groups that were sampled, those that dynamic sampling dropped included.",
    "rollout/groups": "Groups that were kept; `rollouts.jsonl` holds these.",
    "rollout/turns_mean": "Turns of the policy in a rollout.",
    "prompt/length_mean": "Tokens of the prompts.",
    "prompt/length_min": "Tokens of the shortest prompt.",
    "prompt/length_max": "Tokens of the longest prompt.",
    "completion/length_mean": "Tokens that the policy chose in a rollout.",
    "completion/length_min": "The fewest of them.",
    "completion/length_max": "The most of them.",
    "completion/terminated_length_mean": "Tokens of the completions that ended by themselves.",
    "completion/terminated_length_min": "The fewest of them.",
    "completion/terminated_length_max": "The most of them.",
    "completion/truncated": "Share of completions that were cut off.",
    "rollout/replayed": "Share of completions that come from a file.",
    "staleness/token_max": "Steps by which the weights that sampled a token lag behind those being trained: the most.",
    "staleness/token_mean": "The same, mean over the tokens that the policy chose.",
    "staleness/sequence_max": "Steps between the first and the last weights that sampled one completion: the most.",
    "staleness/mixed_sequences": "Share of completions that several weights have sampled.",
    "queue/in_flight": "Groups that the engine goes on with while the ranks train.",
    "queue/in_flight_lag_max": "Steps since the oldest of them was begun.",
    "queue/finished": "Finished groups that wait for a later step.",
    "queue/dropped": "Groups that were too late for their last step, and were dropped.",
    "reward/trained_mean": "Mean reward of what is trained on, less the KL penalty where that is in the reward.",
    "advantage/mean": "Mean advantage over the trained tokens.",
    "advantage/std": "Its standard deviation.",
    "advantage/min": "The smallest.",
    "advantage/max": "The largest.",
    "return/mean": "Mean of what the critic learns.",
    "return/min": "The smallest.",
    "return/max": "The largest.",
    "value/mean": "Mean of the critic's values at the rollout.",
    "value/min": "The smallest.",
    "value/max": "The largest.",
    "value/explained_variance": "1 - var(return - value) / var(return); 1 is a perfect critic.",
    "sampler/logprob_gap_mean": "Mean absolute difference of the trainer's and the engine's log-probabilities.",
    "sampler/logprob_gap_max": "The largest.",
    "correction/ratio_mean": "Mean ratio trainer / engine of a token's probability, before any bound.",
    "correction/ratio_min": "The smallest.",
    "correction/ratio_max": "The largest.",
    "correction/out_of_band": "Share of tokens whose ratio is beyond `band_low` or `band_high`.",
    "correction/out_of_band_sequences": "The same of completions, by the product of their tokens' ratios.",
    "correction/ess": "Effective sample size as a share, 1 / mean((r / mean r)^2) over tokens.",
    "correction/ess_sequences": "The same over completions.",
    "correction/chi2": "mean(r^2) - 1 over tokens.",
    "correction/chi2_sequences": "The same over completions.",
    "correction/k1": "Estimate of KL(engine || trainer) per token, -mean log r.",
    "correction/k3": "Another one that is never negative, mean(r - 1 - log r).",
    "correction/ppl_ratio": "Perplexity of the trainer over that of the engine, a geometric mean over completions.",
    "correction/pearson": "Correlation of the two probabilities.",
    "correction/unknown": "Tokens whose ratio is not a number.",
    "correction/rejected_tokens": "Share of tokens that a mask, gate or veto left out.",
    "correction/rejected_sequences": "Share of completions that lost all their tokens.",
    "correction/weight_mean": "Mean weight after the bounds.",
    "correction/weight_min": "The smallest.",
    "correction/weight_max": "The largest.",
    "correction/weight_ess": "Effective sample size of the weights after the bounds, as a share of what was kept.",
    "policy/loss": "The loss of an optimizer step, penalties included; of all `policy/` the mean over the steps.",
    "policy/kl_loss": "The KL penalty in the loss, before its weight.",
    "policy/entropy": "Mean entropy of the distributions that the tokens were drawn from, in nats.",
    "policy/kl": "Divergence from the policy of the rollout (k3), mean over tokens.",
    "policy/ratio_mean": "Mean ratio of the policy to that of the rollout.",
    "policy/ratio_max": "The largest.",
    "policy/clip_low": "Share of tokens that the lower bound of the ratio keeps from learning, if any can.",
    "policy/clip_high": "Share of tokens that the upper bound keeps from learning.",
    "policy/clip_fraction": "Both together.",
    "preference/chosen_reward": "Implicit reward of the better completions, beta log(policy / reference).",
    "preference/rejected_reward": "The same of the worse ones.",
    "preference/margin": "The first less the second.",
    "preference/accuracy": "Share of pairs whose margin is above 0.",
    "preference/chosen_logprob": "Log-probability of the better completions.",
    "preference/rejected_logprob": "The same of the worse ones.",
    "balance/rank_tokens_mean": "Tokens that a rank trains on in an optimizer step, padding included, mean over ranks.",
    "balance/rank_tokens_max": "The same of the rank with the most.",
    "policy/grad_norm": "Norm of the gradient before it is clipped.",
    "policy/learning_rate": "Learning rate of the policy.",
    "policy/optimizer_steps": "Optimizer steps of the policy that were made on the batch.",
    "policy/stopped_early": "1 when the divergence from the rollout's policy ended the batch early.",
    "reference/kl": "Divergence from the reference (k1), mean over tokens.",
    "reference/kl_coef": "Weight of the KL penalty.",
    "critic/loss": "The critic's loss.",
    "critic/clip_fraction": "Share of values that moved further than the clip.",
    "critic/grad_norm": "Norm of the critic's gradient before it is clipped.",
    "critic/learning_rate": "Learning rate of the critic.",
    "time/step_s": "Seconds of the whole step.",
    "time/publish_s": "Seconds of the hot swap.",
    "time/stall_s": "Seconds of it for which completions under way stood still.",
    "time/generate_s": "Seconds of sampling; of an asynchronous run, those that the step waited for it.",
    "time/score_s": "Seconds of the rewards.",
    "time/assess_s": "Seconds of the forward passes for old, reference and critic, and of the advantages.",
    "time/update_s": "Seconds of the optimizer steps.",
    "perf/tokens_seen": "Tokens of prompts and completions that the whole run has sampled until now.",
    "perf/tokens_per_s": "Tokens of prompts and completions per second of the step.",
    "perf/generated_tokens_per_s": "Sampled tokens per second of sampling.",
    "perf/engine_idle": "Share of the time since the last swap in which the engine computed nothing.",
    "perf/trainer_idle": "Share of the step in which the trainer waited for completions.",
    "perf/stall": "Share of the step in which completions under way stood still for new weights.",
    "perf/trained_tokens": "Tokens of prompts and completions that went through the optimizer steps.",
    "perf/model_flops_per_s": "6 operations per weight and trained token, of policy and critic, per second of update.",
    "perf/mfu": "The same as a share of what all devices could do, with `device_peak_tflops`.",
    "perf/device_memory_max_bytes": "The most device memory that torch has held on rank 0; CUDA alone.",
    "eval/accuracy": "Share of held-out questions whose answer has a reward of 1.",
}
"""Every metric of a run, and what it says; ``<name>`` stands for each reward."""


def rollout_metrics(gathered: Gathered, step: int) -> dict[str, float]:
    """Describe what was sampled and what it was worth.

    Args:
        gathered: The rollouts of the step.
        step: The version that is trained now.
    """
    metrics = {"rollout/groups": float(len(gathered.groups))}
    kept = [rollout for group in gathered.groups for rollout in group if not rollout.is_replayed]
    # What dynamic sampling drops is not trained on, but it was sampled.
    gathered = gathered.sampled or gathered
    metrics |= {
        "reward/unscored": float(gathered.rewards.isnan().sum()),
        "reward/errors": float(gathered.num_errors),
        "rollout/sampled_groups": float(gathered.num_sampled_groups),
    }
    if not gathered.groups:
        return metrics
    rollouts = [rollout for group in gathered.groups for rollout in group]
    metrics |= _spread("reward", gathered.rewards, "mean", "std", "min", "max")
    for name, values in gathered.parts.items():
        metrics |= _spread(f"reward/{name}", values, "mean", "std")
    rewards = gathered.rewards
    if rewards.shape[1] > 1:
        is_same = is_constant(rewards, ~rewards.isnan())
        scored = torch.where(rewards.isnan(), rewards.nanmean(dim=1, keepdim=True), rewards)
        # Rounding leaves equal rewards a little apart from their mean.
        within = torch.where(is_same[:, 0], 0.0, scored.std(dim=1))
        metrics["reward/group_std"] = within.mean().item()
        metrics["reward/constant_groups"] = is_same.float().mean().item()
    lengths = torch.tensor([float(each.num_policy_tokens) for each in rollouts])
    is_cut = torch.tensor([each.is_truncated for each in rollouts])
    metrics |= _spread(
        "prompt/length", torch.tensor([float(len(each.prompt_token_ids)) for each in rollouts])
    )
    metrics |= _spread("completion/length", lengths)
    metrics |= _spread("completion/terminated_length", lengths[~is_cut])
    metrics["completion/truncated"] = is_cut.float().mean().item()
    metrics["rollout/turns_mean"] = sum(each.num_turns for each in rollouts) / len(rollouts)
    fresh = [each for each in rollouts if not each.is_replayed]
    metrics["rollout/replayed"] = 1 - len(fresh) / len(rollouts)
    return metrics | _staleness(kept, step)


def _staleness(rollouts: Sequence[Rollout], step: int) -> dict[str, float]:
    """Describe how old the tokens are that are trained on."""
    versions = [[version for version in each.versions if version >= 0] for each in rollouts]
    versions = [each for each in versions if each]
    if not versions:
        return {}
    lags = [step - version for each in versions for version in each]
    spans = [max(each) - min(each) for each in versions]
    return {
        "staleness/token_max": float(max(lags)),
        "staleness/token_mean": sum(lags) / len(lags),
        "staleness/sequence_max": float(max(spans)),
        "staleness/mixed_sequences": sum(span > 0 for span in spans) / len(spans),
    }


def batch_metrics(batch: TrainBatch) -> dict[str, float]:
    """Describe what is trained on."""
    mask = batch.rows.mask
    metrics = {"reward/trained_mean": batch.rewards[batch.rows.valid].mean().item()}
    metrics |= _spread("advantage", batch.advantages[mask], "mean", "std", "min", "max", separator="/")
    if batch.returns is not None and batch.values is not None:
        returns, values = batch.returns[mask], batch.values[mask]
        metrics |= _spread("return", returns, separator="/") | _spread("value", values, separator="/")
        spread = returns.var(correction=0)
        unexplained = (returns - values).var(correction=0) / spread if spread > 0 else torch.tensor(1.0)
        metrics["value/explained_variance"] = 1.0 - unexplained.item()
    return metrics


def _spread(name: str, values: torch.Tensor, *which: str, separator: str | None = None) -> dict[str, float]:
    """Return mean, min and max of the numbers that are there; nothing where there are none."""
    numbers = values[~values.isnan()].double()
    if not len(numbers):
        return {}
    found = {
        "mean": numbers.mean(),
        "std": numbers.std(correction=0),
        "min": numbers.min(),
        "max": numbers.max(),
    }
    between = separator or ("/" if "std" in which else "_")
    return {f"{name}{between}{each}": found[each].item() for each in which or ("mean", "min", "max")}


def render_metrics() -> str:
    """Return docs/metrics.md."""
    rows = "\n".join(f"| `{name}` | {text} |" for name, text in METRICS.items())
    return f"{_INTRODUCTION}\n| Metric | Meaning |\n|---|---|\n{rows}\n"


_INTRODUCTION = """# Metrics of reinforcement learning

Each line of `metrics.jsonl` holds those that its step has; `rollouts.jsonl` holds the completions themselves, with
reward, rewards by function, advantage, version and finish reason. Hot swaps add `weights/`, exams `sampler/` and
`eval/`.

This page is made from `vectorlm/rl/metrics.py` by `python -m vectorlm.rl.metrics`.
"""

if __name__ == "__main__":
    print(render_metrics(), end="")
