#!/bin/bash
# Fine-tune on two machines of a SLURM cluster, with an engine on each (docs/multi_node.md). Start it in a clone with
#   sbatch examples/slurm.sh
# CONFIG names another config file. Arguments are passed on: sbatch examples/slurm.sh --set train_parameters.epochs=1
#SBATCH --job-name=vectorlm
#SBATCH --nodes=2
# One task per node: torchrun starts the ranks of its node.
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00

set -euo pipefail

# The machine that holds torchrun's store; the machines may come in any order.
MASTER=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
# A port for each job, so that two jobs whose first machine is the same do not meet.
PORT=$((29400 + SLURM_JOB_ID % 1000))

# Set these where a machine has several network interfaces or its name resolves to a loopback address.
# export GLOO_SOCKET_IFNAME=eth0
# export NCCL_SOCKET_IFNAME=eth0

# torchrun says nothing while it waits for the others.
echo "waiting until torchrun has started on all $SLURM_NNODES machines, at $MASTER:$PORT" >&2

# --kill-on-bad-exit: when one node fails, SLURM ends the others at once.
# --cpus-per-task: since SLURM 22.05 srun does not take it from sbatch, and torchrun would have one core.
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" torchrun \
  --nnodes "$SLURM_NNODES" \
  --nproc_per_node "${SLURM_GPUS_ON_NODE:-1}" \
  --rdzv_id "$SLURM_JOB_ID" \
  --rdzv_backend c10d \
  --rdzv_endpoint "$MASTER:$PORT" \
  examples/llama_example_mp.py \
  --yaml_path "${CONFIG:-configs/countdown_sft.yaml}" \
  --set train_parameters.sharding_strategy=HYBRID_SHARD \
  "$@"
