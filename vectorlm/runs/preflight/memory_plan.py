"""Formulas for the memory of a run while it trains and while it samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from vectorlm.sampling.weights.model_size import ModelSize
from vectorlm.train.settings import KEPT_PASSES, Recomputation, chunk_tokens

GIB = 1 << 30

CPU_LAUNCHER_BYTES, CPU_RANK_BYTES, CPU_SAMPLER_BYTES = 280 << 20, 600 << 20, 500 << 20
NF4_BYTES = 1 / 2 + (1 + 4 / 256) / 64
"""Bytes per NF4 weight: 4 bits, an 8-bit scale per 64 weights, an fp32 scale per 256 scales."""
FOUR_BIT_BYTES = 1 / 2 + (2 + 1 / 2) / 32
"""Upper bound of bytes per weight of AWQ and GPTQ: 4 bits; per 32 weights a 16-bit scale and a 4-bit zero point."""
CUDA_PROCESS_BYTES, CUDA_HOST_PROCESS_BYTES = 1 * GIB, 3 * GIB
"""Bytes of a process besides tensors: measured on CPU (docs/dev/log.md), assumed for CUDA devices and their hosts."""


@dataclass(frozen=True, kw_only=True)
class EngineDemand:
    """Memory demand of the engines of a node."""

    bytes_per_weight: int
    """Bytes per weight: 2 or 4."""
    tensor_parallel: int = 1
    """Devices that share one engine's weights and KV cache."""
    num_engines: int = 1
    """Engines that the run starts on this node; 0 for a server."""
    step_tokens: int = 0
    """Largest number of tokens of one engine step; not used on CPU."""
    step_sequences: int = 0
    """Largest number of sequences of one engine step; not used on CPU."""
    kv_cache_bytes: int | None = None
    """Bytes of the KV cache per device; None derives them from `device_share`."""
    reserves_kv_cache: bool = True
    """Whether the engine allocates its KV cache at its start; the cache must then hold one sequence."""
    device_share: float = 0.35
    """Share of the device that the engine takes; not used on CPU."""
    max_model_len: int
    """Longest sequence, in tokens."""
    is_packed: bool = False
    """Whether the weights are stored twice, plain and in oneDNN's layout (CPU)."""
    bytes_in_blocks: float | None = None
    """Bytes per weight in the transformer blocks if they are quantised; None if they are not."""
    staged_bytes: int | None = None
    """Largest host memory, in bytes, for weights that are being sent; None for a whole copy."""
    sleep: str = "none"
    """Memory that sleeps during training: `none`, `kv_cache` or `all`."""
    offload_optimizer: bool = False
    """Whether the optimizer leaves the device during sampling."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Memory demand of trainer and engine on one node."""

    model: ModelSize
    num_trainable: int
    """Trained parameters."""
    num_trained_outside: int = 0
    """Trained parameters outside the blocks beside adapters: copies of whole modules (`modules_to_save`)."""
    num_adapted_experts: int = 0
    """Parameters of the stacked experts that have adapters (`target_parameters`)."""
    num_frozen: int = 0
    """Parameters of the frozen parts of a vision-language model whose other weights are all trained."""
    num_image_tokens: int = 0
    """Largest number of image tokens in one pass of a rank."""
    image_token_bytes: float = 0
    """Bytes of the processor's output for an image, per image token."""
    image_token_patches: float = 0
    """Patches per image token."""
    trains_vision: bool = False
    """Whether gradients flow through the vision model."""
    num_averages: float = 2
    """Size of the optimizer's state as a multiple of the trained parameters."""
    bytes_per_weight: int = 4
    """Bytes per weight: 2 or 4; adapters have 4."""
    is_quantized: bool = False
    """Whether the blocks are frozen in NF4; every rank then holds all of them."""
    shares_base: bool = False
    """Whether the frozen base is the engine's; the trainer then has only adapters."""
    cpu_offload: bool = False
    """Whether weights, gradients and optimizer state stay on the host."""
    loads_on_main: bool = False
    """Whether only one rank per node reads the weights."""
    num_ranks: int
    """Ranks on this node."""
    num_shards: int
    """Ranks that share one copy of weights, gradients and optimizer state."""
    keeps_gathered: bool
    """Whether a block's gathered weights stay between forward and backward (``SHARD_GRAD_OP``, ``NO_SHARD``)."""
    gathers_once: bool = False
    """Whether all weights and gradients stay on every rank during an optimizer step (`train.settings`)."""
    is_plain: bool = False
    """Whether the model is trained without FSDP (`train.settings.stays_plain`)."""
    is_mixed: bool
    """Whether the model computes in bfloat16."""
    packs: bool = True
    """Whether rows are packed without padding."""
    recomputes: Recomputation
    """Blocks whose activations the backward pass recomputes."""
    micro_batch_size: int
    """Sequences in one forward pass."""
    context_parallel: int = 1
    """Ranks that share the tokens of a pass."""
    tensor_parallel: int = 1
    """Ranks that split the matrices of a layer."""
    expert_parallel: int = 1
    """Ranks that split the experts of a layer."""
    sequence_tokens: int
    """Tokens of the longest sequence."""
    num_trained_copies: int = 0
    """Other trained models of the same size: a critic."""
    num_frozen_copies: float = 0
    """Size of the frozen models in multiples of the policy: 1 per reference or reward model; a teacher may differ."""
    logit_bytes: int = 12
    """Bytes per logit of a chunk: three fp32 numbers, more with an entropy bonus or a teacher's distributions."""
    learns_distributions: bool = False
    """Whether the loss compares whole distributions with a teacher's."""
    engine: EngineDemand | None
    """Memory demand of the engines; None for a run without an engine."""
    device_bytes: int
    """Memory of one device in bytes; on CPU the machine's memory, which all ranks and the engine share."""
    is_cpu: bool
    host_bytes: int | None = None
    """Memory of a CUDA node's host in bytes; None if it is not known."""

    @property
    def is_whole(self) -> bool:
        """Whether the run trains the model's own weights instead of adapters."""
        return self.num_trainable + self.num_frozen == self.model.num_parameters

    @property
    def num_gathered_block(self) -> int:
        """Parameters of the largest block that one rank computes with, after FSDP has gathered them."""
        model = self.model
        attention = min(
            2 * (model.query_size + model.kv_size) * model.hidden_size, model.num_block_parameters
        )
        rest = model.num_block_parameters - attention
        # The feed-forward network counts as experts.
        return attention // self.tensor_parallel + rest // max(self.tensor_parallel, self.expert_parallel)


@dataclass(frozen=True)
class MemoryUse:
    """One kind of memory, in bytes, on one device (on CPU: on the machine)."""

    name: str
    training: int
    """During an optimizer step."""
    sampling: int
    """While the engine works."""


@dataclass(frozen=True)
class HostUse:
    """One kind of memory, in bytes, on the host of a CUDA node."""

    name: str
    loading: int
    """While the ranks read the model."""
    running: int
    """Afterwards, at most."""


@dataclass(frozen=True)
class MemoryPlan:
    """An estimate of the memory of the fullest device."""

    demand: Demand
    rows: tuple[MemoryUse, ...]
    kv_cache_bytes: int
    """The engine's KV cache while it samples; 0 without an engine."""
    host: tuple[HostUse, ...] = ()
    """Memory on the host of a CUDA node; empty on CPU, where `rows` has it."""

    @property
    def loading_host(self) -> int:
        """Total bytes on the host while the model is read."""
        return sum(row.loading for row in self.host)

    @property
    def running_host(self) -> int:
        """Total bytes on the host afterwards."""
        return sum(row.running for row in self.host)

    @property
    def training(self) -> int:
        """Total bytes while training."""
        return sum(row.training for row in self.rows)

    @property
    def sampling(self) -> int:
        """Total bytes while sampling."""
        return sum(row.sampling for row in self.rows)


def plan_memory(demand: Demand) -> MemoryPlan:
    """Estimate the memory of a run.

    With P parameters of w bytes, T trained ones of t bytes (adapters: 4, else w), in S shards, and c bytes per
    computed number (bf16: 2, fp32: 4)::

        weights w P / S, and t T / S for adapters   gradients t T / S
        optimizer a t T / S (a: `state_bytes` / t; of AdamW 2)
        gathered: c (everything outside the blocks + 2 blocks), or c P if blocks stay gathered; adapters too;
                  and 4 (everything outside the blocks, or one block) for the gradients of the largest group;
                  c P + 4 T of a small model (`train.settings.gathers_once`); nothing if FSDP is not used
        critic: (2 + a) w P / S   reference and reward models: w P / S each, assumed as large as the policy
        teacher: w P_t / S of its own P_t parameters
        engine: its bytes per weight x P / tensor_parallel, and `engine_step_bytes`
        shared base: weights t T / S, gathered (c + 4) T: the rest is the engine's
        quantised: `NF4_BYTES` of each weight in the blocks, not sharded; the largest matrix of a block is gathered

    With `cpu_offload` weights, gradients and optimizer state are on the host, which `host_memory` adds up.
    Activations are `activation_bytes`. On CPU all ranks and the engine add up, and neither sleep nor offload frees
    memory; on CUDA this is the device that holds a rank and (a part of) an engine. Rows that are 0 in both phases are
    left out.
    """
    ranks = demand.num_ranks if demand.is_cpu else 1
    weights, trained = sharded_bytes(demand)
    on_device = 0 if demand.cpu_offload and not demand.is_cpu else ranks
    weights, trained = on_device * weights, on_device * trained
    engine, state = demand.engine, int(demand.num_averages * trained)
    offloads = engine is not None and engine.offload_optimizer and not demand.is_cpu
    rows = [
        MemoryUse("weights", weights, weights),
        MemoryUse("gradients", trained, 0),
        MemoryUse("optimizer state", state, 0 if offloads else state),
        MemoryUse("gathered weights", ranks * gathered_bytes(demand), 0),
        MemoryUse("activations", ranks * activation_bytes(demand), 0),
        MemoryUse("images", ranks * image_bytes(demand), ranks * pixel_bytes(demand)),
    ]
    # A critic has weights, gradients and averages. Only the policy is quantised, and only its optimizer is offloaded.
    plain = on_device * whole_bytes(demand)
    critic = int((2 + demand.num_averages) * plain) * demand.num_trained_copies
    frozen = int(plain * demand.num_frozen_copies)
    rows += [MemoryUse("critic", critic, critic), MemoryUse("frozen models", frozen, frozen)]
    processes = CPU_LAUNCHER_BYTES + ranks * CPU_RANK_BYTES if demand.is_cpu else CUDA_PROCESS_BYTES
    kv_cache = 0
    if engine is not None and engine.num_engines:
        # On CPU, the memory of all workers of all engines adds up.
        copies = engine.num_engines * engine.tensor_parallel if demand.is_cpu else 1
        kv_cache = kv_cache_bytes(demand, engine)
        loaded, reserved = copies * engine_weight_bytes(demand, engine), copies * kv_cache
        sleep = "none" if demand.is_cpu else engine.sleep
        rows.append(MemoryUse("engine weights", 0 if sleep == "all" else loaded, loaded))
        rows.append(MemoryUse("KV cache", reserved if sleep == "none" else 0, reserved))
        step = 0 if demand.is_cpu else copies * engine_step_bytes(demand, engine)
        rows.append(MemoryUse("engine step", step if sleep == "none" else 0, step))
        processes += copies * (CPU_SAMPLER_BYTES if demand.is_cpu else CUDA_PROCESS_BYTES)
    rows.append(MemoryUse("processes", processes, processes))
    rows = [row for row in rows if row.training or row.sampling]
    return MemoryPlan(demand, tuple(rows), kv_cache, () if demand.is_cpu else host_memory(demand))


def sharded_bytes(demand: Demand) -> tuple[int, int]:
    """Return one rank's bytes of all weights of the policy, and of the trained weights."""
    per_trained = demand.bytes_per_weight if demand.is_whole else 4
    quantized = demand.model.num_in_blocks if demand.is_quantized else 0
    # Tensor parallelism leaves the embeddings whole on each rank, also if they are the output layer too.
    copied = (demand.tensor_parallel - 1) * demand.model.vocab_size * demand.model.hidden_size
    weights = (
        demand.bytes_per_weight * (demand.model.num_parameters - quantized + copied) // demand.num_shards
    )
    weights += int(NF4_BYTES * quantized)
    trained = per_trained * (demand.num_trainable + (copied if demand.is_whole else 0)) // demand.num_shards
    if demand.shares_base:
        return trained, trained
    return weights if demand.is_whole else weights + trained, trained


def whole_bytes(demand: Demand) -> int:
    """Return one rank's bytes of the weights of another model of the policy's size, without adapters."""
    num_all = demand.model.num_parameters
    alone = replace(demand, num_trainable=num_all, num_frozen=0, is_quantized=False, shares_base=False)
    return sharded_bytes(alone)[0]


def host_memory(demand: Demand) -> tuple[HostUse, ...]:
    """Estimate the memory on a node's host: models being read, weights for the engine, offloaded tensors."""
    ranks, engine = demand.num_ranks, demand.engine
    weights, trained = (ranks * size for size in sharded_bytes(demand))
    whole = demand.bytes_per_weight * demand.model.num_parameters
    others = (2 + demand.num_averages) * demand.num_trained_copies + demand.num_frozen_copies
    offloaded = int(weights + ranks * others * whole_bytes(demand) + (1 + demand.num_averages) * trained)
    if not demand.cpu_offload:
        offloaded = 0
    if engine is not None and engine.offload_optimizer and not demand.cpu_offload:
        offloaded = int(demand.num_averages * trained)
    shared = 0 if engine is None else engine.bytes_per_weight * demand.model.num_parameters
    if engine is not None and engine.staged_bytes is not None:
        shared = min(shared, engine.staged_bytes)
    workers = 0 if engine is None else engine.num_engines * engine.tensor_parallel
    processes = CPU_LAUNCHER_BYTES + (ranks + workers) * CUDA_HOST_PROCESS_BYTES
    rows = [
        HostUse("the model as it is read", whole * (1 if demand.loads_on_main else ranks), 0),
        HostUse("weights for the engine", 0, shared),
        HostUse("offloaded", 0, offloaded),
        HostUse("images", 0, ranks * KEPT_PASSES * pixel_bytes(demand)),
        HostUse("activations", 0, ranks * block_input_bytes(demand) if demand.recomputes == "offload" else 0),
        HostUse("processes", processes, processes),
    ]
    return tuple(row for row in rows if row.loading or row.running)


def gathered_bytes(demand: Demand) -> int:
    """Estimate the unsharded weights and gradients that FSDP2 holds at the same time on one rank."""
    model, number = demand.model, 2 if demand.is_mixed else 4
    outside = model.num_parameters - model.num_in_blocks
    # One matrix at a time, in the dtype in which it was loaded and in the dtype in which it computes.
    matrix = (demand.bytes_per_weight + number) * model.hidden_size * model.intermediate_size
    if demand.is_plain:
        return matrix if demand.is_quantized else 0
    adapters = 0 if demand.is_whole else (number + 4) * demand.num_trainable
    if demand.shares_base:
        return adapters
    if demand.is_quantized:
        return number * outside + matrix + adapters
    block, trained_share = demand.num_gathered_block, demand.num_trainable / model.num_parameters
    whole = outside + model.num_layers * block
    if demand.gathers_once:
        return number * whole + (adapters or 4 * demand.num_trainable * whole // model.num_parameters)
    gathered = whole if demand.keeps_gathered else outside + 2 * block
    # Gradients have the dtype of their sum.
    if demand.is_whole:
        return number * gathered + int(4 * max(outside, block) * trained_share)
    copied = demand.num_trained_outside
    in_block = (demand.num_trainable - copied) // model.num_layers
    gathered += demand.num_trainable if demand.keeps_gathered else copied + 2 * in_block
    return number * gathered + 4 * max(copied, in_block)


def activation_bytes(demand: Demand) -> int:
    """Estimate the activations that a Llama-like decoder keeps from one forward pass for its backward pass.

    A rank has n tokens. The sizes are: hidden h, feed-forward i, queries q, keys k, and c bytes per number.

    - Each block keeps ``n (c (6 h + 3 q + 2 k + 4 i) + 2 (4 - c) h)``, because its two norms work in fp32. With
      adapters ``6 h`` is ``4 h``, because frozen norms do not keep their inputs. Each of a token's experts keeps its
      input and its output, ``2 c h``.
    - Each block also keeps the sums of its experts' weights and their adapters, and has their gradient: c bytes each.
    - The output layer is computed in chunks (`chunk_tokens`), forward and backward: ``logit_bytes V`` per token.
    - Recomputed blocks keep only their input, with `offload` on the host; with `keep_attention` they also keep the
      output of attention and the sums of its heads. After the logits are freed, one block at a time has its other
      activations and the gradients of its feed-forward network, ``2 c i``.
    - Attention matrices are not kept (SDPA). Padded rows also keep their logits, in c bytes; see `_logit_bytes`.
    - Ranks that share a pass have at least one key head each. Tensor parallelism divides q, k and i.
    """
    model, number, ranks = demand.model, 2 if demand.is_mixed else 4, demand.context_parallel
    tokens = num_tokens(demand)
    keys = max(model.kv_size, ranks * model.query_size // max(model.num_heads, 1))
    within = 3 * model.query_size + 2 * keys + 4 * model.intermediate_size
    num_states = (6 if demand.is_whole else 4) + 2 * model.experts_per_token
    wide = num_states * model.hidden_size + within // demand.tensor_parallel
    block = number * wide + 2 * (4 - number) * model.hidden_size
    kept = (model.num_layers - num_recomputed(demand)) * block
    if demand.recomputes == "keep_attention":
        kept += model.num_layers * (number * model.query_size + 4 * model.num_heads)
    inputs = 0 if demand.recomputes == "offload" and not demand.is_cpu else block_input_bytes(demand)
    sums = number * demand.num_adapted_experts // model.num_layers
    inputs += (model.num_layers - num_recomputed(demand)) * sums
    again = 0
    if demand.recomputes:
        # The kept blocks after the last recomputed block are freed by then.
        behind = (model.num_layers - 1) % (demand.recomputes if isinstance(demand.recomputes, int) else 1)
        again = (1 - behind) * block + 2 * number * model.intermediate_size
    sums *= 2 if demand.recomputes else 1
    return tokens * kept + inputs + max(_logit_bytes(demand, tokens), tokens * again + sums)


def _logit_bytes(demand: Demand, tokens: int) -> int:
    """Estimate the memory for the logits of a pass.

    Padded rows have all logits, and a teacher's. In the backward pass over several chunks, the gradient of all logits
    exists too, and another one while a chunk adds its part.
    """
    vocab_size, number = demand.model.vocab_size, 2 if demand.is_mixed else 4
    chunk = min(tokens, chunk_tokens(vocab_size)) * vocab_size
    if demand.packs:
        return chunk * demand.logit_bytes
    whole = tokens * vocab_size * number
    more = chunk * demand.logit_bytes
    if tokens * vocab_size > chunk:
        more = max(whole + more, 2 * whole + number * chunk)
    return (2 if demand.learns_distributions else 1) * whole + more


def pixel_bytes(demand: Demand) -> int:
    """Return the bytes of the pixels of one pass."""
    return int(demand.image_token_bytes * demand.num_image_tokens)


def image_bytes(demand: Demand) -> int:
    """Estimate the memory for the images of a pass: pixels, and activations of the vision model.

    A trained vision model keeps the inputs and outputs of the matrices of all its blocks. If it is frozen or its blocks
    are recomputed, it holds one block at a time; the inputs of the blocks are not counted.
    """
    vision = demand.model.vision
    if vision is None:
        return 0
    kept = KEPT_PASSES if demand.is_cpu else 1
    patches = demand.num_image_tokens * demand.image_token_patches
    blocks = vision.num_layers if demand.trains_vision and not demand.recomputes else 1
    number = 2 if demand.is_mixed else 4
    return kept * pixel_bytes(demand) + int(patches * number * blocks * vision.block_width)


def num_recomputed(demand: Demand) -> int:
    """Return the number of blocks that the backward pass recomputes."""
    every = demand.recomputes if isinstance(demand.recomputes, int) else 1
    return -(-demand.model.num_layers // every) if every else 0


def num_tokens(demand: Demand) -> int:
    """Return the tokens per rank of one pass."""
    return -(-demand.micro_batch_size * demand.sequence_tokens // demand.context_parallel)


def block_input_bytes(demand: Demand) -> int:
    """Return the bytes of the inputs of recomputed blocks."""
    number = 2 if demand.is_mixed else 4
    return num_tokens(demand) * num_recomputed(demand) * number * demand.model.hidden_size


def engine_weight_bytes(demand: Demand, engine: EngineDemand) -> int:
    """Return the bytes of the engine's weights on one device; packed weights are stored twice."""
    in_blocks = demand.model.num_in_blocks
    per_weight = engine.bytes_per_weight if engine.bytes_in_blocks is None else engine.bytes_in_blocks
    num_bytes = engine.bytes_per_weight * (demand.model.num_parameters - in_blocks) + per_weight * in_blocks
    once = int(num_bytes) // engine.tensor_parallel
    return 2 * once if engine.is_packed else once


def kv_cache_bytes(demand: Demand, engine: EngineDemand) -> int:
    """Return the configured KV cache of one device, or the rest of the engine's share."""
    if engine.kv_cache_bytes is not None:
        return engine.kv_cache_bytes
    share = int(engine.device_share * demand.device_bytes)
    used = engine_weight_bytes(demand, engine) + engine_step_bytes(demand, engine) + CUDA_PROCESS_BYTES
    return max(0, share - used)


def engine_step_bytes(demand: Demand, engine: EngineDemand) -> int:
    """Estimate the memory of vLLM's largest step on one device: one block's activations and fp32 logits.

    With n tokens, m sequences, t devices: ``c n (4 h + 3 i / t) + 3 x 4 m V``.
    """
    model = demand.model
    wide = 4 * model.hidden_size + 3 * model.intermediate_size // engine.tensor_parallel
    if model.vision is not None:
        # Before the tokens, vLLM computes images with at most as many tokens as a step.
        wide = max(wide, int(demand.image_token_patches * model.vision.block_width))
    return engine.bytes_per_weight * engine.step_tokens * wide + 12 * engine.step_sequences * model.vocab_size


def sequence_kv_bytes(demand: Demand, engine: EngineDemand) -> int:
    """Return the KV cache of one sequence of `max_model_len` tokens."""
    per_token = 2 * demand.model.num_layers * demand.model.kv_size * engine.bytes_per_weight
    return per_token * engine.max_model_len // engine.tensor_parallel


@dataclass(frozen=True)
class Limits:
    """Limits of a container; None means no limit."""

    memory_bytes: int | None = None
    cores: float | None = None


def container_limits(root: str | Path = "/sys/fs/cgroup", own: str | Path = "/proc/self/cgroup") -> Limits:
    """Return the limits of this process's control group and its parents (cgroup version 2)."""
    memory, cores = [], []
    place = next((line[3:] for line in _read(Path(own)).splitlines() if line.startswith("0::")), None)
    inner = Path(root, place.strip("/")) if place is not None else Path(root)
    for folder in [inner, *inner.parents]:
        if not folder.is_relative_to(root):
            break
        limit, quota = _read(folder / "memory.max").strip(), _read(folder / "cpu.max").split()
        if limit.isdigit():
            memory.append(int(limit))
        if len(quota) == 2 and quota[0].isdigit():
            cores.append(int(quota[0]) / int(quota[1]))
    return Limits(min(memory, default=None), min(cores, default=None))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
