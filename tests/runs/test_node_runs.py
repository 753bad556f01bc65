"""Reinforcement learning on two nodes under torchrun, with an engine on each; test_launchers.py covers fine-tuning."""

import pytest
from kit.rl_runs import config_of, numbers, save_files
from kit.sft_runs import ROOT, lines
from kit.two_nodes import TwoNodes

GAMES = """
import os

class Vowels:
    async def step(self, message):
        print("played on node", os.environ["NODE"], flush=True)
        return None if "u" in message["content"] else "abc"
"""


@pytest.mark.slow
def test_reinforcement_learning_with_an_environment_on_two_nodes(tmp_path):
    files, output, scratch = save_files(tmp_path), tmp_path / "run", tmp_path / "scratch"
    scratch.mkdir()
    (files / "games.py").write_text(GAMES)
    config_of(files, output)
    command = [ROOT / "examples/rl_example_mp.py", "--yaml_path", files / "run.yaml"]
    settings = [
        f"rl.environment={files}/games.py:Vowels",
        "evaluation.prompts=null",
        "evaluation.rewards=null",
        "rl.max_steps=2",
        "train_parameters.sharding_strategy=HYBRID_SHARD",
    ]
    command += [word for setting in settings for word in ("--set", setting)]
    outcomes = TwoNodes(command, scratch).outcomes(timeout_s=380)
    texts = [text for _, text in outcomes]
    assert [code for code, _ in outcomes] == [0, 0], "\n".join(texts)
    assert [line["step"] for line in numbers(output)] == [0, 1, 2]
    assert len(lines(output / "rollouts.jsonl")) == 2 * 16
    # Each node has an engine and plays its rollouts.
    assert sorted(path.name for path in output.glob("sampler*.log")) == ["sampler.1.log", "sampler.log"]
    played = (output / "rewards.log").read_text()
    assert "played on node 0" in played
    assert "played on node 1" in played
