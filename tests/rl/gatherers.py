"""A gatherer of scripted rollouts, for the tests of what feeds the trainer."""

from vectorlm.data.questions import Question
from vectorlm.ranks.topology import Topology
from vectorlm.rl.gather import Gatherer
from vectorlm.rl.scorer import Scorer
from vectorlm.rollout.collect import Collector
from vectorlm.rollout.prompts import PromptOrder


def gatherer(engine, reward, *, group_size=2, num_groups=3, num_questions=20, collector=None, **more):
    questions = [Question(f"q{index}", {"index": index}) for index in range(num_questions)]
    return Gatherer(
        collector=Collector(
            engine=engine,
            group_size=group_size,
            sampling_params={"temperature": 1.0, "max_tokens": 10},
            seed=5,
            max_model_len=100,
            encode=lambda text: list(map(ord, text)),
            **(collector or {}),
        ),
        order=PromptOrder(questions, 0),
        scorer=Scorer(functions={"mine": reward}, weights={"mine": 1.0}, topology=Topology()),
        num_groups=num_groups,
        **more,
    )
