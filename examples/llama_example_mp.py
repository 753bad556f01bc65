r"""Fine-tune on several ranks, while vLLM answers held-out questions with the current weights.

python examples/llama_example_mp.py --yaml_path configs/countdown_sft.yaml --world_size 2

On several machines, start it with torchrun and the same command on each (docs/multi_node.md):

torchrun --nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint machine-0:29400 \
  examples/llama_example_mp.py --yaml_path configs/countdown_sft.yaml \
  --set train_parameters.sharding_strategy=HYBRID_SHARD
"""

from vectorlm.cli.run import run_script

if __name__ == "__main__":
    run_script("dataset", __doc__)
