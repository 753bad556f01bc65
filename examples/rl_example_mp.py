r"""Reinforcement learning on several ranks, on completions that vLLM samples with the weights being trained.

python examples/rl_example_mp.py --yaml_path configs/countdown_grpo.yaml --world_size 2

The arguments are those of llama_example_mp.py; the section `rl` of the config names the algorithm and the rewards.
"""

import argparse
import sys

import vectorlm
from vectorlm.config import add_config_arguments, add_node_arguments, check_config, config_from_arguments
from vectorlm.errors import ConfigError, VectorLMError
from vectorlm.reinforce import reinforce
from vectorlm.rewards.registry import reward_names
from vectorlm.rl.check import check_rl


def main() -> None:
    """Check the config, then train on every rank."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    add_config_arguments(parser)
    add_node_arguments(parser)
    args = parser.parse_args()
    topology = vectorlm.Topology.from_environment()
    world_size, nnodes = max(args.world_size, topology.world_size), max(args.nnodes, topology.num_nodes)
    try:
        config = config_from_arguments(args)
        check_config(config, world_size, reward_names(), nnodes)
        if config.rl is None:
            raise ConfigError(
                f"{args.yaml_path} has no section 'rl': llama_example_mp.py fine-tunes on text."
            )
        check_rl(config)
        vectorlm.launch(
            reinforce,
            config,
            world_size=args.world_size,
            nnodes=args.nnodes,
            node_rank=args.node_rank,
            rdzv_endpoint=args.rdzv_endpoint,
        )
    except VectorLMError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        print("interrupted; with checkpoints, the same command goes on from the last one", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
