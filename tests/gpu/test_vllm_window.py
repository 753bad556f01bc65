"""Check that the vLLM names that vectorlm uses exist, from vLLM's sources, without importing them.

The test reads the installed vLLM, and another version whose folder `vllm` is VECTORLM_VLLM_SOURCES.
"""

import ast
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = [
    *(ROOT / "vectorlm/sampling/backends/vllm").glob("*.py"),
    ROOT / "vectorlm/sampling/weights/lora_receive.py",
]
INSTALLED = find_spec("vllm")
PACKAGES = {
    "installed": INSTALLED and Path(next(iter(INSTALLED.submodule_search_locations))),
    "other": os.environ.get("VECTORLM_VLLM_SOURCES") and Path(os.environ["VECTORLM_VLLM_SOURCES"]),
}

# Format: file, class or `-`, then names; a function has the parameters that we pass, in our order.
USED = """
engine/arg_utils.py EngineArgs: model dtype max_model_len load_format worker_extension_cls disable_log_stats
  use_tqdm_on_load async_scheduling enforce_eager kv_cache_memory_bytes gpu_memory_utilization skip_tokenizer_init
  enable_sleep_mode enable_lora max_lora_rank tensor_parallel_size distributed_executor_backend
v1/engine/llm_engine.py LLMEngine: from_engine_args(engine_args) add_request(request_id,prompt,params,lora_request)
  abort_request(request_ids) step has_unfinished_requests reset_prefix_cache(reset_running_requests) reset_encoder_cache
  collective_rpc(method,args) sleep(level) wake_up(tags) get_tokenizer vllm_config output_processor engine_core
v1/engine/core_client.py InprocClient: engine_core
v1/engine/core.py EngineCore: batch_queue scheduler
v1/core/sched/interface.py SchedulerInterface: has_finished_requests
v1/core/sched/interface.py PauseState: PAUSED_ALL
v1/core/sched/scheduler.py Scheduler: set_pause_state(pause_state) pause_state
  update_from_output(scheduler_output,model_runner_output)
v1/engine/output_processor.py OutputProcessor: request_states parent_requests tokenizer
v1/engine/output_processor.py RequestState: external_req_id parent_req detokenizer request_index
v1/engine/parallel_sampling.py ParentRequest: external_req_id output_aggregator
v1/engine/detokenizer.py IncrementalDetokenizer: num_output_tokens
config/vllm.py VllmConfig: model_config parallel_config scheduler_config
config/model.py ModelConfig: get_vocab_size enable_sleep_mode
config/parallel.py ParallelConfig: world_size
config/scheduler.py SchedulerConfig: max_num_seqs
sampling_params.py SamplingParams: clone seed output_kind
sampling_params.py RequestOutputKind: FINAL_ONLY
outputs.py RequestOutput: request_id prompt_token_ids prompt_logprobs outputs finished
outputs.py CompletionOutput: index token_ids text logprobs finish_reason
logprobs.py Logprob: logprob rank decoded_token
v1/worker/gpu_model_runner.py GPUModelRunner: get_model kv_caches execute_model input_batch
v1/worker/gpu/model_runner.py GPUModelRunner: get_model kv_caches execute_model
v1/worker/gpu_input_batch.py InputBatch: generators
v1/worker/lora_model_runner_mixin.py LoRAModelRunnerMixin: lora_manager
lora/worker_manager.py WorkerLoRAManager: add_dummy_lora(lora_request,rank)
lora/worker_manager.py LRUCacheWorkerLoRAManager: _adapter_manager
lora/model_manager.py LoRAModelManager: modules packed_modules lora_index_to_id _last_mapping add_adapter(adapter)
  remove_adapter(adapter_id) activate_adapter(lora_id)
lora/layers/base_linear.py BaseLinearLayerWithLoRA: lora_a_stacked lora_b_stacked base_layer tp_size
lora/layers/column_parallel_linear.py MergedColumnParallelLinearWithLoRA: n_slices
lora/lora_model.py LoRAModel: __init__(lora_model_id,rank,loras)
lora/lora_weights.py LoRALayerWeights: __init__(module_name,rank,lora_alpha,lora_a,lora_b,scaling)
lora/request.py LoRARequest: lora_name lora_int_id lora_path
model_executor/models/utils.py WeightsMapper: _map_name(key)
model_executor/custom_op.py CustomOp: _forward_method forward_native
model_executor/layers/linear.py -: UnquantizedLinearMethod
model_executor/layers/vocab_parallel_embedding.py -: UnquantizedEmbeddingMethod
model_executor/layers/vocab_parallel_embedding.py VocabParallelEmbedding: shard_indices
model_executor/layers/vocab_parallel_embedding.py VocabParallelEmbeddingShardIndices: org_vocab_start_index
  org_vocab_end_index
model_executor/layers/fused_moe/unquantized_fused_moe_method.py UnquantizedFusedMoEMethod: unquantized_backend
model_executor/layers/utils.py -: dispatch_cpu_unquantized_gemm(layer,remove_weight)
_custom_ops.py -: create_onednn_mm(weight,primitive_cache_size) onednn_mm(dnnl_handler,x,bias)
envs.py -: VLLM_RPC_BASE_PATH VLLM_ENABLE_V1_MULTIPROCESSING VLLM_WORKER_MULTIPROC_METHOD VLLM_NO_USAGE_STATS
  VLLM_LOGGING_LEVEL VLLM_CPU_OMP_THREADS_BIND
"""
SINCE_0_32 = """
v1/engine/llm_engine.py LLMEngine: release_kv_cache_memory
model_executor/layers/fused_moe/experts/cpu_moe.py CPUUnquantizedExperts: apply process_weights_after_loading
  _intermediate_alignment
lora/layers/base.py BaseLayerWithLoRA: load_weights
model_executor/layers/fused_moe/router/cpu_router.py CPURouter: custom_routing_function
_custom_ops.py -: cpu_attn_reshape_and_cache cpu_attention_with_kv_cache cpu_attn_get_scheduler_metadata
"""
"""Names that older versions lack. Without them the KV cache sleeps only together with the weights, CPU engines refuse
experts, engines with adapters take no weights, and nothing is exact."""


@cache
def tree_of(path):
    return ast.parse(path.read_text())


def members(scope):
    """Return the members of a module or class by name: functions and classes, None for other members."""
    found = {}
    for node in ast.walk(scope) if isinstance(scope, ast.ClassDef) else scope.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in [element for one in targets for element in getattr(one, "elts", [one])]:
            if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
                found.setdefault(target.attr, None)
            elif isinstance(target, ast.Name):
                found.setdefault(target.id, None)
                # envs.py and __init__.py list names as keys of a dictionary.
                keys = getattr(getattr(node, "value", None), "keys", [])
                found |= {key.value: None for key in keys if isinstance(key, ast.Constant)}
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
    return found


def takes(function, parameters):
    """Return whether a function takes `parameters`, in their order."""
    if not parameters:
        return True
    taken = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
    places = [taken.index(name) if name in taken else -1 for name in parameters.split(",")]
    return min(places) >= 0 and places == sorted(places)


def missing(package, used):
    """List the names of `used` that the sources in `package` do not have."""
    wrong = []
    for line in used.replace("\n  ", " ").strip().splitlines():
        place, _, names = line.partition(": ")
        file, owner = place.split()
        scope = tree_of(package / file) if (package / file).exists() else ast.Module([], [])
        found = members(scope)
        if owner != "-":
            found = members(found.get(owner) or ast.Module([], []))
        for use in names.split():
            name, _, parameters = use.rstrip(")").partition("(")
            if name not in found or not takes(found[name], parameters):
                wrong.append(f"{place}: {use}")
    return wrong


def imported(is_installed):
    """Yield module and name of every import of our files from vLLM; `int8` needs the newest version."""
    for path in OURS if is_installed else [path for path in OURS if path.name != "int8.py"]:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for alias in node.names:
                    yield "/".join(node.module.split(".")[1:]), alias.name


@pytest.fixture(params=PACKAGES)
def package(request):
    return PACKAGES[request.param] or pytest.skip("no such vLLM: VECTORLM_VLLM_SOURCES is not set")


def test_vllm_has_what_we_use(package):
    assert missing(package, USED) == []


def test_the_installed_vllm_has_what_older_ones_lack():
    package = PACKAGES["installed"] or pytest.skip("vLLM is not installed")
    assert missing(package, SINCE_0_32) == []


def test_vllm_has_what_we_import(package):
    wrong = set()
    for module, name in imported(package == PACKAGES["installed"]):
        is_module = any((package / module / f"{name}{end}").exists() for end in (".py", "/__init__.py"))
        file = f"{module}.py" if (package / f"{module}.py").exists() else f"{module}/__init__.py".lstrip("/")
        if not is_module and missing(package, f"{file} -: {name}"):
            wrong.add(f"{module}/{name}")
    assert wrong == set()


def test_a_name_that_is_gone_is_reported():
    used = "types.py Completion: text txt\ntypes.py Engine: sample(sampling_params,prompts)\ngone.py -: X"
    assert missing(ROOT / "vectorlm", used) == [
        "types.py Completion: txt",
        "types.py Engine: sample(sampling_params,prompts)",
        "gone.py -: X",
    ]
