#!/bin/bash
# Fine-tune on one machine of a SLURM cluster, a rank per GPU (docs/multi_node.md). Start it in a clone with
#   sbatch examples/slurm_one_node.sh
# CONFIG names another config file. Arguments are passed on: sbatch examples/slurm_one_node.sh --set model=/models/mine
#SBATCH --job-name=vectorlm
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00

set -euo pipefail

# No srun: the script starts the ranks itself, and reports the first error of any of them.
exec python examples/llama_example_mp.py \
  --yaml_path "${CONFIG:-configs/countdown_sft.yaml}" \
  --world_size "${SLURM_GPUS_ON_NODE:-1}" \
  "$@"
