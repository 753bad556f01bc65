"""Compare GRPO steps with TRL's GRPOTrainer, which has vLLM in its process. Run: python benchmarks/rl_step.py

Both train the same 36 M parameter Llama in fp32 on the same prompts, with one optimizer step per batch and no reference
model. Trials find TRL's fastest batch size; the library keeps its defaults. Then runs of both alternate, every run in a
separate process. The reward function runs between sampling and the update: there both record the time and start to
watch their memory. The communication of two ranks in a step is measured separately. A forward and backward pass of one
token gathers all weights and sums all gradients once, like a step of this small model; its time on one rank is
subtracted. Needs TRL:

    pip install --no-deps -r requirements/bench.txt
    python benchmarks/rl_step.py --only "32 + 64" --rounds 1
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_model import save_bench_model
from report import RESULTS, ROOT, circumstances, write_result

STEPS, SKIPPED, TRIAL_STEPS = 3, 1, 1
TRL_ROWS = (8, 16)
"""Numbers of rows per forward pass to try with TRL."""
IN_LAYERS, IN_HEAD = 31_457_280, 4_096_000
"""Number of weights that a token is multiplied with, in the layers and in the output layer."""


@dataclass(frozen=True)
class Setting:
    """Sizes of a step: prompts, groups and tokens."""

    prompts: int
    prompt_tokens: int
    group: int
    new_tokens: int
    is_equal: bool = True
    """Whether all completions have `new_tokens` tokens; if not, 200 of the 8000 tokens end a completion."""

    @property
    def sampling(self) -> dict[str, Any]:
        """Arguments of `vllm.SamplingParams`."""
        ending = {"ignore_eos": True} if self.is_equal else {"stop_token_ids": list(range(3, 203))}
        return {"max_tokens": self.new_tokens, **ending}


SETTINGS = {
    "32 + 64": Setting(8, 32, 8, 64),
    "128 + 64": Setting(8, 128, 8, 64),
    "512 + 128": Setting(2, 512, 16, 128),
    "32 + up to 128": Setting(8, 32, 8, 128, is_equal=False),
}
"""Settings by the tokens of a prompt and of a completion."""


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        choices=SETTINGS,
        action="append",
        help="one setting, beside those saved; may be given again",
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind, taken in turn")
    args = parser.parse_args()
    asked = args.only or list(SETTINGS)
    rows, runs = _saved_but(asked)
    peak = matmul_peak()
    with tempfile.TemporaryDirectory() as scratch:
        bare = save_bench_model(Path(scratch) / "bare")
        said = pass_of_one_token_s(bare, 2) - pass_of_one_token_s(bare, 1)
        for name in asked:
            setting = SETTINGS[name]
            model, prompts = save_prompts(Path(scratch) / name, setting)
            tried = {}
            for size in TRL_ROWS:
                steps = theirs(model, prompts, setting, size, SKIPPED + TRIAL_STEPS)
                tried[size] = statistics.median(step["step_s"] for step in steps)
            best = min(tried, key=lambda size: tried[size])
            found: dict[str, list[dict[str, float]]] = {}
            for round_number in range(args.rounds):
                for who in ("TRL", "one rank", "two ranks"):
                    if who == "TRL":
                        steps = theirs(model, prompts, setting, best, STEPS)
                    else:
                        output = Path(scratch) / f"{name} {who} {round_number}"
                        steps = ours(model, prompts, output, setting, 1 if who == "one rank" else 2)
                    found.setdefault(who, []).extend(steps)
                    print(name, who, [round(step["step_s"], 2) for step in steps], flush=True)
            rows += [_row(name, who, steps, found["TRL"], best, peak, said) for who, steps in found.items()]
            measured = {
                "matmul_gflops": round(peak / 1e9),
                "communication_s": said,
                "trl_rows_tried_s": tried,
            }
            runs.append({"setting": name, **asdict(setting), **measured, "steps": found})
            write_result("rl_step", {"steps": STEPS - SKIPPED, "rounds": args.rounds}, rows, {"runs": runs})


def _saved_but(asked: Sequence[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the saved rows and runs of the other settings."""
    path = RESULTS / "rl_step.json"
    saved = json.loads(path.read_text()) if path.exists() else {"rows": [], "runs": []}
    rows = [row for row in saved["rows"] if row["prompt + completion, tokens"].split(",")[0] not in asked]
    return rows, [run for run in saved["runs"] if run["setting"] not in asked]


def save_prompts(folder: Path, setting: Setting) -> tuple[Path, Path]:
    """Save the model with a tokenizer of numbers, and prompts whose tokens are numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = save_bench_model(folder / "model")
    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {str(number): number for number in range(3, 8000)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(model)
    generator = random.Random(0)
    rows = [
        {"prompt": " ".join(str(generator.randrange(3, 8000)) for _ in range(setting.prompt_tokens))}
        for _ in range(setting.prompts * (STEPS + 2))
    ]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model, path


def ours(
    model: Path, prompts: Path, output: Path, setting: Setting, world_size: int
) -> list[dict[str, float]]:
    """Train with the library; return the seconds, tokens and memory of each step but the first."""
    longest = setting.prompt_tokens + setting.new_tokens
    config = {
        "model": str(model),
        "train_parameters": {
            "output_dir": str(output),
            "max_seq_len": longest,
            "optimizer": {"lr": 1e-6, "weight_decay": 0.0},
            "lr_scheduler_type": "constant",
            "sampler": {
                "sample_frequency": 1000,
                "prompts": ["3 4 5"],
                "vllm_dtype": "float32",
                "sampling_params": {"max_tokens": 1},
                "engine": {"max_model_len": longest, "kv_cache_memory_bytes": 256 << 20},
            },
        },
        "rl": {
            "algorithm": "grpo",
            "max_steps": STEPS,
            "prompts": str(prompts),
            "prompts_per_step": setting.prompts,
            "group_size": setting.group,
            "sampling_params": setting.sampling,
            "rewards": {f"{ROOT}/benchmarks/even_reward.py:even": 1.0},
            # The function measures the memory of its process, which must be the rank.
            "reward_workers": 0,
            "show_every": 0,
        },
    }
    path = output.with_suffix(".json")
    path.write_text(json.dumps(config))
    script = ROOT / "examples/rl_example_mp.py"
    command = [sys.executable, str(script), "--yaml_path", str(path), "--world_size", str(world_size)]
    # The reward function of each rank writes the memory of its updates to this file.
    environment = os.environ | {"UPDATE_PEAKS": str(output.with_suffix(".peaks"))}
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, env=environment)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()][1:]
    peaks = [int(line) for line in output.with_suffix(".peaks").read_text().split()]
    return [
        {
            "step_s": line["time/step_s"],
            "update_s": line["time/update_s"] + line["time/assess_s"],
            "generate_s": line["time/generate_s"],
            "tokens": line["completion/length_mean"],
            "peak_bytes": statistics.median(peaks),
        }
        for line in lines[SKIPPED:]
    ]


def theirs(model: Path, prompts: Path, setting: Setting, rows: int, num_steps: int) -> list[dict[str, float]]:
    """Train with TRL in a separate process; return the same values as `ours`."""
    script = Path(__file__).with_name("trl_grpo.py")
    asked = {"setting": asdict(setting), "sampling": setting.sampling, "rows": rows, "steps": num_steps}
    arguments = json.dumps(asked)
    command = [sys.executable, str(script), str(model), str(prompts), arguments]
    environment = os.environ | {"OMP_NUM_THREADS": str(os.cpu_count())}
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(run.stdout.strip().splitlines()[-1])[SKIPPED:]


def pass_of_one_token_s(model: Path, world_size: int, count: int = 12) -> float:
    """Return the seconds of a forward and backward pass of one token on each of `world_size` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_pass_one_token, (world_size, model, folder, count), nprocs=world_size)
        return statistics.median(json.loads((Path(folder) / "seconds").read_text()))


def _pass_one_token(rank: int, world_size: int, model_path: Path, folder: str, count: int) -> None:
    from transformers import AutoModelForCausalLM

    from vectorlm.ranks.topology import Topology
    from vectorlm.train.optimizer_step import OptimizerStep
    from vectorlm.train.shard import shard_model

    torch.set_num_threads(max((os.cpu_count() or 1) // world_size, 1))
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    topology = Topology(rank, rank, world_size, world_size)
    shard_model(model, topology)
    step = OptimizerStep(model, torch.optim.AdamW(model.parameters()), None, 1.0, topology)
    seconds = []
    for _ in range(count):
        dist.barrier()
        start = time.perf_counter()
        step.backward(model(torch.zeros(1, 1, dtype=torch.int64)).logits.sum(), is_last=True)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        (Path(folder) / "seconds").write_text(json.dumps(seconds[2:]))
    dist.destroy_process_group()


def matmul_peak(size: int = 2048, seconds: float = 5.0) -> float:
    """Return the operations per second of this machine's fastest product of fp32 matrices."""
    torch.set_num_threads(os.cpu_count() or 1)
    a, best, end = torch.randn(size, size), 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        a @ a
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def _row(
    name: str,
    who: str,
    steps: list[dict[str, float]],
    baseline: list[dict[str, float]],
    trl_rows: int,
    peak: float,
    said: float,
) -> dict[str, Any]:
    setting = SETTINGS[name]
    middle = {key: statistics.median(step[key] for step in steps) for key in steps[0]}
    trl_s = statistics.median(step["step_s"] for step in baseline)
    # Every token takes one forward and backward pass; a prompt takes one per group, a last token none.
    completions = setting.prompts * setting.group * middle["tokens"]
    needed = setting.prompts * (setting.prompt_tokens - setting.group) + completions
    share = 6 * (IN_LAYERS * needed + IN_HEAD * completions) / middle["update_s"] / peak
    return {
        "": f"TRL, {trl_rows} rows per pass" if who == "TRL" else f"vectorlm, {who}",
        "prompt + completion, tokens": f"{name}, {setting.prompts} groups of {setting.group}",
        "tokens a completion": f"{middle['tokens']:.1f}",
        "s a step": f"{middle['step_s']:.2f}",
        "sampling, s": f"{middle['generate_s']:.2f}",
        "update, s": f"{middle['update_s']:.2f}",
        "communication, s": f"{said:.2f}" if who == "two ranks" else "",
        "times as fast": f"{trl_s / middle['step_s']:.2f}",
        "memory of an update, MB": f"{middle['peak_bytes'] / 1e6:.0f}",
        "share of the matmul peak, %": f"{100 * share:.0f}",
        "commit": circumstances()["commit"],
    }


if __name__ == "__main__":
    main()
