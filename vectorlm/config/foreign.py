"""What other libraries call the settings of this one: TRL with transformers, verl and OpenRLHF."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Foreign(NamedTuple):
    """The settings that a foreign name stands for."""

    places: tuple[str, ...] = ()
    """From the top of the config; none where there is no such setting."""
    note: str = ""
    """What differs, as a sentence of its own."""

    @property
    def fix(self) -> str:
        """What to write instead."""
        *others, last = [f"'{place}'" for place in self.places] or [""]
        asked = f"{', '.join(others)} or {last}" if others else last
        return " ".join(part for part in (asked and f"Did you mean {asked}?", self.note) if part)


_TRAIN, _SAMPLER, _SAMPLING = "train_parameters.", "train_parameters.sampler.", "rl.sampling_params."
_MAX_TOKENS = Foreign((_SAMPLING + "max_tokens",), "It is 16 where nothing is set.")
_LENGTH = Foreign((_TRAIN + "max_seq_len",), "It bounds prompt and completion together, and cuts no prompt.")
_ROW_LENGTH = Foreign((_TRAIN + "max_seq_len",))
_EVERY = Foreign((_SAMPLER + "sample_frequency", _TRAIN + "logging_steps"), "The second is for fine-tuning.")
_SAVE = Foreign(
    ("rl.save_every", _TRAIN + "save_frequency"),
    "The second is for fine-tuning: a share of an epoch, or above 1 optimizer steps.",
)
_CHECKPOINTS = Foreign(
    (_TRAIN + "checkpointing_enabled",), "The same command then goes on from the last checkpoint."
)
_LORA = Foreign((_TRAIN + "lora_peft_config",))
_PROMPTS = Foreign(
    ("rl.prompts",), "A file or a folder: save a dataset of the hub first (save_to_disk, to_parquet)."
)
_MODEL = Foreign(("model",))
_BATCH = Foreign(("rl.prompts_per_step",), "It counts the prompts of a step on all ranks, not completions.")
_MICRO_BATCH = Foreign(
    ("dataset.train_bs", "rl.max_tokens_per_micro_batch"),
    "The first counts rows on a rank, in fine-tuning. In reinforcement learning rl.prompts_per_step is the whole "
    "batch, and micro-batches are bounded by their tokens.",
)
_LENGTH_OF_RUN = Foreign(
    ("rl.max_steps", _TRAIN + "epochs"),
    "The first counts batches of rollouts, not optimizer steps; the second is for fine-tuning.",
)
_ALGORITHM = Foreign(("rl.algorithm",))
_LOSS = Foreign(
    ("rl.algorithm", "rl.reduction", "rl.preference"),
    "TRL's loss_type: dapo is algorithm: grpo with reduction: token_mean; docs/from_trl.md has the others. The third "
    "is for online_dpo.",
)
_PRECISION = Foreign((_TRAIN + "use_mp",), "Left out, it means bfloat16 on CUDA alone; there is no float16.")
_SHARDING = Foreign((_TRAIN + "sharding_strategy",))
_ENVIRONMENT = Foreign(
    ("rl.environment",), "An object for each rollout whose respond(text) answers the policy."
)
_CORRECTION = Foreign(("rl.correction.preset", "rl.correction.level"), "It is off where nothing is set.")
_LABELS = Foreign(
    ("dataset_preprocess.seperator",),
    "Text up to it is left out of the loss; columns `prompt` and `completion` need no setting.",
)
_KL = Foreign(
    ("rl.kl_coef", "rl.beta"), "The second is for online_dpo and copg. Both libraries start GRPO at 0.0."
)
_CLIPS = Foreign(("rl.clip_low", "rl.clip_high"), "One bound below a ratio of 1 and one above.")

FOREIGN: Mapping[str, Foreign] = {
    # TRL and transformers: models and data.
    **dict.fromkeys(("model_name_or_path", "pretrained_model_name_or_path", "pretrain"), _MODEL),
    **dict.fromkeys(("dataset_name", "train_dataset", "train_files", "prompt_data"), _PROMPTS),
    **dict.fromkeys(("eval_dataset", "val_files"), Foreign((_SAMPLER + "prompts", "dataset.eval_ds"))),
    "dataset_text_field": Foreign(("dataset_preprocess.data_field",)),
    **dict.fromkeys(("max_prompt_length", "prompt_max_len", "vllm_max_model_length"), _LENGTH),
    **dict.fromkeys(("max_length", "max_seq_length", "model_max_length"), _ROW_LENGTH),
    **dict.fromkeys(("packing", "packing_strategy"), Foreign(("dataset_preprocess.packing_type",))),
    "assistant_only_loss": Foreign(("dataset_preprocess.assistant_only_loss",)),
    "completion_only_loss": _LABELS,
    **dict.fromkeys(
        ("peft_config", "use_peft", "lora_r", "lora_rank", "lora_alpha", "lora_target_modules"), _LORA
    ),
    # The optimizer and the length of the run.
    **dict.fromkeys(("learning_rate", "actor_learning_rate"), Foreign((_TRAIN + "optimizer.lr",))),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_betas"), Foreign((_TRAIN + "optimizer.betas",))),
    "adam_epsilon": Foreign((_TRAIN + "optimizer.eps",)),
    "warmup_steps": Foreign((_TRAIN + "warmup_ratio",), "A share of all optimizer steps."),
    **dict.fromkeys(
        ("num_train_epochs", "total_epochs", "num_episodes", "total_training_steps"), _LENGTH_OF_RUN
    ),
    "max_steps": Foreign(("rl.max_steps",), _LENGTH_OF_RUN.note.partition(";")[0] + "."),
    **dict.fromkeys(("per_device_train_batch_size", "micro_train_batch_size"), _MICRO_BATCH),
    "per_device_eval_batch_size": Foreign(("dataset.eval_bs",)),
    "gradient_accumulation_steps": Foreign(
        (_TRAIN + "gradient_accumulation_steps", "rl.prompts_per_step"),
        "The first is for fine-tuning; in reinforcement learning the second is the whole batch.",
    ),
    **dict.fromkeys(("save_steps", "save_freq"), _SAVE),
    **dict.fromkeys(("save_strategy", "resume_from_checkpoint"), _CHECKPOINTS),
    "save_total_limit": Foreign((_TRAIN + "keep_checkpoints",)),
    "load_best_model_at_end": Foreign((_TRAIN + "final_model",), "final_model: best."),
    **dict.fromkeys(("eval_steps", "eval_strategy", "test_freq"), _EVERY),
    "logging_steps": Foreign(
        (_TRAIN + "logging_steps",), "It spaces evaluations: metrics are written at every step."
    ),
    "log_completions": Foreign(("rl.show_every",)),
    "report_to": Foreign(
        ("enable_wandb_logging", "trackers"), "metrics.jsonl and plots are written in any case."
    ),
    "run_name": Foreign(("wandb_config.name",)),
    **dict.fromkeys(("bf16", "fp16"), _PRECISION),
    "gradient_checkpointing": Foreign(
        (_TRAIN + "use_activation_checkpointing",), "TRL has it on, here it is off."
    ),
    "attn_implementation": Foreign((_TRAIN + "use_flash_attention",)),
    "torch_compile": Foreign((_TRAIN + "compile",)),
    **dict.fromkeys(("fsdp", "deepspeed", "zero_stage"), _SHARDING),
    # Generation.
    **dict.fromkeys(
        ("num_generations", "n_samples_per_prompt"), Foreign(("rl.group_size",), "It is 1 where not set.")
    ),
    "num_generations_eval": Foreign((_SAMPLER + "sampling_params.n",)),
    **dict.fromkeys(("max_completion_length", "max_new_tokens", "max_response_length"), _MAX_TOKENS),
    "generate_max_len": _MAX_TOKENS,
    **{name: Foreign((_SAMPLING + name,)) for name in ("temperature", "top_p", "top_k", "min_p")},
    "generation_kwargs": Foreign(("rl.sampling_params",)),
    "repetition_penalty": Foreign(
        (), "It is refused: the trainer could not follow what the engine samples from."
    ),
    "generation_batch_size": _BATCH,
    **dict.fromkeys(("train_batch_size", "rollout_batch_size"), _BATCH),
    "steps_per_generation": Foreign(("rl.num_mini_batches",), "Optimizer steps of a batch of rollouts."),
    "use_vllm": Foreign((_SAMPLER + "inference",), "vLLM samples where nothing is set."),
    "vllm_mode": Foreign((_SAMPLER + "inference",), "`vllm` is TRL's colocate; `server` is a vLLM server."),
    "vllm_server_base_url": Foreign((_SAMPLER + "engine.url",), "With inference: server."),
    "vllm_gpu_memory_utilization": Foreign((_SAMPLER + "gpu_memory_utilization",)),
    "vllm_tensor_parallel_size": Foreign((_SAMPLER + "engine.tensor_parallel_size",)),
    "vllm_enable_sleep_mode": Foreign((_SAMPLER + "sleep",)),
    **dict.fromkeys(("tools", "environment_factory"), _ENVIRONMENT),
    "max_tool_calling_iterations": Foreign(("rl.max_turns",)),
    # Rewards and losses.
    "reward_funcs": Foreign(("rl.rewards",), "A mapping of file.py:NAME to weight."),
    "reward_weights": Foreign(("rl.rewards",), "A weight is the value beside each name."),
    **dict.fromkeys(("reward_model_path", "reward_pretrain"), Foreign(("rl.reward_models",))),
    "loss_type": _LOSS,
    "loss_agg_mode": Foreign(("rl.reduction",)),
    **dict.fromkeys(("adv_estimator", "advantage_estimator"), _ALGORITHM),
    "multi_objective_aggregation": Foreign(("rl.algorithm",), "normalize_then_sum is algorithm: gdpo."),
    **dict.fromkeys(("num_iterations", "ppo_epochs"), Foreign(("rl.num_epochs",))),
    "ppo_mini_batch_size": Foreign(
        ("rl.num_mini_batches",), "It counts the mini-batches, not what one holds."
    ),
    "ppo_max_token_len_per_gpu": Foreign(("rl.max_tokens_per_micro_batch",)),
    **dict.fromkeys(("epsilon", "clip_ratio", "eps_clip"), _CLIPS),
    "epsilon_high": Foreign(
        ("rl.clip_high",), "A ratio is bounded by 1 + clip_high, with cispo too: TRL's 5.0 is 4.0."
    ),
    "clip_ratio_low": Foreign(("rl.clip_low",)),
    "clip_ratio_high": Foreign(("rl.clip_high",)),
    **dict.fromkeys(("delta", "clip_ratio_c"), Foreign(("rl.dual_clip",))),
    "beta": _KL,
    **dict.fromkeys(("kl_loss_coef", "init_kl_coef"), Foreign(("rl.kl_coef",))),
    "kl_loss_type": Foreign(("rl.kl_kind",), "low_var_kl is k3."),
    **dict.fromkeys(
        ("use_kl_loss", "use_kl_in_reward"), Foreign(("rl.kl_in",), "With an rl.kl_coef above 0.")
    ),
    "use_bias_correction_kl": Foreign(("rl.kl_importance_weights",), "TRL has it on, here it is off."),
    **dict.fromkeys(("sync_ref_model", "ref_model_sync_steps"), Foreign(("rl.reference_sync_every",))),
    "ref_model_mixup_alpha": Foreign(
        (), "With rl.reference_sync_every the reference becomes the policy, unmixed."
    ),
    "mask_truncated_completions": Foreign(("rl.drop_truncated",)),
    "missing_eos_penalty": Foreign(("rl.missing_end_penalty",)),
    "off_policy_mask_threshold": Foreign(("rl.off_policy_mask",)),
    "normalize_advantages": Foreign(("rl.whiten_advantages",)),
    "norm_adv_by_std_in_grpo": Foreign(("rl.scale_rewards",)),
    "entropy_coeff": Foreign(("rl.entropy_coef",)),
    "lambd": Foreign(("rl.lam",)),
    "critic_learning_rate": Foreign(("rl.critic.lr",)),
    **dict.fromkeys(("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"), _CORRECTION),
    **dict.fromkeys(
        ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap"),
        Foreign(("rl.correction.high",)),
    ),
    "vllm_importance_sampling_clip_min": Foreign(("rl.correction.low",)),
    "sapo_temperature_pos": Foreign(("rl.temperature_positive",)),
    "sapo_temperature_neg": Foreign(("rl.temperature_negative",)),
    "vespo_k_pos": Foreign(("rl.shape_positive",)),
    "vespo_lambda_pos": Foreign(("rl.rate_positive",)),
    "vespo_k_neg": Foreign(("rl.shape_negative",)),
    "vespo_lambda_neg": Foreign(("rl.rate_negative",)),
    **dict.fromkeys(
        ("actor_rollout_ref", "trainer"),
        Foreign(
            (), "This is a section of verl; here train_parameters and rl hold its settings (docs/config.md)."
        ),
    ),
}
"""By the name that somebody may write here; names that both sides use alike are left out."""
