r"""Fine-tune on several ranks while vLLM, holding the weights being trained, answers held-out questions.

python examples/llama_example_mp.py --yaml_path configs/countdown_sft.yaml --world_size 2

On two machines, the same on both but for the index of the machine:

python examples/llama_example_mp.py --yaml_path configs/countdown_sft.yaml --world_size 2 \
  --nnodes 2 --node_rank 0 --rdzv_endpoint machine-0:29400 \
  --set train_parameters.sharding_strategy=HYBRID_SHARD

torchrun starts it as well (torchrun --nnodes 2 --nproc_per_node 1 ...); --world_size and --nnodes are then its own.
"""

import argparse
import sys

import vectorlm
from vectorlm.config import add_config_arguments, add_node_arguments, check_config, config_from_arguments
from vectorlm.errors import VectorLMError
from vectorlm.finetune import finetune
from vectorlm.rewards.registry import reward_names


def main() -> None:
    """Check the config, then train on every rank."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    add_config_arguments(parser)
    add_node_arguments(parser)
    args = parser.parse_args()
    # More than one rank already where torchrun started this process.
    topology = vectorlm.Topology.from_environment()
    world_size, nnodes = max(args.world_size, topology.world_size), max(args.nnodes, topology.num_nodes)
    try:
        config = config_from_arguments(args)
        check_config(config, world_size, reward_names(), nnodes)
        vectorlm.launch(
            finetune,
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
