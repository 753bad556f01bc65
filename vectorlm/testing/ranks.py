"""What an engine owes to several ranks; with one rank these hold too, and prove little."""

from __future__ import annotations

from typing import Any

from vectorlm.errors import RankMismatch
from vectorlm.testing.subject import GREEDY, PROMPTS, SAMPLED, Subject, raises


def every_rank_gets_the_same_answers(subject: Subject) -> None:
    """Even where nothing but chance decides them."""
    answers = subject.engine.sample(PROMPTS, {**SAMPLED, "seed": None, "n": 2, "logprobs": 0})
    assert all(theirs == answers for theirs in _from_all(subject, answers))


def every_rank_gets_the_answers_to_its_own_prompts(subject: Subject) -> None:
    """Rank r brings r prompts, or the last rank none: shares may be uneven and empty."""
    rank, world_size = subject.topology.rank, subject.topology.world_size
    for num_prompts in (rank, world_size - 1 - rank, 3):
        prompts = [[2 + rank, 3 + index] for index in range(num_prompts)]
        answers = subject.engine.sample_sharded(prompts, GREEDY)
        assert [each[0].prompt_token_ids for each in answers] == [tuple(prompt) for prompt in prompts]
        together = [prompt for shard in _from_all(subject, prompts) for prompt in shard]
        expected = {tuple(each[0].prompt_token_ids): each for each in subject.engine.sample(together, GREEDY)}
        assert answers == [expected[tuple(prompt)] for prompt in prompts]


def every_rank_samples_its_own_prompts_in_its_own_way(subject: Subject) -> None:
    """The parameters of `sample_sharded` are the rank's own too, one for all or one each."""
    num_tokens = 2 + subject.topology.rank
    short, long = ({**GREEDY, "max_tokens": number} for number in (num_tokens, 8))
    answers = subject.engine.sample_sharded([[2], [3]], [short, long])
    assert len(answers[0][0].token_ids) == num_tokens < len(answers[1][0].token_ids)
    for (completion,) in subject.engine.sample_sharded([[2], [3]], short):
        assert len(completion.token_ids) == num_tokens


def ranks_must_agree_on_the_prompts(subject: Subject) -> None:
    """Told on every rank, with the rank's number; the engine lives on."""
    if subject.topology.world_size == 1:
        return
    mine = [[2, 3 + subject.topology.rank]]
    with raises(RankMismatch, saying="rank 1"):
        subject.engine.sample(mine, GREEDY)
    with raises(RankMismatch, saying="rank 1"):
        subject.engine.submit(mine, GREEDY)
    with raises(RankMismatch, saying="rank 1"):
        subject.engine.sample([[2]], {**GREEDY, "max_tokens": 3 + subject.topology.rank})
    assert len(subject.engine.sample([[2]], GREEDY)) == 1


def _from_all(subject: Subject, mine: Any) -> list[Any]:
    """Return what every rank has, by rank."""
    if subject.topology.world_size == 1:
        return [mine]
    import torch.distributed as dist

    everything: list[Any] = [None] * subject.topology.world_size
    dist.all_gather_object(everything, mine)
    return everything
