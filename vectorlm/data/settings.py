"""Settings for datasets and sources of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Predicate
from pydantic import Field

from vectorlm.settings import NonNegativeInt, PathText, PositiveInt, ReadIf, Separator, Text, UnitInterval

Label = Annotated[int, Field(ge=-(2**31), lt=2**31, description="an integer of 32 bits", examples=["-100"])]
EvaluationFolders = Annotated[
    PathText | Mapping[str, PathText],
    Predicate(bool),
    Field(description="the path of a folder, or `NAME: path` lines", examples=["data/eval"]),
]


Overlong = Literal["error", "drop", "truncate_left"]
"""Treatment of a prompt that leaves no room for `max_tokens`."""


@dataclass(frozen=True, kw_only=True)
class DatasetSettings:
    """Settings for the preprocessed datasets of training and evaluation."""

    ignore_index: int = -100
    """Label of tokens outside the loss."""
    eval_bs: Annotated[PositiveInt | None, ReadIf("dataset.eval_ds")] = None
    """Sequences per rank in one evaluation batch; null takes `train_bs`."""
    train_bs: PositiveInt
    """Sequences per rank in one training micro-batch."""
    train_ds: PathText
    """Folder of the preprocessed training dataset."""
    eval_ds: EvaluationFolders | None = None
    """Folder of the preprocessed evaluation dataset; or several folders by name, logged as `eval/NAME/loss` too. null
    computes no loss on held-out text."""

    @property
    def held_out(self) -> Mapping[str, str]:
        """The folders of the evaluation datasets by name; a single one has the name ""."""
        return {"": self.eval_ds} if isinstance(self.eval_ds, str) else self.eval_ds or {}


@dataclass(frozen=True, kw_only=True)
class PreprocessSettings:
    """Settings for preprocessing, which turns text into the datasets above."""

    load_path: PathText
    """Folder from `save_to_disk`; JSONL, JSON, Parquet, CSV or plain-text file, or a folder or glob of such files; or
    the name of a dataset on the Hub."""
    save_path: PathText
    """Folder for the preprocessed dataset; an older dataset there is replaced once the new one is complete."""
    data_field: Text | None = None
    """Column with the text or a list of messages; null takes the first that exists of `messages`, `prompt` with
    `completion`, and `text`."""
    examples: Literal["texts", "pairs", "labels", "steps"] = "texts"
    """Content of a row: a text to fine-tune on (`texts`); `chosen` and `rejected`, with optional `prompt` and `margin`
    (`pairs`); `prompt`, `completion` and `label`, true for a good completion (`labels`); or `prompt`, a list of steps
    `completions`, and `labels`, true for right steps (`steps`)."""
    step_separator: Annotated[Separator, ReadIf("dataset_preprocess.examples", ("steps",))] = "\n"
    """Text after each step."""
    ignore_index: Label = -100
    """Label of tokens outside the loss; must equal `dataset.ignore_index`."""
    dataset_format: str = "hf"
    """Not read; accepted because existing files have it."""
    dataset_type: str | None = None
    """Not read; accepted because existing files have it."""
    packing_type: Literal["full", "partial", "best_fit"] | None = None
    """How texts fill rows: `full` joins all texts and cuts them into rows of `max_seq_len`; `partial` cuts each long
    text by itself; `best_fit` packs whole texts to minimise unused space (longer texts are cut first). The texts of a
    row do not attend to each other, unless rows are padded (`pack_rows`)."""
    overlap: NonNegativeInt = 0
    """Tokens that each chunk repeats from the previous chunk when packing; they count in the loss only once."""
    add_bos_eos_tokens: bool = True
    """Put the tokenizer's BOS and EOS around each text, or around each chunk when packing. An EOS in the middle of a
    text does not count in the loss. Messages get the tokens of their chat template instead."""
    from_disk: bool = True
    """Not read, because `load_path` decides; accepted because existing files have it."""
    seperator: str | None = None
    """Text up to and including the first separator does not count in the loss; rows without it are skipped. null counts
    the whole text. May also be written `separator`."""
    assistant_only_loss: bool = False
    """For messages, count only the assistant's text in the loss, including the end of its turn."""
    split: str | None = None
    """Split to read, such as `train[:10%]` or `train+test`; null takes the only one. Files belong to the split `train`,
    unless their names say otherwise (`test.jsonl`)."""
    hub_config: str | None = None
    """Configuration of a dataset on the hub that has several, such as `main`."""
    truncate: bool = False
    """Truncate texts at `max_seq_len` tokens, without packing or with `best_fit`. A truncated text ends in EOS, but
    messages do not."""
    overlong_prompts: Annotated[Overlong, ReadIf("dataset_preprocess.examples", ("pairs", "labels"))] = "drop"
    """Treatment of preference data over `max_seq_len`: stop (`error`), leave the row out (`drop`), or cut the beginning
    of its prompt off (`truncate_left`)."""
    pre_pend: str | None = None
    """Text put before each example; null puts none."""
    num_proc: PositiveInt = 1
    """Number of processes for tokenising."""


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """Settings for the model's chat template."""

    chat_template: PathText | None = None
    """File with a chat template (Jinja) that replaces the tokenizer's, also in `final-model`; null keeps the
    tokenizer's."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template for all chats: prompts, datasets, evaluations and requests of agents. For example
    `{enable_thinking: false}` for Qwen3."""


PLAIN_CHAT = ChatSettings()
"""The tokenizer's own template, without variables."""


@dataclass(frozen=True, kw_only=True)
class CurriculumSettings:
    """Settings for levels of difficulty that follow the mean score. All attributes of the task's curriculum have the
    same level."""

    rise_above: UnitInterval = 0.8
    """Mean score at or above which the next level begins."""
    fall_below: UnitInterval = 0.2
    """Mean score at or below which the previous level returns."""
    num_groups: PositiveInt = 32
    """Number of groups whose scores are averaged: the newest groups of the level. The level cannot change before it has
    this many groups."""


@dataclass(frozen=True, kw_only=True)
class PromptSettings:
    """Settings for a source of prompts: rows from `path`, or tasks of `reasoning_gym` or `verifiers`."""

    path: PathText | None = None
    """JSONL or Parquet file, folder of `Dataset.save_to_disk`, or name of a dataset on the hub."""
    split: Text | None = None
    """Rows of the dataset at `path`: `train`, or an expression such as `train[:1000]`; null takes the only split."""
    hub_config: Text | None = None
    """Configuration of a dataset on the hub, for one that has several."""
    reasoning_gym: Text | None = None
    """Name of a task of reasoning-gym, or `composite` for several."""
    verifiers: Text | None = None
    """Name of an installed taskset of verifiers, whose environment plays its tasks."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The task's own settings. For `composite`: the list `datasets` with `name`, `weight` and `config` of each task.
    For `verifiers`: the keys of its `[env]` section (`taskset`, `agent`), and `select`."""
    size: PositiveInt | None = None
    """Number of the task's items; null means 10,000 items to train on, and 100 held-out items."""
    seed: NonNegativeInt | None = None
    """Item i is made with seed + i; null means 0 for items to train on, and 1,073,741,824 for held-out items."""
    level: NonNegativeInt | None = None
    """Difficulty of the items by the task's curriculum, from 0; null means its defaults, or 0 with `curriculum`."""
    curriculum: CurriculumSettings | None = None
    """Rules by which the difficulty follows the scores, from `level` on; null keeps the difficulty."""
    system_prompt: Text | None = None
    """System message before each question: a text, or the name of a system prompt of reasoning-gym (`default` asks for
    the answer between `<answer>` tags); null adds none."""
    form: Literal["chat", "text"] = "chat"
    """Whether a question is a chat message or a text."""


PromptSource = Annotated[
    PathText | Annotated[tuple[str, ...], Field(strict=False)] | PromptSettings,
    Predicate(lambda value: isinstance(value, PromptSettings) or (bool(value) and all(value))),
    Field(
        description="a list of texts, none of them empty; the path of a JSONL or Parquet file or of a saved dataset, a "
        "name on the hub, `reasoning_gym:TASK` or `verifiers:TASKSET`; or a section",
        examples=["data/prompts.jsonl"],
    ),
]

SHORT_FORMS = ("reasoning_gym", "verifiers")


def in_full(source: Any) -> Any:
    """Return the section for a path or ``reasoning_gym:TASK``; other values are returned unchanged."""
    if not isinstance(source, str):
        return source
    kind, _, name = source.partition(":")
    given: dict[str, Any] = {kind: name} if kind in SHORT_FORMS else {"path": source}
    return PromptSettings(**given)
