"""The tokeniser: from a row of a dataset to tokens, and which of them count in the loss."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vectorlm.data.chat import Chat, Message, messages_of, weight_of
from vectorlm.data.encoding import (
    chat_in,
    encode,
    encode_apart,
    end_tokens,
    require_whole_characters,
    text_of_message,
    tools_of,
)
from vectorlm.data.preference import COLUMNS, READ_BESIDE, common_beginning, value_of
from vectorlm.data.settings import PreprocessSettings
from vectorlm.data.source import Source
from vectorlm.errors import ConfigError, DatasetError
from vectorlm.ranks.wait import Progress

if TYPE_CHECKING:
    from datasets import Dataset

ROWS_PER_CALL = 200
NO_END = "no end of text counts in the loss, from which the model would learn to stop"
_BY_DEFAULT = (("messages",), ("prompt", "completion"), ("text",))
"""The columns to take where `data_field` is null: the first of these that are there."""


@dataclass(frozen=True)
class Tokens:
    """What one row became."""

    input_ids: list[int]
    counted: list[bool]
    reason: str
    """Why there are no tokens, where there are none."""
    remarks: Sequence[str] = ()
    """What the reader of the summary should know of this row."""
    num_first: int = 0
    """Of a pair, how many of the tokens are the chosen text's; the others are the rejected one's."""
    step_labels: Sequence[bool] = ()
    """Of steps, whether each is right; their last tokens count."""

    @property
    def skipped(self) -> str:
        """Why the row is skipped; empty where it is not."""
        return "" if self.input_ids else self.reason


@dataclass(frozen=True)
class Tokeniser:
    """Turns rows of one form into tokens, without the special tokens that are put around texts."""

    source: Source
    tokenizer: Any
    settings: PreprocessSettings
    columns: tuple[str, ...]
    """The column of text or messages, or those of the prompt and the completion."""
    is_chat: bool
    """Whether rows are messages rather than text."""
    progress: Progress
    named: set[str] = field(default_factory=set)
    """Columns of lines that this process has named as not read."""

    @property
    def unread(self) -> list[str]:
        """Columns of a table that nothing reads; lines name theirs as they come."""
        return [] if self.source.lines else self._unread(self.source.dataset.column_names)

    def __call__(self, batch: Mapping[str, Sequence[Any]], indices: Sequence[int], rank: int | None) -> dict:
        """Tokenise some rows, as `datasets.Dataset.map` wants it."""
        if rank is not None:
            # In a process of its own: Ctrl-C reaches it too, and is for the one that started it.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        named = list(self.source.rows(batch, indices))
        filled = [(name, row) for name, row in named if row is not None]
        values = iter([value_of(*each, self.settings.examples) for each in filled])
        is_pair = self.settings.examples == "pairs"
        parts = filled
        if is_pair:
            parts = [(name, half) for name, row in filled for half in self._halves(name, row)]
        if self.settings.examples == "steps":
            tokens = self._steps(filled)
        else:
            tokens = [self._chat(*each) for each in parts] if self.is_chat else self._texts(parts)
        if is_pair:
            has_prompt = [self.is_chat or bool(half["prompt"]) for _, half in parts[::2]]
            tokens = list(map(_joined, tokens[::2], tokens[1::2], has_prompt))
        found = iter(tokens)
        results = [Tokens([], [], "an empty line") if row is None else next(found) for _, row in named]
        if not rank:
            self.progress.add(len(named))
        return {
            "input_ids": [each.input_ids for each in results],
            "counted": [each.counted for each in results],
            "skipped": [each.skipped for each in results],
            "remarks": [list(each.remarks) for each in results],
            "unread": [self._unread(row) if self.source.lines and row else [] for _, row in named],
            "name": [
                name if each.skipped or each.remarks or self.settings.examples != "texts" else ""
                for (name, _), each in zip(named, results, strict=True)
            ],
            "num_first": [each.num_first for each in results],
            "step_labels": [list(each.step_labels) for each in results],
            "value": [0.0 if row is None else next(values) for _, row in named],
        }

    def _unread(self, columns: Iterable[str]) -> list[str]:
        new = [name for name in columns if name not in self._read and name not in self.named]
        self.named.update(new)
        return new

    @property
    def _read(self) -> tuple[str, ...]:
        examples = self.settings.examples
        columns = COLUMNS.get(examples, self.columns) + READ_BESIDE.get(examples, ())
        return (*columns, "tools", "weight") if self.is_chat else columns

    def map(self, path: Path) -> Dataset:
        """Tokenise all rows, in `num_proc` processes, to a file at `path`: `Tokens`, and the names of skipped rows."""
        from datasets import Features, Sequence, Value

        dataset = self.source.dataset.with_format(None)
        if self.source.lines is None:
            read = [name for name in self._read if name in dataset.column_names]
            dataset = dataset.select_columns(read)
        features = Features(
            input_ids=Sequence(Value("int32")),
            counted=Sequence(Value("bool")),
            skipped=Value("string"),
            remarks=Sequence(Value("string")),
            unread=Sequence(Value("string")),
            name=Value("string"),
            num_first=Value("int32"),
            step_labels=Sequence(Value("bool")),
            value=Value("float64"),
        )
        try:
            return dataset.map(
                self,
                batched=True,
                batch_size=ROWS_PER_CALL,
                writer_batch_size=ROWS_PER_CALL,
                with_indices=True,
                with_rank=True,
                remove_columns=dataset.column_names,
                features=features,
                num_proc=self.settings.num_proc if self.settings.num_proc > 1 else None,
                load_from_cache_file=False,
                cache_file_name=str(path),
                new_fingerprint="tokens",
                desc="tokenise",
            )
        except Exception as error:
            # datasets 5.2 waits for its processes after an interrupt, and raises that this took too long.
            if isinstance(error.__context__, KeyboardInterrupt | SystemExit):
                raise error.__context__ from None
            raise

    def _texts(self, rows: Sequence[tuple[str, Any]]) -> list[Tokens]:
        """Tokenise the prompt by itself, as it will be when the model continues it, and leave it out of the loss."""
        pairs = [self._pair(name, row) for name, row in rows]
        encoded = encode_apart(self.tokenizer, [pair or ("", "") for pair in pairs])
        return [
            self._text(*tokens) if pair else Tokens([], [], f"no separator {self.settings.seperator!r}")
            for pair, tokens in zip(pairs, encoded, strict=True)
        ]

    def _text(self, prompt: list[int], completion: list[int]) -> Tokens:
        """Join a prompt, which does not count, and a completion, without the BOS and EOS that are put around them."""
        if len(self.columns) == 2 and not completion:
            return Tokens([], [], "an empty completion")
        tokens, counted = prompt + completion, [False] * len(prompt) + [True] * len(completion)
        bos, eos, remarks = None, None, []
        if self.settings.add_bos_eos_tokens:
            bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        first, last = int(tokens[:1] == [bos]), len(tokens) - (tokens[-1:] == [eos])
        if (first, last) != (0, len(tokens)):
            remarks.append("the text has a BOS or EOS of its own, which add_bos_eos_tokens does not double")
        if bos is not None and not self._prompts_begin_with_bos:
            remarks.append("a BOS is put before the text, and the tokenizer puts none before a prompt")
        if eos is None and not any(each in self.ends for each in completion):
            remarks.append(NO_END)
        return Tokens(tokens[first:last], counted[first:last], "an empty text", remarks)

    def _steps(self, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Tokens]:
        """Lay each prompt and its steps end to end, as TRL does: tokenised one by one, a separator after each step."""
        prompts = self._encode([pair[1] for name, row in rows if (pair := self._pair(name, row))])
        steps = [(name, each) for name, row in rows for each in self._value(name, row, "completions")]
        for name, step in steps:
            if not isinstance(step, str):
                raise DatasetError(
                    f"{name} holds {str(step)[:60]!r} among its steps, in 'completions': it must be text. Correct it, "
                    "or remove the row."
                )
        (separator,) = self._encode([self.settings.step_separator])
        encoded = iter(self._encode([step for _, step in steps]))
        bos = [self.tokenizer.bos_token_id] if self.settings.add_bos_eos_tokens else []
        found = []
        for prompt, (_, row) in zip(prompts, rows, strict=True):
            texts = [next(encoded) + separator for _ in row["completions"]]
            start = prompt[prompt[:1] == bos :]
            if not all(texts):
                found.append(Tokens([], [], "a step without tokens"))
                continue
            tokens, counted = list(start), [False] * len(start)
            for text in texts:
                tokens += text
                counted += [False] * (len(text) - 1) + [True]
            found.append(Tokens(tokens, counted, "", step_labels=row["labels"]))
        return found

    def _halves(self, name: str, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Make two rows of a pair, each of a prompt and a completion; with messages the prompt may be in both texts."""
        texts = [self._value(name, row, column) for column in COLUMNS["pairs"]]
        prompt = "" if row.get("prompt") is None else self._value(name, row, "prompt")
        if self.is_chat:
            texts = [messages_of(name, each) for each in texts]
            shared = texts[0][: common_beginning(*texts)]
            if prompt and not isinstance(prompt, str):
                prompt = messages_of(name, prompt)
                texts = [_behind(name, prompt, each) for each in texts]
            elif prompt and prompt.strip() not in "\n".join(map(text_of_message, shared)):
                raise DatasetError(
                    f"{name}: the text in 'prompt', {prompt[:60]!r}, is not in the messages that both begin with. "
                    "Write it as a list of messages, or remove it."
                )
            else:
                prompt, texts = shared, [each[len(shared) :] for each in texts]
        beside = {each: row[each] for each in ("tools", "weight") if each in row}
        return [{**beside, "prompt": prompt, "completion": each} for each in texts]

    def _pair(self, name: str, row: Mapping[str, Any]) -> tuple[str, str] | None:
        """Split a row into a prompt and a completion; None where it lacks the separator."""
        texts = [self._value(name, row, column) for column in self.columns]
        for column, text in zip(self.columns, texts, strict=True):
            if not isinstance(text, str):
                raise DatasetError(
                    f"{name} holds {str(text)[:60]!r} in {column!r}: it must be text. Remove the row, or choose "
                    "another data_field."
                )
        texts[0] = (self.settings.pre_pend or "") + texts[0]
        if len(texts) == 2:
            return texts[0], texts[1]
        if not self.settings.seperator:
            return "", texts[0]
        before, found, after = texts[0].partition(self.settings.seperator)
        return (before + found, after) if found or not texts[0] else None

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []

    def _chat(self, name: str, row: Mapping[str, Any]) -> Tokens:
        parts = [messages_of(name, self._value(name, row, column)) for column in self.columns]
        if not all(parts):
            return Tokens([], [], "no messages")
        if weight_of(name, row) == 0:
            return Tokens([], [], "a weight of 0")
        if len(parts) == 2 and self.settings.examples != "pairs":
            parts[1] = _behind(name, *parts)
        try:
            tools = tools_of(row)
        except ValueError as error:
            raise DatasetError(f"{name}: {error}. Correct it, or remove the row.") from error
        messages = [message for part in parts for message in part]
        left_out = {index for index, message in enumerate(messages) if weight_of(name, message) == 0}
        messages, remarks = self._rendered(name, messages, tools)
        silent = {
            index
            for index, each in enumerate(messages)
            if each["role"] == "assistant" and not any(each[key] for key in each if key != "role")
        }
        if silent:
            remarks.append("the assistant says nothing in a turn, which does not count")
        tokens, counted = self.chat.tokenise(
            name,
            messages,
            tools,
            num_prompt=len(parts[0]) if len(parts) == 2 else None,
            only_assistant=self.settings.assistant_only_loss,
            left_out=left_out | silent,
        )
        if not any(counted) and tokens:
            return Tokens([], [], "nothing that the assistant says")
        if not any(counts and token in self.ends for token, counts in zip(tokens, counted, strict=True)):
            remarks.append(NO_END)
        return Tokens(tokens, counted, "no tokens", remarks)

    def _rendered(self, name: str, messages: list[Message], tools: Any) -> tuple[list[Message], list[str]]:
        """Return messages without the keys that the template does not render, and remarks on how it renders them."""
        remarks = []
        messages = [{key: value for key, value in each.items() if key != "weight"} for each in messages]
        text = self.chat.render(name, messages, tools)
        if tools and self.chat.renders_same(name, text, messages, None):
            remarks.append("the chat template does not render the column 'tools'")
        for key in sorted({key for message in messages for key in message} - {"role", "content"}):
            others = [{name: value for name, value in each.items() if name != key} for each in messages]
            if self.chat.renders_same(name, text, others, tools):
                messages = others
                remarks.append(f"the chat template does not render {key!r} of messages")
        return messages, [*remarks, *self.chat.changes(name, messages, tools, text)]

    @cached_property
    def chat(self) -> Chat:
        """The tokenizer's chat template."""
        return Chat(self.tokenizer)

    @cached_property
    def _prompts_begin_with_bos(self) -> bool:
        return encode("a", lambda: self.tokenizer)[:1] == [self.tokenizer.bos_token_id]

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return end_tokens(self.tokenizer)

    def _value(self, name: str, row: Mapping[str, Any], column: str) -> Any:
        if column not in row:
            raise DatasetError(
                f"{name} has no {column!r}, but {', '.join(row) or 'nothing'}. Correct it, or remove the row."
            )
        try:
            value = _chat_in(column, row[column])
            require_whole_characters(value)
        except ValueError as error:
            raise DatasetError(
                f"{name}: {column!r} cannot be read: {error}. Correct it, or remove the row."
            ) from error
        if not self.is_chat and isinstance(row[column], str) and not isinstance(value, str):
            raise DatasetError(
                f"{name} holds messages as JSON text in {column!r}, and the first row holds plain text. Write all rows "
                "in one form. A column called 'text' may hold any text."
            )
        return value


def _chat_in(column: str, value: Any) -> Any:
    """Return the messages in a column; the column ``text`` is text whatever it holds."""
    return value if column == "text" else chat_in(value)


def _behind(name: str, prompt: Sequence[Message], messages: list[Message]) -> list[Message]:
    """Return the messages behind those of `prompt`, which they may repeat."""
    if messages[: len(prompt)] == prompt:
        return messages[len(prompt) :]
    first = messages[0] if messages else {}
    anew = {"system", "developer"} | ({"user"} & {prompt[-1]["role"]})
    if first and (first["role"] in anew or first == prompt[0]):
        raise DatasetError(
            f"{name}: the messages neither begin with those in 'prompt' nor continue them: the first is "
            f"{str(first)[:60]!r}. Remove the prompt, or the messages that repeat it."
        )
    return messages


def _joined(chosen: Tokens, rejected: Tokens, has_prompt: bool) -> Tokens:
    """Make one row of the two texts of a pair; without a prompt, what both begin with does not count."""
    if reason := chosen.skipped or rejected.skipped:
        return Tokens([], [], reason)
    if chosen.input_ids == rejected.input_ids:
        return Tokens([], [], "chosen and rejected the same")
    shared = 0 if has_prompt else common_beginning(chosen.input_ids, rejected.input_ids)
    counted = [[False] * shared + each.counted[shared:] for each in (chosen, rejected)]
    remarks = list(dict.fromkeys((*chosen.remarks, *rejected.remarks)))
    num_first = len(chosen.input_ids)
    return Tokens(chosen.input_ids + rejected.input_ids, counted[0] + counted[1], "", remarks, num_first)


def make_tokeniser(source: Source, tokenizer: Any, settings: PreprocessSettings) -> Tokeniser:
    """Find out from the first row which columns are read, and whether they hold text or messages.

    Raises:
        DatasetError: There is no row, or no such column.
        ConfigError: A setting does not fit this form, or the tokenizer has no chat template.
    """
    firsts = (row for batch in source.dataset.with_format(None).iter(1) for _, row in source.rows(batch, [0]))
    row = next(filter(None, firsts), None)
    if row is None:
        raise DatasetError("the dataset has no rows. Check load_path and split.")
    asked = settings.data_field
    columns: tuple[str, ...] = (asked,) if asked else ()
    columns = columns or next((some for some in _BY_DEFAULT if set(some) <= set(row)), ())
    columns = COLUMNS.get(settings.examples, columns)
    missing = [column for column in columns if column not in row]
    if missing or not columns:
        lacks = repr(missing[0]) if missing else "'messages', 'prompt' with 'completion', or 'text'"
        fix = f"{'' if asked else 'name columns so, or '}data_field must be one of"
        if settings.examples != "texts":
            fix = f"rows of dataset_preprocess.examples={settings.examples} need it, and these have"
        raise DatasetError(f"the dataset has no column {lacks}: {fix} {', '.join(row)}.")
    try:
        first = _chat_in(columns[0], row[columns[0]])
    except ValueError:
        first = {}  # The error is raised where the row has a name.
    is_list = isinstance(first, list) and not any(isinstance(each, str) for each in first)
    is_chat = (is_list or isinstance(first, Mapping)) and settings.examples != "steps"
    if settings.examples != "texts":
        columns = ("prompt",) if settings.examples == "steps" else ("prompt", "completion")
    share = -(-len(source.dataset) // settings.num_proc)
    made = Tokeniser(source, tokenizer, settings, columns, is_chat, Progress("tokenise, rows", share))
    _require_effect(made)
    return made


def _require_effect(tokeniser: Tokeniser) -> None:
    """Refuse settings that this form of rows does not read."""
    settings, is_chat = tokeniser.settings, tokeniser.is_chat
    is_pair = len(tokeniser.columns) == 2
    what = "messages" if is_chat else "a prompt and a completion" if is_pair else "text"
    unread = {
        "seperator": bool(settings.seperator) and (is_chat or is_pair),
        "pre_pend": bool(settings.pre_pend) and is_chat,
        "assistant_only_loss": settings.assistant_only_loss and not is_chat,
    }
    fix = "Leave it out, or choose another data_field."
    if settings.examples != "texts":
        fix = "Leave it out."
        names = ("data_field", "packing_type", "overlap", "truncate", "seperator")
        unread |= {name: bool(getattr(settings, name)) for name in names}
    if settings.examples == "steps" and settings.ignore_index in (0, 1):
        raise ConfigError(
            f"dataset_preprocess.ignore_index={settings.ignore_index} is the label of a step too. Use -100."
        )
    for name in (name for name, is_unread in unread.items() if is_unread):
        raise ConfigError(
            f"dataset_preprocess.{name}={getattr(settings, name)!r} has no effect: the rows hold {what} "
            f"({', '.join(tokeniser.columns)}). {fix}"
        )
    if is_chat:
        _ = tokeniser.chat
