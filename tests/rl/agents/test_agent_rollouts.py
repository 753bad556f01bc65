"""Agents in a user's own loop: every rank gets its rollouts, sampled from the weights that were loaded last."""

import pytest
from kit.rank_processes import on_ranks
from test_agent import AGENTS

import vectorlm
from vectorlm.errors import RankMismatch, RolloutError
from vectorlm.rl.agents.agent import AgentRollouts


def sample_on_rank(topology, agent, num_engines):
    engine = vectorlm.SamplingEngine(
        "scripted",
        inference="vectorlm.sampling.backends.scripted:Scripted",
        topology=topology,
        channel="inline",
        answers=lambda prompt, version: f" yes{len(prompt)} ",
        data_parallel_size=num_engines,
    )
    with engine, AgentRollouts(engine, agent, max_model_len=500, group_size=2) as agents:
        rows = [{"prompt": "q" * size, "number": size} for size in (1, 2)]
        with pytest.raises(RolloutError, match="no number"):
            agents.sample([{"prompt": "q"}, *rows])
        if topology.world_size > 1:
            with pytest.raises(RankMismatch, match="needs the same arguments on every rank"):
                agents.sample(rows[topology.rank :])
        return [
            [(rollout.text, rollout.turn_rewards) for rollout in group]
            for group in agents.sample(rows) + agents.sample(rows)
        ]


NUMBERED = """
def numbered(url, key, row):
    if "number" not in row:
        raise KeyError("no number")
    once(url, key, row)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "num_engines"), [(1, 1), (2, 1), (2, 2)])
def test_every_rank_gets_the_rollouts_of_an_agent(tmp_path, world_size, num_engines):
    (tmp_path / "agents.py").write_text(AGENTS + NUMBERED)
    for found in on_ranks(world_size, sample_on_rank, f"{tmp_path}/agents.py:numbered", num_engines):
        assert found == [[(" yes1 ", ())] * 2, [(" yes2 ", ())] * 2] * 2


@pytest.mark.parametrize(("given", "text"), [(None, " ye"), ({}, " yes1 "), ({"max_tokens": 5}, " yes1")])
def test_agents_sample_as_the_engine_does_where_nothing_else_is_said(tmp_path, given, text):
    (tmp_path / "agents.py").write_text(AGENTS)
    agent = f"{tmp_path}/agents.py:once"
    own = {"max_tokens": 3, "logprobs": None}
    engine = vectorlm.FakeEngine(lambda prompt, version: f" yes{len(prompt)} ", sampling_params=own)
    with engine, AgentRollouts(engine, agent, max_model_len=500, sampling_params=given) as agents:
        (((rollout,)),) = agents.sample([{"prompt": "q"}])
    assert rollout.text == text
    with (
        vectorlm.FakeEngine("a", sampling_params=[own]) as engine,
        pytest.raises(TypeError, match="a mapping"),
    ):
        AgentRollouts(engine, agent, max_model_len=500)
