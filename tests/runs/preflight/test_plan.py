from dataclasses import replace

import pytest
import torch
from demands import DEMAND, ENGINE, MODEL
from kit.rank_processes import on_ranks, save_tiny_llama
from kit.tiny_runs import build_loop
from kit.vision_models import save_vlm
from transformers import AutoModelForCausalLM

from vectorlm.runs.preflight.memory import memory_table
from vectorlm.runs.preflight.memory_plan import (
    CPU_LAUNCHER_BYTES,
    CPU_RANK_BYTES,
    CPU_SAMPLER_BYTES,
    CUDA_HOST_PROCESS_BYTES,
    GIB,
    activation_bytes,
    gathered_bytes,
    kv_cache_bytes,
    plan_memory,
    sequence_kv_bytes,
    sharded_bytes,
)
from vectorlm.sampling.weights.model_size import ModelSize, count_adapter_parameters, read_model_size
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.load import load_model
from vectorlm.train.lora import add_lora
from vectorlm.train.packing import Rows


def rows(demand):
    return {row.name: (row.training, row.sampling) for row in plan_memory(demand).rows}


def with_engine(demand=DEMAND, **changes):
    return replace(demand, engine=replace(ENGINE, **changes))


def test_one_device_worked_out_by_hand():
    assert rows(DEMAND) == {
        "weights": (2000, 2000),
        "gradients": (2000, 0),
        "optimizer state": (4000, 4000),
        # In fp32: 400 parameters outside the blocks, two blocks of 300, and the gradients of the 400.
        "gathered weights": (4 * 1000 + 4 * 400, 0),
        # There are 15 tokens. A block keeps 4 (48 + 24 + 8 + 64) bytes of each; the output layer needs 12 x 32.
        "activations": (15 * (2 * 576 + 384), 0),
        "engine weights": (2000, 2000),
        "KV cache": (4096, 4096),
        "processes": (2 * GIB, 2 * GIB),
    }


def test_a_shared_base_is_the_engines_and_not_the_trainers():
    adapters = replace(DEMAND, num_trainable=100)
    apart, shared = rows(adapters), rows(replace(adapters, shares_base=True, num_frozen_copies=1))
    assert (apart["weights"], shared["weights"]) == ((2200, 2200), (200, 200))
    # The adapters are in fp32, and their gradients too.
    assert shared["gathered weights"] == (8 * 100, 0)
    assert shared["frozen models"] == (2000, 2000), "a reward model is not shared"
    same = ("gradients", "optimizer state", "activations", "engine weights", "KV cache", "processes")
    assert all(shared[name] == apart[name] for name in same)


def test_on_cuda_what_sleeps_is_not_there_while_training_and_the_optimizer_not_while_sampling():
    kv_cache = rows(with_engine(sleep="kv_cache"))
    assert (kv_cache["engine weights"], kv_cache["KV cache"]) == ((2000, 2000), (0, 4096))
    everything = rows(with_engine(sleep="all", offload_optimizer=True))
    assert (everything["engine weights"], everything["KV cache"]) == ((0, 2000), (0, 4096))
    assert everything["optimizer state"] == (4000, 0)
    assert everything["weights"] == (2000, 2000)


def test_on_cpu_all_processes_add_up_and_nothing_makes_room():
    cpu = replace(with_engine(sleep="all", offload_optimizer=True, is_packed=True), is_cpu=True)
    assert rows(cpu) == {
        "weights": (4000, 4000),
        "gradients": (4000, 0),
        "optimizer state": (8000, 8000),
        "gathered weights": (2 * 5600, 0),
        "activations": (2 * 15 * (2 * 576 + 384), 0),
        "engine weights": (4000, 4000),
        "KV cache": (4096, 4096),
        "processes": (CPU_LAUNCHER_BYTES + 2 * CPU_RANK_BYTES + CPU_SAMPLER_BYTES,) * 2,
    }


def test_without_an_engine_only_training_counts():
    plan = plan_memory(replace(DEMAND, engine=None))
    assert {row.name for row in plan.rows} == {
        "weights",
        "gradients",
        "optimizer state",
        "gathered weights",
        "activations",
        "processes",
    }
    assert plan.training == 2000 + 2000 + 4000 + 5600 + 15 * (2 * 576 + 384) + GIB
    assert plan.kv_cache_bytes == 0


def test_replicas_hold_everything_and_adapters_little():
    whole = rows(replace(DEMAND, num_shards=1, keeps_gathered=True))
    assert [whole[name][0] for name in ("weights", "gradients", "optimizer state")] == [4000, 4000, 8000]
    assert whole["gathered weights"] == (4 * 1000 + 4 * 400, 0)
    adapted = rows(replace(DEMAND, num_trainable=100))
    assert [adapted[name][0] for name in ("weights", "gradients", "optimizer state")] == [2200, 200, 400]
    # Each of two blocks has 50 parameters of adapters.
    assert adapted["gathered weights"] == (4 * (1000 + 100) + 4 * 50, 0)
    # Frozen norms do not save their inputs.
    assert adapted["activations"] == (15 * (2 * (576 - 2 * 4 * 8) + 384), 0)


def test_copies_of_modules_are_trained_outside_the_blocks_and_adapted_experts_are_summed():
    copied = replace(DEMAND, num_trainable=300, num_trained_outside=200)
    assert gathered_bytes(copied) == 4 * (1000 + 200 + 2 * 50) + 4 * 200
    assert gathered_bytes(replace(copied, keeps_gathered=True)) == 4 * 1300 + 4 * 200
    adapted = replace(DEMAND, num_trainable=100)
    experts = replace(adapted, num_adapted_experts=400)
    # A block has 200 of them, in fp32.
    assert activation_bytes(experts) == activation_bytes(adapted) + 2 * 800
    # A recomputed block also has the gradient of its sum.
    recomputed = [activation_bytes(replace(demand, recomputes=True)) for demand in (adapted, experts)]
    assert recomputed[1] == recomputed[0] + 2 * 800
    several = replace(DEMAND, model=replace(MODEL, experts_per_token=2))
    # Each block keeps the input and output of both experts of a token.
    assert activation_bytes(several) == activation_bytes(DEMAND) + 15 * 2 * 4 * 2 * 2 * 8


def test_the_plan_holds_the_blocks_in_4_bits_on_each_rank():
    """The blocks have 600 of 1,000 weights; 64 weights need 33 bytes and a 64th of four bytes."""
    demand = replace(DEMAND, is_quantized=True, num_trainable=100)
    in_blocks, adapters = int(600 * (0.5 + (1 + 4 / 256) / 64)), 4 * 100 // 2
    assert sharded_bytes(demand) == (4 * 400 // 2 + in_blocks + adapters, adapters)
    # Gathered are the weights outside the blocks, a matrix of 8 x 16 numbers twice, and adapters with gradients.
    assert gathered_bytes(demand) == 4 * 400 + 8 * 8 * 16 + 8 * 100
    assert rows(replace(demand, num_frozen_copies=1))["frozen models"] == (2000, 2000)


def test_a_model_that_is_gathered_once_is_whole_with_its_gradients():
    once = replace(DEMAND, gathers_once=True)
    assert gathered_bytes(once) == 4 * 1000 + 4 * 1000
    assert gathered_bytes(replace(once, is_mixed=True, num_trainable=100)) == 2 * 1000 + 6 * 100


def test_weights_in_bf16_are_half_as_large_and_adapters_on_them_are_not():
    half = replace(DEMAND, bytes_per_weight=2, is_mixed=True)
    names = ("weights", "gradients", "optimizer state")
    assert [rows(half)[name][0] for name in names] == [1000, 1000, 2000]
    adapted = rows(replace(half, num_trainable=100))
    assert [adapted[name][0] for name in names] == [1200, 200, 400]


def test_what_is_offloaded_is_on_the_host():
    plan = plan_memory(replace(DEMAND, cpu_offload=True, num_trained_copies=1, num_frozen_copies=1))
    on_device = {row.name for row in plan.rows}
    assert on_device == {"gathered weights", "activations", "engine weights", "KV cache", "processes"}
    host = {row.name: (row.loading, row.running) for row in plan.host}
    # Two ranks read the whole model; then they share its weights, gradients with two averages, and the critic.
    assert host["the model as it is read"] == (2 * 4000, 0)
    assert host["weights for the engine"] == (0, 2000)
    assert host["offloaded"] == (0, 2 * (4 * 2000 + 4 * 2000 + 2000))
    assert plan.running_host == 2000 + 36000 + CPU_LAUNCHER_BYTES + 3 * CUDA_HOST_PROCESS_BYTES
    assert plan.loading_host == 8000 + CPU_LAUNCHER_BYTES + 3 * CUDA_HOST_PROCESS_BYTES


def test_the_host_has_a_process_for_each_worker_of_each_engine():
    processes = {
        row.name: row.running for row in plan_memory(with_engine(num_engines=4, tensor_parallel=2)).host
    }
    assert processes["processes"] == CPU_LAUNCHER_BYTES + (2 + 4 * 2) * CUDA_HOST_PROCESS_BYTES


def test_the_largest_step_of_an_engine_leaves_less_for_its_kv_cache():
    stepping = with_engine(step_tokens=5, step_sequences=3, kv_cache_bytes=None, tensor_parallel=2)
    # A step needs 2 bytes for each number of four hidden states and 3/2 feed-forwards, and 12 bytes for each logit.
    step = 2 * 5 * (4 * 8 + 3 * 16 // 2) + 12 * 3 * 32
    assert rows(stepping)["engine step"] == (step, step)
    assert rows(replace(stepping, engine=replace(stepping.engine, sleep="kv_cache")))["engine step"] == (
        0,
        step,
    )
    idle = replace(stepping.engine, step_tokens=0, step_sequences=0)
    assert kv_cache_bytes(stepping, stepping.engine) == kv_cache_bytes(stepping, idle) - step


def test_the_host_holds_the_optimizer_that_leaves_and_a_model_that_one_rank_reads():
    plan = plan_memory(replace(with_engine(offload_optimizer=True), loads_on_main=True))
    host = {row.name: (row.loading, row.running) for row in plan.host}
    assert host["the model as it is read"] == (4000, 0)
    assert host["offloaded"] == (0, 8000)
    assert plan_memory(replace(DEMAND, is_cpu=True)).host == ()


def test_bf16_halves_what_is_computed_but_not_the_norms_nor_the_loss():
    mixed = replace(DEMAND, is_mixed=True)
    assert activation_bytes(mixed) == 15 * (2 * (2 * 144 + 4 * 8) + 12 * 32)
    assert gathered_bytes(mixed) == 2 * 1000 + 4 * 400


def test_logits_exist_in_chunks_and_whole_where_rows_are_padded():
    long = replace(DEMAND, sequence_tokens=5000)
    assert activation_bytes(long) == 15000 * 2 * 576 + 2048 * 384
    # One chunk: all logits are kept. Several: two gradients of all logits exist while a chunk adds its part.
    padded = activation_bytes(replace(DEMAND, packs=False))
    assert padded == activation_bytes(DEMAND) + 15 * 4 * 32
    assert activation_bytes(replace(long, packs=False)) == 15000 * (2 * 576 + 3 * 4 * 32) + 2048 * 4 * 32
    # A teacher's logits are kept too. With few tokens in the second chunk, the recomputed first chunk is the peak.
    taught = replace(long, sequence_tokens=700, packs=False, learns_distributions=True)
    assert activation_bytes(taught) == 2100 * (2 * 576 + 3 * 4 * 32) + 2048 * 384
    assert activation_bytes(replace(long, logit_bytes=21)) == 15000 * 2 * 576 + 2048 * 672
    # A chunk of logits in fp32 has 256 MiB.
    large = replace(long, model=replace(MODEL, vocab_size=1 << 17))
    assert activation_bytes(large) == 15000 * 2 * 576 + 3 * (256 << 20)


@pytest.mark.parametrize(("staged", "expected"), [(None, 2000), (1500, 1500), (4000, 2000), (0, 0)])
def test_new_weights_take_what_their_transport_stages_on_the_host(staged, expected):
    host = {row.name: row.running for row in plan_memory(with_engine(staged_bytes=staged)).host}
    assert host.get("weights for the engine", 0) == expected


@pytest.mark.parametrize(
    ("what", "per_token"),
    [
        # Each of two blocks keeps its input.
        (True, 2 * 4 * 8),
        (2, 4 * 8),
        # Each block also keeps the output of attention, and sums of its two heads.
        ("keep_attention", 2 * 4 * 8 + 2 * (4 * 8 + 4 * 2)),
        ("offload", 0),
    ],
)
def test_recomputation_keeps_the_input_of_each_block_and_one_block_or_the_logits(what, per_token):
    demand = replace(DEMAND, recomputes=what)
    # The recomputed block, with two gradients of its feed-forward. The kept second block is freed before the first.
    again = 576 + (max(2 * 4 * 16, 12 * 32) if what == 2 else 2 * 4 * 16)
    assert activation_bytes(demand) == 15 * (per_token + again)
    more = replace(demand, model=replace(MODEL, vocab_size=64))
    assert activation_bytes(more) == 15 * (per_token + 576 * (what == 2) + 12 * 64)
    host = {row.name: row.running for row in plan_memory(demand).host}
    # The number is for two ranks.
    assert host.get("activations", 0) == (2 * 15 * 2 * 4 * 8 if what == "offload" else 0)
    on_cpu = activation_bytes(replace(demand, is_cpu=True))
    assert on_cpu == activation_bytes(replace(DEMAND, recomputes=True)) or what != "offload"


def test_ranks_that_share_a_pass_have_a_share_of_its_tokens_and_a_key_head_each():
    # A rank has eight of 15 tokens. Keys have 8 numbers instead of 4, as many as the two query heads.
    shared = replace(DEMAND, context_parallel=2)
    assert activation_bytes(shared) == 8 * (2 * 4 * (6 * 8 + 3 * 8 + 2 * 8 + 4 * 16) + 384)


def test_the_kv_cache_is_what_is_left_of_the_engines_share():
    demand = with_engine(kv_cache_bytes=None, device_share=0.5)
    assert kv_cache_bytes(demand, demand.engine) == 2 * GIB - 2000 - GIB
    small = with_engine(kv_cache_bytes=None, device_share=0.2)
    assert kv_cache_bytes(small, small.engine) == 0
    # Keys and values of two blocks have four numbers each, in bf16, for ten tokens.
    assert sequence_kv_bytes(DEMAND, ENGINE) == 2 * 2 * 4 * 2 * 10
    parallel = replace(ENGINE, tensor_parallel=2)
    assert sequence_kv_bytes(DEMAND, parallel) == 160
    assert rows(replace(DEMAND, engine=parallel))["engine weights"] == (1000, 1000)


def test_the_table_adds_up():
    demand = replace(with_engine(sleep="all", offload_optimizer=True), device_bytes=80 * GIB)
    big = replace(MODEL, num_parameters=7 * GIB // 4, num_block_parameters=GIB // 20, num_layers=32)
    table = memory_table(plan_memory(replace(demand, model=big, num_trainable=big.num_parameters)))
    rows = [line.rsplit(maxsplit=2) for line in table.splitlines() if line[-1].isdigit()]
    numbers = [[float(number) for number in row[-2:]] for row in rows]
    device, host = numbers[:9], numbers[9:]
    # Outside the blocks are 1.75 - 1.6 G: 4 x (0.15 + 0.1), and their gradients of 4 x 0.15.
    assert device[3] == [1.6, 0.0]
    assert (device[-1], host[-1]) == ([17.6, 9.0], [23.3, 26.8])
    for part in (device, host):
        assert [sum(column) for column in zip(*part[:-1], strict=True)] == pytest.approx(part[-1], abs=0.05)


TINY_LLAMA = {"hidden_size": 64, "max_length": 128}


@pytest.fixture(scope="module")
def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_the_size_in_the_files_is_the_size_of_the_model(folder, loaded, tmp_path):
    size = read_model_size(folder)
    assert size == ModelSize(
        num_parameters=sum(parameter.numel() for parameter in loaded.parameters()),
        num_block_parameters=sum(parameter.numel() for parameter in loaded.model.layers[0].parameters()),
        num_layers=3,
        hidden_size=64,
        intermediate_size=48,
        num_heads=2,
        query_size=64,
        kv_size=32,
        vocab_size=48,
        max_length=128,
    )
    tied = read_model_size(save_tiny_llama(tmp_path / "tied", tied=True, hidden_size=64))
    assert tied.num_parameters == size.num_parameters - 48 * 64


def test_adapters_are_counted_as_peft_makes_them(folder, loaded):
    from peft import LoraConfig, get_peft_model

    for lora in (
        *({"r": 2, "target_modules": ["q_proj", "down_proj"]}, {"r": 4}),
        *({"r": 2, "target_modules": r".*\.(q_proj|down_proj)"}, {"r": 2, "target_modules": "all-linear"}),
    ):
        model = AutoModelForCausalLM.from_pretrained(folder)
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))
        trained = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
        assert count_adapter_parameters(folder, lora) == trained


@pytest.mark.parametrize(
    ("targets", "excluded"),
    [
        (["q_proj", "qkv"], None),
        (["q_proj", "qkv"], ["lm_head"]),
        (["q_proj", "qkv"], []),
        (".*(qkv|q_proj)", r".*visual\.blocks\.0\..*"),
        (["q_proj", "qkv"], [r"blocks.1.attn.qkv"]),
    ],
)
def test_adapters_of_a_vision_language_model_are_counted_by_part(tmp_path, targets, excluded):
    folder = save_vlm("qwen2.5-vl", tmp_path / "model")
    lora = {"r": 2, "target_modules": targets, "exclude_modules": excluded}
    adapted = add_lora(load_model(folder, is_empty=True), lora)
    trained = {name: weight.numel() for name, weight in adapted.named_parameters() if weight.requires_grad}
    assert count_adapter_parameters(folder, lora) == sum(trained.values())
    in_vision = sum(size for name, size in trained.items() if "visual" in name)
    assert count_adapter_parameters(folder, lora, only_vision=True) == in_vision
    assert bool(in_vision) == (excluded is not None)
    with pytest.raises(ValueError, match="regular expression"):
        count_adapter_parameters(folder, {"target_modules": "*q_proj"})


def held_bytes(topology, model_dir):
    """Return the bytes of this rank's shards after a step: weights, gradients, and AdamW's two averages."""
    loop = build_loop(topology, model_dir)
    step = loop.optimizer_step
    loop.objective.sum_loss(next(loop.remaining_steps())[0])[0].backward()
    step.optimizer.step()
    local = [
        (
            weight,
            weight.grad,
            step.optimizer.state[weight]["exp_avg"],
            step.optimizer.state[weight]["exp_avg_sq"],
        )
        for weight in step.model.parameters()
    ]
    return [sum(kinds[index].to_local().nbytes for kinds in local) for index in range(4)]


def test_shards_weigh_what_the_plan_says(folder):
    held = on_ranks(2, held_bytes, folder)
    size = read_model_size(folder)
    planned = rows(replace(DEMAND, model=size, num_trainable=size.num_parameters))
    # Every tensor of the tiny model has an even number of rows.
    for weights, gradients, first, second in held:
        assert weights == planned["weights"][0]
        assert gradients == planned["gradients"][0]
        assert first + second == planned["optimizer state"][0]


def saved_bytes(num_layers, dtype):
    """Return the bytes that autograd saves in a forward pass, without the weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).to(dtype)
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    # A pass does not compute the last token of a row.
    ids = torch.ones(2, 65, dtype=torch.int64)
    rows = Rows(ids, ids, ids.bool() & (torch.arange(65) > 0), (0, 1))
    computes = LanguageModel(model)
    assert computes.packs
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = computes.logprobs(rows).sum()
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_activation_formula_is_what_autograd_keeps(dtype):
    def formula(num_layers):
        model = replace(
            MODEL,
            num_layers=num_layers,
            hidden_size=128,
            intermediate_size=352,
            query_size=128,
            kv_size=64,
            vocab_size=256,
        )
        is_mixed = dtype == torch.bfloat16
        return activation_bytes(
            replace(DEMAND, model=model, micro_batch_size=2, sequence_tokens=64, is_mixed=is_mixed)
        )

    two, four = saved_bytes(2, dtype), saved_bytes(4, dtype)
    # The formula ignores the norms' row of factors and the attention's log-sums.
    assert formula(4) - formula(2) == pytest.approx(four - two, rel=0.01)
    # Autograd saves less of the single chunk of logits than exists at its peak.
    assert four < formula(4) < 1.1 * four


def test_the_kv_cache_of_a_sequence_is_that_of_transformers(folder, loaded):
    cache = loaded(torch.ones(1, 20, dtype=torch.int64), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    engine = replace(ENGINE, bytes_per_weight=4, max_model_len=20)
    assert sequence_kv_bytes(replace(DEMAND, model=read_model_size(folder)), engine) == held


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda folder: (
                (folder / "model.safetensors").unlink(),
                (folder / "config.json").write_text("{}"),
            ),
            "holds no .safetensors file",
        ),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 64), "is not a safetensors file"),
        (lambda folder: (folder / "config.json").write_text("{}"), "config.json has no hidden_size"),
    ],
)
def test_a_model_that_cannot_be_weighed_says_why(tmp_path, spoil, message):
    folder = save_tiny_llama(tmp_path / "model")
    spoil(folder)
    with pytest.raises(ValueError, match=message):
        read_model_size(folder)
