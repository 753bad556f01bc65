r"""Train with reinforcement learning on several ranks, on completions that vLLM samples with the policy's weights.

python examples/rl_example_mp.py --yaml_path configs/countdown_grpo.yaml --world_size 2

It takes the arguments of llama_example_mp.py; the section `rl` of the config names the algorithm and the rewards.
"""

from vectorlm.cli.run import run_script

if __name__ == "__main__":
    run_script("rl", __doc__)
