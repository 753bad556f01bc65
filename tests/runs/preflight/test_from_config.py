"""From a YAML file to a memory plan, and the use of the plan by `vectorlm check` and runs."""

import json
import pickle
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from kit.families import FAMILIES, save_family
from kit.rank_processes import on_ranks, save_tiny_llama
from kit.tiny_runs import rows

import vectorlm.runs.start
from vectorlm import SamplingEngine
from vectorlm.cli import main
from vectorlm.errors import ConfigError
from vectorlm.ranks.topology import Topology
from vectorlm.runs.config.load import load_config
from vectorlm.runs.fine_tuning import finetune
from vectorlm.runs.preflight.checked import preflight
from vectorlm.runs.preflight.local_model import resolve_model
from vectorlm.runs.preflight.memory import host_memory_bytes, memory_report, plan_of_config
from vectorlm.runs.preflight.memory_plan import GIB
from vectorlm.runs.start import open_engine, open_run
from vectorlm.sampling.backends.transformers import Transformers
from vectorlm.sampling.backends.vllm.shim import default_arguments
from vectorlm.train.load import load_model
from vectorlm.train.lora import add_lora
from vectorlm.train.optimizers import make_optimizer

TEXT = """\
model: model
train_parameters:
  output_dir: run
  max_seq_len: 16
  epochs: 1
  optimizer: {lr: 0.01}
  sampler: {sample_frequency: 1, prompts: [a], engine: {max_model_len: 32}}
dataset: {train_bs: 2, eval_bs: 4, train_ds: train, eval_ds: eval}
"""


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tiny_llama(tmp_path / "model", hidden_size=64)
    for name in ("train", "eval"):
        Dataset.from_list(rows(4)).save_to_disk(tmp_path / name)
    Path("my.yaml").write_text(TEXT)
    return "my.yaml"


def demand(path, *overrides, world_size=4, is_cpu=False, **more):
    at_top = ("engine", "evaluation")
    given = [name if name.startswith(at_top) else f"train_parameters.{name}" for name in overrides]
    config = load_config(path, given)
    return plan_of_config(config, world_size, device_bytes=None if is_cpu else GIB, **more).demand


@pytest.mark.parametrize(
    ("strategy", "num_shards", "keeps_gathered"),
    [("FULL_SHARD", 4, False), ("SHARD_GRAD_OP", 4, True), ("NO_SHARD", 1, True), ("HYBRID_SHARD", 2, False)],
)
def test_the_strategy_says_how_often_the_model_is_held(path, strategy, num_shards, keeps_gathered):
    found = demand(path, f"sharding_strategy={strategy}", ranks_per_node=2)
    assert (found.num_ranks, found.num_shards, found.keeps_gathered) == (2, num_shards, keeps_gathered)


def test_a_small_model_is_gathered_once(path, monkeypatch):
    whole = 8 * demand(path).model.num_parameters
    for limit, is_small in ((whole, True), (whole - 1, False)):
        monkeypatch.setattr("vectorlm.train.settings.GATHER_ONCE_BYTES", limit)
        assert demand(path).gathers_once is is_small
        assert not demand(path, world_size=1, is_cpu=True).gathers_once


def test_one_rank_copies_a_small_model_that_computes_in_bf16(path, monkeypatch):
    copy = 6 * demand(path).model.num_parameters
    for limit, is_small in ((copy, True), (copy - 1, False)):
        monkeypatch.setattr("vectorlm.train.settings.GATHER_ONCE_BYTES", limit)
        assert demand(path, "use_mp=true", world_size=1, is_cpu=True).gathers_once is is_small
    assert demand(path, world_size=1).gathers_once
    assert not demand(path, "use_mp=false", world_size=1).gathers_once
    monkeypatch.setattr("vectorlm.train.settings.COPY_SHARE", 10**9)
    assert not demand(path, world_size=1).gathers_once


def test_the_training_settings_arrive(path):
    found = demand(path, "use_mp=true", "use_activation_checkpointing=true")
    assert found.is_mixed
    assert (found.bytes_per_weight, found.cpu_offload, found.loads_on_main) == (4, False, True)
    half = demand(path, "dtype=bfloat16", "cpu_offload=true", "low_cpu_mem_usage=false")
    assert (half.bytes_per_weight, half.cpu_offload, half.loads_on_main) == (2, True, False)
    by_default = [demand(path, is_cpu=is_cpu).is_mixed for is_cpu in (False, True)]
    assert by_default == [True, False]
    assert not demand(path, "use_mp=false").is_mixed
    assert found.recomputes
    assert demand(path, "context_parallel=2").context_parallel == 2
    assert (found.micro_batch_size, found.sequence_tokens) == (2, 16)
    assert found.num_trainable == found.model.num_parameters
    lora = demand(path, "lora_peft_config={r: 2, target_modules: [q_proj]}", "evaluation=null")
    assert lora.num_trainable == 3 * 2 * (64 + 64)
    assert lora.engine is None
    adapters = "lora_peft_config={r: 2, target_modules: [q_proj]}"
    assert not lora.shares_base
    assert demand(path, adapters, is_cpu=True).shares_base
    assert not demand(path, adapters, "share_base=false", is_cpu=True).shares_base
    assert demand(path, adapters, "dtype=bfloat16", "engine.data_parallel_size=4").shares_base
    assert not demand(path, adapters, "dtype=bfloat16", "engine.tensor_parallel_size=2").shares_base


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    "lora",
    [
        {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
        {
            "r": 2,
            "target_modules": ["q_proj"],
            "target_parameters": EXPERTS,
        },
        {"r": 2, "target_modules": "all-linear"},
        None,
    ],
)
def test_trained_weights_of_a_model_with_experts_are_counted_as_they_are_made(path, lora):
    folder = save_family(FAMILIES["Mixtral"], Path("experts"))
    model = load_model(folder)
    stacks = {name: weight.numel() for name, weight in model.named_parameters() if "experts" in name}
    model = model if lora is None else add_lora(model, lora)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    config = load_config(path, ["model=experts", "train_parameters.optimizer.name=muon", "evaluation=null"])
    found = plan_of_config(
        replace(config, train_parameters=replace(config.train_parameters, lora_peft_config=lora)), 1
    )
    numbers = {name: weight.numel() for name, weight in trained.items()}
    assert found.demand.num_trainable == sum(numbers.values())
    if lora is not None:
        outside = sum(number for name, number in numbers.items() if ".layers." not in name)
        assert found.demand.num_trained_outside == outside
        has_stacks = "target_parameters" in lora or lora["target_modules"] == "all-linear"
        # PEFT adapts the routers' weights in the same way.
        assert found.demand.num_adapted_experts == pytest.approx(has_stacks * sum(stacks.values()), rel=0.01)
    optimizer = make_optimizer(config.train_parameters.optimizer, model, is_cuda=False)
    for weight in trained.values():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    kept = sum(
        tensor.nbytes for state in optimizer.state.values() for tensor in state.values() if tensor.ndim
    )
    assert found.demand.num_averages * 4 * found.demand.num_trainable == pytest.approx(kept, rel=1e-6)


def test_the_engines_settings_arrive(path):
    plain = demand(path).engine
    # If vLLM may choose the dtype, it loads a checkpoint in fp32 as bf16.
    assert (plain.bytes_per_weight, plain.kv_cache_bytes, plain.device_share) == (2, None, 0.35)
    assert (plain.max_model_len, plain.sleep, plain.offload_optimizer) == (32, "none", False)
    # These are vLLM's sizes of a step on a device below 70 GiB.
    assert (plain.num_engines, plain.step_tokens, plain.step_sequences) == (4, 8192, 256)
    given = (
        "engine={max_model_len: 32, max_num_seqs: 64, max_num_batched_tokens: 512, tensor_parallel_size: 2}"
    )
    stepping = demand(path, given).engine
    assert (stepping.num_engines, stepping.step_tokens, stepping.step_sequences) == (2, 512, 64)
    set_ = demand(
        path,
        "engine={max_model_len: 64, kv_cache_memory_bytes: 4096}",
        "engine.dtype=float32",
        "engine.gpu_memory_utilization=0.5",
        "engine.sleep=all",
        "engine.offload_optimizer=true",
    ).engine
    assert (set_.bytes_per_weight, set_.kv_cache_bytes, set_.device_share) == (4, 4096, 0.5)
    assert (set_.max_model_len, set_.sleep, set_.offload_optimizer) == (64, "all", True)
    assert not set_.is_packed
    assert demand(path, "engine.quantization=int8").engine.bytes_in_blocks == 1
    on_cpu = demand(path, "engine.receiver=packed", is_cpu=True).engine
    assert on_cpu.is_packed
    assert on_cpu.kv_cache_bytes == 512 << 20
    assert not demand(path, is_cpu=True).engine.is_packed  # `auto`: packing does not pay


RL = "rl={algorithm: grpo, max_steps: 1, prompts: [a], prompts_per_step: 2, group_size: 4, rewards: {r: 1}}"
SOURCES = (
    "rl={algorithm: grpo, max_steps: 1, prompts_per_step: 2, rewards: {r: 1},"
    " sources: {short: {prompts: [a], held_out: [b]}, long: {prompts: [abcabc]}}}"
)
ENGINE = "engine"
ENGINES = {
    "fine-tuning": (),
    "fine-tuning within the model's own length": (f"{ENGINE}={{}}",),
    "rl": (RL, f"{ENGINE}={{}}"),
    "rl in a shorter context": (RL, f"{ENGINE}={{max_model_len: 12}}"),
    "rl in bfloat16": (RL, f"{ENGINE}={{}}", "train_parameters.dtype=bfloat16"),
    "rl beside adapters": (RL, f"{ENGINE}={{}}", "train_parameters.lora_peft_config={r: 2}"),
    "sources": (SOURCES, f"{ENGINE}={{}}"),
    "an engine of chosen sizes": (
        RL,
        f"{ENGINE}={{max_num_seqs: 3, max_num_batched_tokens: 40, kv_cache_memory_bytes: 4096, "
        "tensor_parallel_size: 2}",
        "engine.dtype=half",
    ),
    "rl beside transformers": (RL, f"{ENGINE}={{}}", "engine.inference=transformers"),
    "fine-tuning beside transformers": (f"{ENGINE}={{}}", "engine.inference=transformers"),
    "rl with a server": (
        RL,
        f"{ENGINE}={{url: 'http://127.0.0.1:8000'}}",
        "engine.inference=server",
    ),
}


@pytest.mark.parametrize("kind", ENGINES)
def test_the_plan_has_the_sizes_of_the_engine_that_the_run_starts(path, monkeypatch, kind):
    starts = []

    def record(engine, start, *args):
        starts.append(start)

    monkeypatch.setattr(SamplingEngine, "_open_channel", record)
    config = resolve_model(load_config(path, ENGINES[kind]))
    with ExitStack() as stack:
        engine = open_engine(config, Topology(), stack)
        num_engines = len(engine.engine_ranks.ranks)
    given, planned = starts[0].engine_args, plan_of_config(config, 1).demand.engine
    if starts[0].inference == "vllm":
        given = {**default_arguments(config.model, on_cpu=True), **given}
        assert planned.kv_cache_bytes == given["kv_cache_memory_bytes"]
        context = given.get("max_model_len", 64)
    elif starts[0].inference == "transformers":
        backend = Transformers(config.model, receiver="live", **given)
        context, most = backend._context_length, backend.max_num_seqs
        num_tokens = min(most, 8) * context if config.rl else most * 16
        per_token = 2 * planned.bytes_per_weight * 3 * 32
        assert planned.kv_cache_bytes == num_tokens * per_token
    else:
        context, num_engines = given["max_model_len"], 0
    assert planned.max_model_len == context
    assert planned.step_sequences == given.get("max_num_seqs", 0)
    assert planned.step_tokens == given.get("max_num_batched_tokens", 0)
    assert planned.tensor_parallel == given.get("tensor_parallel_size", 1)
    assert planned.bytes_per_weight == (2 if given.get("dtype") in ("bfloat16", "float16") else 4)
    assert planned.num_engines == num_engines


def test_a_server_holds_its_own_memory_and_workers_on_cpu_add_up(path):
    def rows(*overrides):
        plan = plan_of_config(load_config(path, overrides), 4)
        return {row.name: row.sampling for row in plan.rows}

    alone, server = rows("train_parameters.sampler=null"), rows("engine.inference=server")
    assert server == alone
    one, four = rows(), rows(f"{ENGINE}={{tensor_parallel_size: 2, data_parallel_size: 2}}")
    assert four["KV cache"] == 4 * one["KV cache"]
    assert four["engine weights"] == 2 * one["engine weights"]


@pytest.mark.parametrize(
    ("overrides", "num_sequences"),
    [
        # There are two prompts with four completions each; prompts and completions have at most 16 tokens.
        ((), 8),
        (("rl.sampling_params={max_tokens: 4}",), 4),  # 2 x (16 + 3 x 4) tokens
        (("rl.sampling_params={max_tokens: 4}", "train_parameters.pack_rows=false"), 8),
        (("rl.num_mini_batches=2",), 4),
        (("rl.max_tokens_per_micro_batch=50",), 3),
        (("rl.environment=game.py:Game",), 8),
        (("rl.environment='openai:agent.py:play'",), 64),  # 1,024 tokens: agents make any number of rows
        (("rl.sft={dataset: train, rows_per_step: 20}",), 20),
    ],
)
def test_a_micro_batch_is_no_larger_than_a_step(path, overrides, num_sequences):
    config = load_config(path, [RL, f"{ENGINE}={{}}", *overrides])
    assert plan_of_config(config, 1).demand.micro_batch_size == num_sequences
    if num_sequences == 8:
        assert plan_of_config(config, 2).demand.micro_batch_size == 4


def test_a_plan_that_does_not_fit_can_be_ignored(path, capsys):
    ranks = ["check", path, "--device_memory_gib", "0.5"]
    assert main(ranks) == 2
    error = capsys.readouterr().err
    assert error.startswith("ConfigError: one sequence of max_model_len=32 tokens needs 0.01 MiB, and")
    assert "--ignore_memory_plan" in error
    assert main([*ranks, "--ignore_memory_plan"]) == 0
    printed = capsys.readouterr().out
    assert "note: ignore_memory_plan: one sequence of max_model_len=32" in printed
    assert "  memory of the fullest device, of 0.50 GiB:\n" in printed


@pytest.mark.parametrize("ignore", [False, True])
def test_a_run_that_ignores_its_plan_starts(path, monkeypatch, capsys, ignore):
    monkeypatch.setattr("vectorlm.runs.preflight.memory.host_memory_bytes", lambda: GIB // 8)
    config = load_config(path, [f"ignore_memory_plan={ignore}", "train_parameters.sampler=null"])
    # Ranks receive the config in pickled form.
    config = pickle.loads(pickle.dumps(config))
    with pytest.raises(KeyboardInterrupt if ignore else ConfigError) as caught, open_run(config, Topology()):
        raise KeyboardInterrupt
    if not ignore:
        assert "--ignore_memory_plan" in str(caught.value)
        assert not Path("run").exists()
        return
    assert "this machine has 0.12 GiB. The run starts anyway." in capsys.readouterr().err


def test_check_prints_the_plan_of_this_machine_or_of_a_device_that_is_elsewhere(path, capsys):
    assert main(["check", path, "--world_size", "2", "--device_memory_gib", "24"]) == 0
    assert "  memory of the fullest device, of 24.0 GiB:\n" in capsys.readouterr().out


def refused_on_rank(topology, folder):
    """Return how many times this rank checked a config that every rank refuses."""
    calls = []

    def counted(*args):
        calls.append(args)
        return preflight(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(vectorlm.runs.start, "preflight", counted)
        with pytest.raises(ConfigError, match=r"max_seq_len=999"):
            finetune(load_config("my.yaml", ["train_parameters.max_seq_len=999"]), topology)
    return len(calls)


def test_ranks_that_a_script_has_started_are_told_what_rank_0_finds(path, tmp_path):
    assert on_ranks(2, refused_on_rank, tmp_path) == [1, 0]


def test_a_run_on_cpu_is_planned_for_the_memory_of_this_machine(path):
    report = memory_report(load_config(path), 1)
    assert f"all processes together, of {host_memory_bytes() / GIB:.1f}"[:40] in report


def test_a_models_description_is_enough_for_a_plan_without_any_there_is_none_and_no_refusal(path):
    of_files = memory_report(load_config(path), 1, device_bytes=80 * GIB)
    Path("model/model.safetensors").unlink()
    assert memory_report(load_config(path), 1, device_bytes=80 * GIB) == of_files
    Path("model/config.json").unlink()
    assert memory_report(load_config(path), 1, device_bytes=1).startswith(
        "  no memory plan: [Errno 2] No such file"
    )


@pytest.mark.parametrize(
    "spoil",
    [
        lambda config, head: (config | {"num_attention_heads": 0}, head),
        lambda config, head: (config | {"hidden_size": "wide", "head_dim": 3}, head),
        lambda config, head: (config, []),
        lambda config, head: (config, {name: {"shape": "x"} for name in head}),
        lambda config, head: (config, dict.fromkeys(head, 3)),
    ],
)
def test_a_model_whose_description_makes_no_sense_is_checked_without_a_traceback(path, spoil, capsys):
    weights = Path("model/model.safetensors")
    raw = weights.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    config = json.loads(Path("model/config.json").read_text())
    config, head = spoil(config, json.loads(raw[8 : 8 + size]))
    Path("model/config.json").write_text(json.dumps(config))
    text = json.dumps(head).encode()
    weights.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
    main(["check", path])
    printed = "".join(capsys.readouterr())
    assert "Traceback" not in printed
    assert printed


@pytest.mark.parametrize("number", ["nan", "inf", "0", "-3"])
def test_the_memory_of_a_device_is_a_finite_number(path, number, capsys):
    with pytest.raises(SystemExit):
        main(["check", path, f"--device_memory_gib={number}"])
    assert "must be a finite number above 0" in capsys.readouterr().err
