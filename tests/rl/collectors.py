"""A collector of scripted rollouts, for the tests of what samples and scores."""

from vectorlm.dist.topology import Topology
from vectorlm.rewards.scorer import RewardScorer
from vectorlm.rl.collector import RolloutCollector
from vectorlm.rl.conversation import GroupSampler
from vectorlm.rl.prompts import PromptOrder
from vectorlm.rl.settings import CollectSettings
from vectorlm.types import PromptRecord


def make_collector(
    engine,
    reward,
    *,
    group_size=2,
    num_groups=3,
    num_prompts=20,
    max_tokens=10,
    make_environment=None,
    topology=None,
    settings=None,
    **more,
):
    """Return a collector over the prompts q0, q1 …; `settings` changes single settings, `more` the collector."""
    records = [PromptRecord(f"q{index}", {"index": index}) for index in range(num_prompts)]
    topology = topology or Topology()
    return RolloutCollector(
        engine=engine,
        sampler=GroupSampler(
            settings=CollectSettings(
                prompts=tuple(record.prompt for record in records),
                prompts_per_step=num_groups,
                group_size=group_size,
                sampling_params={"max_tokens": max_tokens},
                **(settings or {}),
            ),
            seed=5,
            max_model_len=100,
            encode=lambda text: list(map(ord, text)),
            make_environment=make_environment,
            topology=topology,
        ),
        prompts=PromptOrder(records, 0),
        scorer=RewardScorer(functions={"mine": reward}, weights={"mine": 1.0}, topology=topology),
        **more,
    )
