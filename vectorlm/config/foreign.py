"""What other libraries call the settings of this one: TRL with transformers, verl and OpenRLHF."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

TABLE = """
# Models and data.
model_name_or_path pretrained_model_name_or_path pretrain | model
dataset_name train_dataset train_files prompt_data | rl.prompts | A file or a folder: save a dataset of the
    hub first (save_to_disk, to_parquet).
eval_dataset val_files | train_parameters.sampler.prompts dataset.eval_ds
dataset_text_field | dataset_preprocess.data_field
max_prompt_length prompt_max_len vllm_max_model_length | train_parameters.max_seq_len | It bounds prompt and
    completion together, and cuts no prompt.
max_length max_seq_length model_max_length | train_parameters.max_seq_len
packing packing_strategy | dataset_preprocess.packing_type
assistant_only_loss | dataset_preprocess.assistant_only_loss
completion_only_loss | dataset_preprocess.seperator | Text up to it is left out of the loss; columns `prompt`
    and `completion` need no setting.
peft_config use_peft lora_r lora_rank lora_alpha lora_target_modules | train_parameters.lora_peft_config
# The optimizer and the length of the run.
learning_rate actor_learning_rate | train_parameters.optimizer.lr
adam_beta1 adam_beta2 adam_betas | train_parameters.optimizer.betas
adam_epsilon | train_parameters.optimizer.eps
warmup_steps | train_parameters.warmup_ratio | A share of all optimizer steps.
num_train_epochs total_epochs num_episodes total_training_steps | rl.max_steps train_parameters.epochs | The
    first counts batches of rollouts, not optimizer steps; the second is for fine-tuning.
max_steps | rl.max_steps | The first counts batches of rollouts, not optimizer steps.
per_device_train_batch_size micro_train_batch_size | dataset.train_bs rl.max_tokens_per_micro_batch | The
    first counts rows on a rank, in fine-tuning. In reinforcement learning rl.prompts_per_step is the whole
    batch, and micro-batches are bounded by their tokens.
per_device_eval_batch_size | dataset.eval_bs
gradient_accumulation_steps | train_parameters.gradient_accumulation_steps rl.prompts_per_step | The first is
    for fine-tuning; in reinforcement learning the second is the whole batch.
save_steps save_freq | rl.save_every train_parameters.save_frequency | The second is for fine-tuning: a share
    of an epoch, or above 1 optimizer steps.
save_strategy resume_from_checkpoint | train_parameters.checkpointing_enabled | The same command then goes on
    from the last checkpoint.
save_total_limit | train_parameters.keep_checkpoints
load_best_model_at_end | train_parameters.final_model | final_model: best.
eval_steps eval_strategy test_freq | train_parameters.sampler.sample_frequency train_parameters.logging_steps
    | The second is for fine-tuning.
logging_steps | train_parameters.logging_steps | It spaces evaluations: metrics are written at every step.
log_completions | rl.show_every
report_to | enable_wandb_logging trackers | metrics.jsonl and plots are written in any case.
run_name | wandb_config.name
bf16 fp16 | train_parameters.use_mp | Left out, it means bfloat16 on CUDA alone; there is no float16.
gradient_checkpointing | train_parameters.use_activation_checkpointing | TRL has it on, here it is off.
attn_implementation | train_parameters.use_flash_attention
torch_compile | train_parameters.compile
fsdp deepspeed zero_stage | train_parameters.sharding_strategy
# Generation.
num_generations n_samples_per_prompt | rl.group_size | It is 1 where not set.
num_generations_eval | train_parameters.sampler.sampling_params.n
max_completion_length max_new_tokens max_response_length generate_max_len | rl.sampling_params.max_tokens | It
    is 16 where nothing is set.
temperature | rl.sampling_params.temperature
top_p | rl.sampling_params.top_p
top_k | rl.sampling_params.top_k
min_p | rl.sampling_params.min_p
generation_kwargs | rl.sampling_params
repetition_penalty | | It is refused: the trainer could not follow what the engine samples from.
generation_batch_size train_batch_size rollout_batch_size | rl.prompts_per_step | It counts the prompts of a
    step on all ranks, not completions.
steps_per_generation | rl.num_mini_batches | Optimizer steps of a batch of rollouts.
use_vllm | train_parameters.sampler.inference | vLLM samples where nothing is set.
vllm_mode | train_parameters.sampler.inference | `vllm` is TRL's colocate; `server` is a vLLM server.
vllm_server_base_url | train_parameters.sampler.engine.url | With inference: server.
vllm_gpu_memory_utilization | train_parameters.sampler.gpu_memory_utilization
vllm_tensor_parallel_size | train_parameters.sampler.engine.tensor_parallel_size
vllm_enable_sleep_mode | train_parameters.sampler.sleep
tools environment_factory | rl.environment | An object for each rollout whose respond(text) answers the
    policy.
max_tool_calling_iterations | rl.max_turns
# Rewards and losses.
reward_funcs | rl.rewards | A mapping of file.py:NAME to weight.
reward_weights | rl.rewards | A weight is the value beside each name.
reward_model_path reward_pretrain | rl.reward_models
loss_type | rl.algorithm rl.reduction rl.preference | TRL's loss_type: dapo is algorithm: grpo with reduction:
    token_mean; docs/from_trl.md has the others. The third is for online_dpo.
loss_agg_mode | rl.reduction
adv_estimator advantage_estimator | rl.algorithm
multi_objective_aggregation | rl.algorithm | normalize_then_sum is algorithm: gdpo.
num_iterations ppo_epochs | rl.num_epochs
ppo_mini_batch_size | rl.num_mini_batches | It counts the mini-batches, not what one holds.
ppo_max_token_len_per_gpu | rl.max_tokens_per_micro_batch
epsilon clip_ratio eps_clip | rl.clip_low rl.clip_high | One bound below a ratio of 1 and one above.
epsilon_high | rl.clip_high | A ratio is bounded by 1 + clip_high, with cispo too: TRL's 5.0 is 4.0.
clip_ratio_low | rl.clip_low
clip_ratio_high | rl.clip_high
delta clip_ratio_c | rl.dual_clip
beta | rl.kl_coef rl.beta | The second is for online_dpo and copg. Both libraries start GRPO at 0.0.
kl_loss_coef init_kl_coef | rl.kl_coef
kl_loss_type | rl.kl_kind | low_var_kl is k3.
use_kl_loss use_kl_in_reward | rl.kl_in | With an rl.kl_coef above 0.
use_bias_correction_kl | rl.kl_importance_weights | TRL has it on, here it is off.
sync_ref_model ref_model_sync_steps | rl.reference_sync_every
ref_model_mixup_alpha | | With rl.reference_sync_every the reference becomes the policy, unmixed.
mask_truncated_completions | rl.drop_truncated
missing_eos_penalty | rl.missing_end_penalty
off_policy_mask_threshold | rl.off_policy_mask
normalize_advantages | rl.whiten_advantages
norm_adv_by_std_in_grpo | rl.scale_rewards
entropy_coeff | rl.entropy_coef
lambd | rl.lam
critic_learning_rate | rl.critic.lr
vllm_importance_sampling_correction vllm_importance_sampling_mode | rl.correction.preset rl.correction.level |
    It is off where nothing is set.
vllm_importance_sampling_clip_max vllm_importance_sampling_cap | rl.correction.high
vllm_importance_sampling_clip_min | rl.correction.low
sapo_temperature_pos | rl.temperature_positive
sapo_temperature_neg | rl.temperature_negative
vespo_k_pos | rl.shape_positive
vespo_lambda_pos | rl.rate_positive
vespo_k_neg | rl.shape_negative
vespo_lambda_neg | rl.rate_negative
actor_rollout_ref trainer | | This is a section of verl; here train_parameters and rl hold its settings
    (docs/config.md).
"""
"""Names, the settings that each stands for (none where there is none), and what differs, as a sentence of its own."""


class Foreign(NamedTuple):
    """The settings that a foreign name stands for."""

    places: tuple[str, ...]
    """From the top of the config."""
    note: str

    @property
    def fix(self) -> str:
        """What to write instead."""
        *others, last = [f"'{place}'" for place in self.places] or [""]
        asked = f"{', '.join(others)} or {last}" if others else last
        return " ".join(part for part in (asked and f"Did you mean {asked}?", self.note) if part)


def _read(table: str) -> Iterator[tuple[str, Foreign]]:
    """Yield each name of the table; an indented line continues the one before."""
    for line in re.sub(r"\n +", " ", table).splitlines():
        if line and not line.startswith("#"):
            names, places, note = (part.strip() for part in f"{line} |".split("|")[:3])
            yield from ((name, Foreign(tuple(places.split()), note)) for name in names.split())


FOREIGN: Mapping[str, Foreign] = dict(_read(TABLE))
"""By the name that somebody may write here; names that both sides use alike are left out."""
