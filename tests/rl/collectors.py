"""A collector of scripted rollouts and its engine, for the tests of what samples and scores."""

from vectorlm.ranks.topology import Topology
from vectorlm.rewards.scorer import RewardScorer
from vectorlm.rl.collector import RolloutCollector
from vectorlm.rl.conversation import GroupSampler
from vectorlm.rl.prompts import PromptOrder
from vectorlm.rl.settings import CollectSettings
from vectorlm.types import Completion, PromptRecord


class Answered:
    """A handle whose answers are there."""

    def __init__(self, prompts, answers):
        self.prompts, self.answers, self.is_cancelled = prompts, answers, False

    def result(self):
        return self.answers

    def cancel(self):
        self.is_cancelled = True


class Echo:
    """Answers by script, and keeps what it was asked; tokens are letters.

    `choose` gets the handles in flight at each poll and says which of them finish, all by default.
    """

    def __init__(self, script, choose=list):
        self.script, self.choose, self.calls, self.in_flight = script, choose, [], []

    def submit_many(self, requests):
        handles = [Answered(request[0], self.answers(*request)) for request in requests]
        self.in_flight += handles
        return handles

    def poll(self, timeout_s=0.0):
        finished = self.choose(self.in_flight)
        self.in_flight = [handle for handle in self.in_flight if handle not in finished]
        return finished

    def answers(self, prompts, params):
        self.calls.append((list(prompts), list(params)))
        return [
            [self.completion(prompt, index) for index in range(options["n"])]
            for prompt, options in zip(prompts, params, strict=True)
        ]

    def completion(self, prompt, index):
        text = self.script(prompt, index)
        ids = tuple(map(ord, prompt)) if isinstance(prompt, str) else tuple(prompt)
        reason = "length" if text.endswith("…") else "stop"
        return Completion(ids, tuple(map(ord, text)), (-0.5,) * len(text), (4,) * len(text), text, reason)


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
