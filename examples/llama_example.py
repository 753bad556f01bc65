"""Fine-tune under plain torchrun, without sampling.

torchrun --nproc_per_node 2 examples/llama_example.py --yaml_path configs/countdown_sft.yaml
"""

import argparse
import sys
from dataclasses import replace

from vectorlm.cli.arguments import add_config_arguments, config_from_arguments
from vectorlm.errors import ConfigError, VectorLMError
from vectorlm.ranks.topology import Topology
from vectorlm.runs.fine_tuning import finetune
from vectorlm.runs.preflight.local_model import with_download
from vectorlm.train.settings import EvaluationSettings


def main() -> None:
    """Train on the rank for which torchrun started this process."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    add_config_arguments(parser)
    args = parser.parse_args()
    topology = Topology.from_environment()
    if args.world_size not in (1, topology.world_size):
        parser.error(
            f"--world_size {args.world_size}: it must be the number of ranks that torchrun started, "
            f"{topology.world_size}. Leave it out, or use torchrun --nproc_per_node {args.world_size}."
        )
    try:
        config = with_download(config_from_arguments(args))
        if config.has_engine:
            if topology.is_main:
                print(
                    f"{args.yaml_path} asks for sampling, which this script leaves out. To sample as well:\n"
                    f"  python examples/llama_example_mp.py --yaml_path {args.yaml_path} "
                    f"--world_size {topology.world_size}",
                    flush=True,
                )
            config = replace(config, evaluation=EvaluationSettings())
        finetune(config, topology)
    except VectorLMError as error:
        print(f"rank {topology.rank}: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()
