"""Compare weight syncs of TRL's GRPOTrainer with vLLM: TRL's own, and `vectorlm.transfer.WeightTransfer`.

    python benchmarks/transfer.py data/smollm2 [--ranks 2] [--server http://127.0.0.1:8000]

vLLM runs in the trainer's processes. With `--server` our sync sends to a server instead; start it as in
docs/howto/transfer.md and with `--dtype float32`. TRL's sync to a server needs CUDA, and stays in the processes.

Both samplers are greedy and both trainers see the same rewards: equal weights give equal completions. Prints the
rewards of both, the seconds of each sync, and their ratio. TRL's sync verifies nothing; ours sums every tensor.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import Any

VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",
}
PROMPTS = ["The sky is", "Two plus two is", "A cat is", "Water is"]
STEPS = 5
LEARNING_RATE = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a model folder")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--server", metavar="URL", help="the address of a vLLM server")
    parser.add_argument("--sync", choices=["trl", "ours"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sync is not None:
        found = train(args.model, args.sync, args.server)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(found), flush=True)
        return
    found = {sync: run(args, sync) for sync in ("trl", "ours")}
    seconds = {sync: statistics.median(of_sync["sync_s"][1:]) for sync, of_sync in found.items()}
    for sync, of_sync in found.items():
        print(f"{sync}: {seconds[sync]:.3f} s per sync, rewards {of_sync['rewards']}")
    print(f"equal rewards: {found['trl']['rewards'] == found['ours']['rewards']}")
    print(f"trl / ours: {seconds['trl'] / seconds['ours']:.2f}")


def run(args: argparse.Namespace, sync: str) -> dict[str, Any]:
    """Train in separate processes; return the results of rank 0."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    command = [sys.executable, *(launcher if args.ranks > 1 else []), __file__, args.model, "--sync", sync]
    if sync == "ours" and args.server is not None:
        command += ["--server", args.server]
    done = subprocess.run(
        command, env={**os.environ, **VARIABLES}, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith('{"'))
    )
    return found


def train(model: str, sync: str, server: str | None) -> dict[str, Any]:
    import trl.generation.vllm_generation as generation
    import trl.trainer.grpo_trainer as grpo
    from datasets import Dataset

    # fp32 because of the CPU, and eager because compilation needs a C++ compiler. With this backend vLLM also keeps
    # weights that TRL can write to.
    backend = {"backend": "vectorlm"}
    generation.LLM = partial(
        generation.LLM,
        enforce_eager=True,
        dtype="float32",
        kv_cache_memory_bytes=200_000_000,
        weight_transfer_config=backend,
    )
    if sync == "ours":
        grpo.VLLMGeneration = verified(generation.VLLMGeneration)
        generation.VLLMClient.init_communicator = lambda self, device: None
    sync_s: list[float] = []
    rewards: list[list[float]] = []

    def reward(completions: list[str], **columns: object) -> list[float]:
        rewards.append([float(sum(map(ord, completion)) % 100) for completion in completions])
        # Greedy completions of one prompt are equal; with equal rewards the gradient would be 0.
        return [score + 100 * (index % 2) for index, score in enumerate(rewards[-1])]

    settings = grpo.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        use_vllm=True,
        vllm_mode="colocate" if server is None else "server",
        vllm_server_base_url=server,
        vllm_max_model_length=128,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=16,
        # Greedy: servers refuse several completions of one prompt at temperature 0.
        generation_kwargs={"top_k": 1},
        max_steps=STEPS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        beta=0.0,
        gradient_checkpointing=False,
        vllm_importance_sampling_correction=False,
        shuffle_dataset=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    dataset = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
    trainer = grpo.GRPOTrainer(model=model, reward_funcs=reward, args=settings, train_dataset=dataset)
    own_sync = trainer.vllm_generation.sync_weights

    def timed_sync() -> None:
        start = time.perf_counter()
        own_sync()
        sync_s.append(time.perf_counter() - start)

    trainer.vllm_generation.sync_weights = timed_sync
    trainer.train()
    return {"sync_s": sync_s, "rewards": rewards}


def verified(generation: Any) -> Any:
    """Return TRL's class with our sync, as in docs/howto/transfer.md."""
    from vectorlm.transfer import WeightTransfer

    class VerifiedGeneration(generation):  # type: ignore[misc]
        def sync_weights(self) -> None:
            if not hasattr(self, "transfer"):
                engine = self.llm if self.mode == "colocate" else self.server_base_url
                self.transfer = WeightTransfer(self.model, engine, receiver="live")
            self.transfer.update(self.transfer.version + 1)

    return VerifiedGeneration


if __name__ == "__main__":
    main()
