"""Check a user's project: its config, rewards and environment, on a tiny model with the real engine.

``pytest -p vectorlm.cli.pytest_plugin --vectorlm CONFIG`` runs the checks; your own test may add completions:

>>> PROJECT = ProjectUnderTest("config.yaml", completions=["7", "no idea"])  # doctest: +SKIP
>>> @pytest.mark.parametrize("check", PROJECT_CHECKS)                        # doctest: +SKIP
... def test_project(check):
...     check(PROJECT)
"""

from __future__ import annotations

import functools
import json
import math
import shutil
import tempfile
import weakref
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from vectorlm.cli.model import SMALL, model_command
from vectorlm.data.encoding import chat_of, load_tokenizer
from vectorlm.data.prompts import read_prompts
from vectorlm.errors import ConfigError, EngineError, RankFailed
from vectorlm.ranks.launcher import launch
from vectorlm.ranks.workers.pool import WorkerPool
from vectorlm.report.runs import read_lines
from vectorlm.rl.rewards.function import RewardFunction
from vectorlm.rl.rewards.registry import RewardSignature, get_reward
from vectorlm.rl.rewards.runner import Scorable
from vectorlm.runs.config.load import load_config
from vectorlm.runs.config.schema import Config, RLSettings
from vectorlm.runs.config.setting import to_plain
from vectorlm.runs.preflight.checked import preflight
from vectorlm.runs.preflight.local_model import resolve_model
from vectorlm.types import RewardResult

__all__ = ["PROJECT_CHECKS", "ProjectUnderTest"]

NUM_PROMPTS, MAX_TOKENS = 8, 16
MAX_SEQ_LEN = 1 << 16
"""Longest sequence of the tiny model, in tokens; it fills the engine's KV cache."""
LOGPROB_TOLERANCE = 1e-3
"""Largest difference between the log-probabilities of engine and trainer, both in float32."""
STRANGE = ("", "\u4f60\u597d \U0001f642 \u202e e\u0301 \x00", "12 " * 50_000)
"""Unusual completions: empty, with any characters, and very long."""
SHOWN_CHARACTERS = 60

Scored = list[tuple[Scorable, RewardResult]]


@dataclass
class ProjectUnderTest:
    """A config for reinforcement learning and its files; the checks share one run of two steps."""

    config_path: str | Path
    completions: Sequence[str] = ()
    """Completions that every reward should distinguish, besides the values of the prompts' columns."""

    @functools.cached_property
    def folder(self) -> Path:
        """The folder of the tiny model and the run, deleted with this object."""
        folder = Path(tempfile.mkdtemp(prefix="vectorlm-project-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    @functools.cached_property
    def config(self) -> Config:
        """The config, without the overrides of the checks."""
        return load_config(self.config_path)

    @property
    def rl(self) -> RLSettings:
        """The section `rl` of the config."""
        if self.config.rl is None:
            raise ConfigError(f"{self.config_path} needs a section rl for these checks. Add it.")
        return self.config.rl

    @functools.cached_property
    def model(self) -> Path:
        """A tiny model with the tokenizer of the config's model, or of SmolLM2 if that tokenizer is not available."""
        try:
            tokenizer = load_tokenizer(self.config.model)
        except EngineError:
            small = self.folder / "smollm2"
            model_command(Namespace(name=SMALL, path=str(small)))
            tokenizer = load_tokenizer(small)
        save_tiny_model(self.folder / "model", tokenizer)
        return self.folder / "model"

    @property
    def overrides(self) -> list[str]:
        """Overrides that make the run short and small; `preflight` accepts them for every valid config."""
        collect = self.rl.collect
        num_prompts = min(collect.prompts_per_step, NUM_PROMPTS)
        # vLLM refuses fewer than min_tokens.
        max_tokens = max(
            min(collect.sampling["max_tokens"] or MAX_TOKENS, MAX_TOKENS),
            collect.sampling.get("min_tokens") or 0,
        )
        longest = resolve_model(self.config).train_parameters.max_seq_len
        if longest == -1:
            # The config's model is not here. A micro-batch must have room for a whole group of these sequences.
            longest = self.rl.update.max_tokens_per_micro_batch // collect.group_size
        changes: dict[str, Any] = {
            "model": str(self.model),
            # The run writes only to this folder.
            "train_parameters.output_dir": str(self.folder / "run"),
            "evaluation.output_jsonl_path": None,
            "trackers": {},
            "enable_wandb_logging": False,
            "push_to_hub": None,
            # Two short steps, without a profile, which would begin later.
            "rl.max_steps": 2,
            "rl.prompts_per_step": num_prompts,
            "rl.num_mini_batches": min(self.rl.update.num_mini_batches, num_prompts),
            "rl.sampling_params.max_tokens": max_tokens,
            "rl.overlong_buffer_tokens": min(collect.overlong_buffer_tokens, max_tokens),
            "rl.critic.warmup_steps": min(self.rl.critic.warmup_steps, 1),
            "train_parameters.max_seq_len": min(longest, MAX_SEQ_LEN),
            "train_parameters.profile_steps": 0,
            # Without checkpoints there is no best checkpoint.
            "train_parameters.checkpointing_enabled": False,
            "train_parameters.keep_best": False,
            # One rank that computes in float32, like the engine.
            **{f"train_parameters.{kind}_parallel": 1 for kind in ("context", "tensor", "expert")},
            "train_parameters.dtype": "float32",
            "train_parameters.use_mp": False,
            "train_parameters.use_flash_attention": False,
            "train_parameters.quantization": None,
            # The config's adapters fit its own model, and name its layers. Environments and judges may need some.
            "train_parameters.adapters": None,
            "train_parameters.merge_adapters": False,
            "train_parameters.lora_peft_config": {"r": 4} if self.config.asks_adapters else None,
            "train_parameters.share_base": None,
            # The tiny model has no experts.
            "train_parameters.router_aux_loss_coef": None,
            "rl.router_replay": "off",
            # A tiny model's answers are similar and cut off. Train on all of them, to compare them with the engine's.
            "rl.algorithm.dynamic_sampling": False,
            "rl.drop_truncated": False,
            "rl.correction": {},
        }
        if self.config.engine.inference in ("vllm", "server"):
            # Arguments of vLLM or a server fit the config's model and devices.
            ours = to_plain(replace(self.config.engine, engine_args={}))
            own = {"inference": "vllm", "dtype": "float32", "kv_cache_memory_bytes": 64 << 20}
            changes["engine"] = {**ours, **own}
        return [f"{name}={json.dumps(value)}" for name, value in changes.items()]

    @functools.cached_property
    def run(self) -> Path:
        """The folder of a run of two steps.

        Raises:
            RankFailed: Training failed; further calls raise this without another run.
        """
        from vectorlm.runs.reinforcement import reinforce

        if (self.folder / "run").exists():
            raise RankFailed("the run of two steps failed before.")
        launch(reinforce, preflight(load_config(self.config_path, self.overrides), 1), world_size=1)
        return self.folder / "run"

    @functools.cached_property
    def scored(self) -> dict[str, Scored]:
        """Results of every reward for completions made of the prompts' columns, and for `completions`."""
        return self.score(self.made_of)

    def made_of(self, columns: Mapping[str, Any]) -> list[str]:
        """Make completions of a prompt's columns."""
        return ["", "no idea", *(str(value) for value in columns.values()), *self.completions]

    def score(self, texts: Callable[[Mapping[str, Any]], Sequence[str]]) -> dict[str, Scored]:
        """Score `texts` of a prompt's columns with every reward, for some prompts of its source."""
        scored: dict[str, Scored] = {}
        with WorkerPool(1) as pool:
            for source in self.rl.by_source.values():
                records = islice(read_prompts(source.prompts, is_held_out=False), NUM_PROMPTS)
                items = [
                    Scorable(text, record.prompt, (), record.columns, chat_of(record.prompt, text))
                    for record in records
                    for text in texts(record.columns)
                ]
                # Rewards that read an environment's metrics, or ask the run's engine, are called only in the run.
                for name in source.rewards:
                    if (
                        name in self.config.judges
                        or "environment" in RewardSignature.of(get_reward(name)).kinds
                    ):
                        continue
                    reward = RewardFunction(name, pool, timeout_s=self.rl.reward.reward_timeout_s)
                    scored.setdefault(name, []).extend(zip(items, reward.score(items), strict=True))
        return scored


def save_tiny_model(path: Path, tokenizer: Any) -> None:
    """Save a Llama of two narrow blocks with random weights, and a tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=MAX_SEQ_LEN,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


def rewards_survive_any_completion(project: ProjectUnderTest) -> None:
    """No reward raises or times out for an empty, unusual or huge completion."""
    for name, scored in project.score(lambda columns: STRANGE).items():
        for item, result in scored:
            assert result.error is None, f"{name}: {item.failure(result.error or '')}"


def rewards_are_deterministic(project: ProjectUnderTest) -> None:
    """The same completions have the same rewards, also in another process."""
    second = project.score(project.made_of)
    for name, scored in project.scored.items():
        for (item, one), (_, other) in zip(scored, second[name], strict=True):
            assert repr(one.reward) == repr(other.reward), (
                f"{name} gave {one.reward} and then {other.reward} for {item.text[:SHOWN_CHARACTERS]!r}"
            )


def rewards_tell_completions_apart(project: ProjectUnderTest) -> None:
    """A reward that is the same for all completions teaches nothing."""
    for name, scored in project.scored.items():
        rewards = {repr(result.reward) for _, result in scored}
        texts = sorted({item.text[:SHOWN_CHARACTERS] for item, _ in scored})[:NUM_PROMPTS]
        assert len(rewards) > 1, (
            f"{name} gave {rewards.pop()} to each of {len(scored)} completions, such as {texts}. Name some that it "
            "should tell apart: ProjectUnderTest(config, completions=[...])."
        )


def two_steps_train(project: ProjectUnderTest) -> None:
    """Two steps are sampled by vLLM, scored, and trained on; environments play and close without an error."""
    steps = [row["step"] for row in read_lines(project.run / "metrics.jsonl") if row["step"]]
    assert steps == [1, 2], f"{project.run} has steps {steps}"


def engine_and_trainer_agree(project: ProjectUnderTest) -> None:
    """Engine and trainer report the same log-probabilities; turns are trained on as they were sampled."""
    gaps = [row[GAP] for row in read_lines(project.run / "metrics.jsonl") if GAP in row]
    assert max(gaps, default=math.inf) < LOGPROB_TOLERANCE, f"{GAP} is {gaps}"


def each_step_samples_from_the_weights_before(project: ProjectUnderTest) -> None:
    """Every step samples from the weights of the step before; with `rl.async`, up to `max_staleness` steps older."""
    versions = {(row["train_step"], row["version"]) for row in read_lines(project.run / "rollouts.jsonl")}
    allowed = 0 if project.rl.async_ is None else project.rl.async_.max_staleness
    late = sorted((step, version) for step, version in versions if step - 1 - version > allowed)
    assert not late, f"steps and the versions that they sampled from: {late}"


GAP = "sampler/logprob_gap_max"
PROJECT_CHECKS: tuple[Callable[[ProjectUnderTest], None], ...] = (
    rewards_survive_any_completion,
    rewards_are_deterministic,
    rewards_tell_completions_apart,
    two_steps_train,
    engine_and_trainer_agree,
    each_step_samples_from_the_weights_before,
)
"""The checks, the fastest first; a check raises `AssertionError` if the project is wrong."""
