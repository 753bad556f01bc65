"""Fine-tune on several ranks while vLLM, holding the weights being trained, answers held-out questions.

python examples/llama_example_mp.py --yaml_path configs/countdown_sft.yaml --world_size 2
"""

import argparse
import sys

import vectorlm
from vectorlm.config import add_config_arguments, check_config, config_from_arguments
from vectorlm.errors import VectorLMError
from vectorlm.finetune import finetune
from vectorlm.rewards.registry import reward_names


def main() -> None:
    """Check the config, then train on every rank."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    add_config_arguments(parser)
    args = parser.parse_args()
    try:
        config = config_from_arguments(args)
        check_config(config, args.world_size, reward_names())
        vectorlm.launch(finetune, config, world_size=args.world_size)
    except VectorLMError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        print("interrupted; with checkpoints, the same command goes on from the last one", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
