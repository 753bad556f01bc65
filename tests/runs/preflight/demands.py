"""A run that is small enough for calculations by hand."""

from vectorlm.runs.preflight.memory_plan import GIB, Demand, EngineDemand
from vectorlm.sampling.weights.model_size import ModelSize

MODEL = ModelSize(
    num_parameters=1000,
    num_block_parameters=300,
    num_layers=2,
    hidden_size=8,
    intermediate_size=16,
    num_heads=2,
    query_size=8,
    kv_size=4,
    vocab_size=32,
    max_length=64,
)
ENGINE = EngineDemand(bytes_per_weight=2, kv_cache_bytes=4096, max_model_len=10)
DEMAND = Demand(
    model=MODEL,
    num_trainable=1000,
    num_ranks=2,
    num_shards=2,
    keeps_gathered=False,
    is_mixed=False,
    recomputes=False,
    micro_batch_size=3,
    sequence_tokens=5,
    engine=ENGINE,
    device_bytes=4 * GIB,
    is_cpu=False,
)
