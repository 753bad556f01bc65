"""Tokenise the rows of a dataset, and decide which tokens count in the loss."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vectorlm.data.chat import (
    Chat,
    Message,
    chat_in,
    common_beginning,
    messages_behind,
    messages_of,
    weight_of,
)
from vectorlm.data.encoding import (
    encode,
    encode_apart,
    end_tokens,
    require_whole_characters,
    text_of_message,
    tools_of,
)
from vectorlm.data.images import COLUMNS as IMAGES
from vectorlm.data.images import (
    Picture,
    column_images,
    image_tokens_of,
    images_of,
    takes_images,
    with_images,
)
from vectorlm.data.pack import COLUMNS, value_of
from vectorlm.data.settings import PreprocessSettings
from vectorlm.data.source import Source
from vectorlm.errors import ConfigError, DatasetError
from vectorlm.ranks.wait import Progress

if TYPE_CHECKING:
    from datasets import Dataset

ROWS_PER_CALL = 200
NO_IMAGE = "an image or video token in its text, but no image"
NO_END = "no end of text counts in the loss, so the model would not learn to stop"
_BY_DEFAULT = (("messages",), ("prompt", "completion"), ("text",))
"""The columns to read if `data_field` is null: the first of these that exist."""


@dataclass(frozen=True)
class Tokens:
    """A tokenised row."""

    input_ids: list[int]
    counted: list[bool]
    reason: str
    """The reason to skip the row if it has no tokens."""
    remarks: Sequence[str] = ()
    """Remarks on this row for the summary."""
    num_first: int = 0
    """Number of tokens of a pair's chosen text, which comes first."""
    step_labels: Sequence[bool] = ()
    """Whether each step is right; the last token of each step counts."""
    images: Sequence[tuple[str, int]] = ()
    """The path or ``data:`` URL of each image, and the index of its first token."""

    @property
    def skipped(self) -> str:
        """The reason to skip the row; empty if it is kept."""
        return "" if self.input_ids else self.reason


@dataclass(frozen=True)
class Tokeniser:
    """A tokeniser for rows of one form; it adds no special tokens around texts."""

    source: Source
    tokenizer: Any
    settings: PreprocessSettings
    columns: tuple[str, ...]
    """The column with text or messages, or the columns with prompt and completion."""
    is_chat: bool
    """Whether rows hold messages instead of text."""
    progress: Progress
    reported: set[str] = field(default_factory=set)
    """Unread columns of lines that this process has reported."""

    @property
    def unread(self) -> list[str]:
        """Unread columns of a table; unread columns of lines are reported with the rows."""
        return [] if self.source.lines else self._unread(self.source.dataset.column_names)

    def __call__(self, batch: Mapping[str, Sequence[Any]], indices: Sequence[int], rank: int | None) -> dict:
        """Tokenise some rows; `datasets.Dataset.map` calls this."""
        if rank is not None:
            # A worker process: Ctrl-C reaches it too, but the process that started it should handle it.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        rows = list(self.source.rows(batch, indices))
        reasons = [
            "an empty line" if row is None else "" if weight_of(name, row) else "a weight of 0"
            for name, row in rows
        ]
        filled = [row for row, reason in zip(rows, reasons, strict=True) if not reason]
        examples = self.settings.examples
        values = iter([value_of(name, row, examples) for name, row in filled])
        found = iter(self._tokens(filled))
        results = []
        for (name, row), reason in zip(rows, reasons, strict=True):
            tokens = Tokens([], [], reason) if reason else next(found)
            is_named = tokens.skipped or tokens.remarks or examples != "texts"
            results.append(
                {
                    "input_ids": tokens.input_ids,
                    "counted": tokens.counted,
                    "skipped": tokens.skipped,
                    "remarks": list(tokens.remarks),
                    "unread": self._unread(row) if self.source.lines and row else [],
                    "name": name if is_named else "",
                    "num_first": tokens.num_first,
                    "step_labels": list(tokens.step_labels),
                    "images": [image for image, _ in tokens.images],
                    "image_starts": [start for _, start in tokens.images],
                    "value": 0.0 if reason else next(values),
                }
            )
        if not rank:
            self.progress.add(len(rows))
        return {column: [result[column] for result in results] for column in results[0]}

    def _tokens(self, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterable[Tokens]:
        if self.settings.examples == "steps":
            return self._steps(rows)
        is_pair = self.settings.examples == "pairs"
        if is_pair:
            rows = [(name, half) for name, row in rows for half in self._halves(name, row)]
        tokens = [self._chat(name, row) for name, row in rows] if self.is_chat else self._texts(rows)
        if not is_pair:
            return tokens
        has_prompt = [self.is_chat or bool(half["prompt"]) for _, half in rows[::2]]
        return map(_joined, tokens[::2], tokens[1::2], has_prompt)

    def _unread(self, columns: Iterable[str]) -> list[str]:
        new = [name for name in columns if name not in self._read and name not in self.reported]
        self.reported.update(new)
        return new

    @property
    def _read(self) -> tuple[str, ...]:
        examples = self.settings.examples
        columns = COLUMNS.get(examples, self.columns) + (("prompt", "margin") if examples == "pairs" else ())
        return (*columns, "weight", *(("tools", *IMAGES) if self.is_chat else ()))

    def map(self, path: Path) -> Dataset:
        """Tokenise all rows to a file at `path`, in `num_proc` processes; its columns are the keys of `__call__`."""
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
            images=Sequence(Value("string")),
            image_starts=Sequence(Value("int32")),
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
            # datasets 5.2 waits for its processes after an interrupt, and then raises a time-out error.
            if isinstance(error.__context__, KeyboardInterrupt | SystemExit):
                raise error.__context__ from None
            raise

    def _texts(self, rows: Sequence[tuple[str, Any]]) -> list[Tokens]:
        """Tokenise prompts separately from completions, as for sampling; prompts do not count in the loss."""
        pairs = [self._pair(name, row) for name, row in rows]
        encoded = encode_apart(self.tokenizer, [pair or ("", "") for pair in pairs])
        return [
            self._text(*tokens) if pair else Tokens([], [], f"no separator {self.settings.seperator!r}")
            for pair, tokens in zip(pairs, encoded, strict=True)
        ]

    def _text(self, prompt: list[int], completion: list[int]) -> Tokens:
        """Join a prompt and a completion; with `add_bos_eos_tokens`, remove the text's own BOS and EOS."""
        if len(self.columns) == 2 and not completion:
            return Tokens([], [], "an empty completion")
        tokens, counted = prompt + completion, [False] * len(prompt) + [True] * len(completion)
        if not self.reserved.isdisjoint(tokens):
            return Tokens([], [], NO_IMAGE)
        bos, eos, remarks = None, None, []
        if self.settings.add_bos_eos_tokens:
            bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        first, last = int(tokens[:1] == [bos]), len(tokens) - (tokens[-1:] == [eos])
        if last - first < len(tokens):
            remarks.append("the text already has a BOS or EOS, which add_bos_eos_tokens does not double")
        if bos is not None and not self._prompts_begin_with_bos:
            remarks.append("a BOS is put before the text, although the tokenizer puts none before a prompt")
        if eos is None and not any(token in self.ends for token in completion):
            remarks.append(NO_END)
        return Tokens(tokens[first:last], counted[first:last], "an empty text", remarks)

    def _steps(self, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[Tokens]:
        """Join each prompt and its steps, which are tokenised one by one, with a separator after each, as in TRL."""
        prompts = self._encode([pair[1] for name, row in rows if (pair := self._pair(name, row))])
        steps = [(name, step) for name, row in rows for step in self._value(name, row, "completions")]
        for name, step in steps:
            if not isinstance(step, str):
                message = f"{name} holds the step {str(step)[:60]!r} in 'completions': it must be text."
                raise DatasetError(f"{message} Correct it, or remove the row.")
        encoded = iter(self._encode([self.settings.step_separator, *(step for _, step in steps)]))
        separator = next(encoded)
        bos = [self.tokenizer.bos_token_id] if self.settings.add_bos_eos_tokens else []
        for prompt, (_, row) in zip(prompts, rows, strict=True):
            texts = [next(encoded) + separator for _ in row["completions"]]
            if not all(texts):
                yield Tokens([], [], "a step without tokens")
                continue
            tokens = prompt[prompt[:1] == bos :]
            counted = [False] * len(tokens)
            for text in texts:
                tokens = tokens + text
                counted += [False] * (len(text) - 1) + [True]
            yield Tokens(tokens, counted, "", step_labels=row["labels"])

    def _halves(self, name: str, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Split a pair into two rows of a prompt and a completion; the texts may repeat the prompt's messages."""
        texts = [self._value(name, row, column) for column in COLUMNS["pairs"]]
        prompt = "" if row.get("prompt") is None else self._value(name, row, "prompt")
        if self.is_chat:
            texts = [messages_of(name, text) for text in texts]
            shared = texts[0][: common_beginning(*texts)]
            if prompt and not isinstance(prompt, str):
                prompt = messages_of(name, prompt)
                texts = [messages_behind(name, prompt, text) for text in texts]
            elif prompt and prompt.strip() not in "\n".join(map(text_of_message, shared)):
                raise DatasetError(
                    f"{name}: the text in 'prompt', {prompt[:60]!r}, must be in the messages that both texts begin "
                    "with. Write it as a list of messages, or remove it."
                )
            else:
                prompt, texts = shared, [text[len(shared) :] for text in texts]
        beside = {column: row[column] for column in ("tools", *IMAGES) if column in row}
        return [{**beside, "prompt": prompt, "completion": text} for text in texts]

    def _pair(self, name: str, row: Mapping[str, Any]) -> tuple[str, str] | None:
        """Split a row into a prompt and a completion; None if it lacks the separator."""
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
        if len(parts) == 2 and self.settings.examples != "pairs":
            parts[1] = messages_behind(name, *parts)
            if not parts[1]:
                return Tokens([], [], "an empty completion")
        parts[0] = self._with_images(name, parts[0], row)
        try:
            tools = tools_of(row)
        except ValueError as error:
            raise DatasetError(f"{name}: {error}. Correct it, or remove the row.") from error
        messages = [message for part in parts for message in part]
        left_out = {index for index, message in enumerate(messages) if weight_of(name, message) == 0}
        messages, remarks = self.chat.cleaned(name, messages, tools)
        silent = {
            index
            for index, message in enumerate(messages)
            if message["role"] == "assistant" and not any(message[key] for key in message if key != "role")
        }
        if silent:
            remarks.append("a turn of the assistant is empty, and does not count")
        tokens, counted = self.chat.tokenise(
            name,
            messages,
            tools,
            num_prompt=len(parts[0]) if len(parts) == 2 else None,
            only_assistant=self.settings.assistant_only_loss,
            left_out=left_out | silent,
        )
        images: list[tuple[str, int]] = []
        if pictures := images_of(messages):
            tokens, counted, images = self._expanded(name, tokens, counted, pictures)
        elif not self.reserved.isdisjoint(tokens):
            return Tokens([], [], NO_IMAGE)
        if not any(counted) and tokens:
            return Tokens([], [], "no text of the assistant")
        if not any(counts and token in self.ends for token, counts in zip(tokens, counted, strict=True)):
            remarks.append(NO_END)
        return Tokens(tokens, counted, "no tokens", remarks, images=images)

    def _with_images(self, name: str, messages: list[Message], row: Mapping[str, Any]) -> list[Message]:
        """Put the pictures of the column `images` into the first messages of a row."""
        try:
            return with_images(messages, column_images(row))
        except ValueError as error:
            raise DatasetError(f"{name}: {error}. Correct it, or remove the row.") from error

    def _expanded(
        self, name: str, tokens: Sequence[int], counted: Sequence[bool], pictures: Sequence[Picture]
    ) -> tuple[list[int], list[bool], list[tuple[str, int]]]:
        """Replace the placeholders of pictures by their tokens, which do not count in the loss."""
        settings = self.settings
        if settings.packing_type is not None or settings.truncate:
            raise DatasetError(
                f"{name} has images, which a cut of the row may go through. Set dataset_preprocess.packing_type: null "
                "and truncate: false; training lays rows end to end by itself."
            )
        image_tokens, found, counts = image_tokens_of(self.tokenizer), list[int](), list[bool]()
        images: list[tuple[str, int]] = []
        try:
            for (new, picture), is_counted in zip(
                image_tokens.pieces(tokens, pictures), counted, strict=True
            ):
                if picture is not None:
                    images.append((picture.as_text(), len(found) + new.index(image_tokens.image_token)))
                found += new
                counts += [is_counted and picture is None and new[0] not in image_tokens.reserved] * len(new)
        except ValueError as error:
            raise DatasetError(f"{name}: {error}. Correct it, or remove the row.") from error
        return found, counts, images

    @cached_property
    def chat(self) -> Chat:
        """The tokenizer's chat template."""
        return Chat(self.tokenizer)

    @cached_property
    def _prompts_begin_with_bos(self) -> bool:
        return encode("a", lambda: self.tokenizer)[:1] == [self.tokenizer.bos_token_id]

    @cached_property
    def reserved(self) -> frozenset[int]:
        """Tokens that the model takes for pictures; empty for a text model."""
        if not takes_images(self.tokenizer):
            return frozenset()
        try:
            return frozenset(image_tokens_of(self.tokenizer).reserved)
        except ConfigError:
            # Rows of text need no processor. A run of a vision-language model raises this error.
            return frozenset()

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
            # The column `text` always holds text.
            value = row[column] if column == "text" else chat_in(row[column])
            require_whole_characters(value)
        except ValueError as error:
            raise DatasetError(
                f"{name}: {column!r} cannot be read: {error}. Correct it, or remove the row."
            ) from error
        if not self.is_chat and isinstance(row[column], str) and not isinstance(value, str):
            raise DatasetError(
                f"{name} holds messages as JSON text in {column!r}, but the first row holds plain text. Write all rows "
                "in one form, or name the column 'text', which may hold any text."
            )
        return value


def _joined(chosen: Tokens, rejected: Tokens, has_prompt: bool) -> Tokens:
    """Join the two texts of a pair; without a prompt, their common beginning does not count."""
    if reason := chosen.skipped or rejected.skipped:
        return Tokens([], [], reason)
    if chosen.input_ids == rejected.input_ids:
        return Tokens([], [], "chosen and rejected the same")
    shared = 0 if has_prompt else common_beginning(chosen.input_ids, rejected.input_ids)
    counted = [[False] * shared + side.counted[shared:] for side in (chosen, rejected)]
    remarks = list(dict.fromkeys((*chosen.remarks, *rejected.remarks)))
    num_first = len(chosen.input_ids)
    images = [*chosen.images, *((image, start + num_first) for image, start in rejected.images)]
    tokens = chosen.input_ids + rejected.input_ids
    return Tokens(tokens, counted[0] + counted[1], "", remarks, num_first, images=images)


def _other_kind(row: Mapping[str, Any], examples: str) -> str:
    """Return advice to read the row as preference data, if it has the columns."""
    kind = next(
        (kind for kind, columns in COLUMNS.items() if kind != examples and {*columns} <= {*row}), None
    )
    return "" if kind is None else f" For preference data set dataset_preprocess.examples={kind}."


def make_tokeniser(source: Source, tokenizer: Any, settings: PreprocessSettings) -> Tokeniser:
    """Choose by the first row which columns to read, and whether they hold text or messages.

    Raises:
        DatasetError: There is no row, or no such column.
        ConfigError: A setting does not fit this form, or there is no chat template.
    """
    firsts = (row for batch in source.dataset.with_format(None).iter(1) for _, row in source.rows(batch, [0]))
    row = next(filter(None, firsts), None)
    if row is None:
        raise DatasetError("the dataset has no rows. Check load_path and split.")
    examples, wanted = settings.examples, settings.data_field
    by_default = next((names for names in _BY_DEFAULT if set(names) <= set(row)), ())
    columns = COLUMNS.get(examples, (wanted,) if wanted else by_default)
    missing = [column for column in columns if column not in row]
    if missing or not columns:
        lacks = repr(missing[0]) if missing else "'messages', 'prompt' with 'completion', or 'text'"
        fix = f"{'' if wanted else 'Rename columns, or '}data_field must be one of"
        if examples != "texts":
            fix = f"dataset_preprocess.examples={examples} needs it, and the columns are"
        raise DatasetError(
            f"the dataset has no column {lacks}: {fix} {', '.join(row)}.{_other_kind(row, examples)}"
        )
    try:
        first = row[columns[0]] if columns[0] == "text" else chat_in(row[columns[0]])
    except ValueError:
        first = {}  # Raised later, with the row's name.
    is_list = isinstance(first, list) and not any(isinstance(item, str) for item in first)
    is_chat = (is_list or isinstance(first, Mapping)) and examples != "steps"
    if examples != "texts":
        columns = ("prompt",) if examples == "steps" else ("prompt", "completion")
    progress = Progress("tokenise, rows", -(-len(source.dataset) // settings.num_proc))
    made = Tokeniser(source, tokenizer, settings, columns, is_chat, progress)
    is_pair = len(columns) == 2
    unread = {
        "seperator": bool(settings.seperator) and (is_chat or is_pair),
        "pre_pend": bool(settings.pre_pend) and is_chat,
        "assistant_only_loss": settings.assistant_only_loss and not is_chat,
    }
    if examples != "texts":
        names = ("data_field", "packing_type", "overlap", "truncate", "seperator")
        unread |= {name: bool(getattr(settings, name)) for name in names}
    if examples == "steps" and settings.ignore_index in (0, 1):
        raise ConfigError(
            f"dataset_preprocess.ignore_index={settings.ignore_index} is also the label of a step. Use -100."
        )
    form = "messages" if is_chat else "a prompt and a completion" if is_pair else "text"
    fix = "Leave it out, or choose another data_field." if examples == "texts" else "Leave it out."
    if name := next((name for name, is_unread in unread.items() if is_unread), None):
        raise ConfigError(
            f"dataset_preprocess.{name}={getattr(settings, name)!r} has no effect: the rows hold {form} "
            f"({', '.join(columns)}). {fix}"
        )
    packing = settings.packing_type
    if settings.overlap and (packing is None or (packing == "best_fit" and settings.truncate)):
        form = f"packing_type={packing or 'null'}" + (" with truncate=true" if packing else "")
        raise ConfigError(
            f"dataset_preprocess.overlap={settings.overlap} has no effect: {form} cuts no text into chunks. Leave it "
            "out, or set packing_type: partial."
        )
    if is_chat:
        _ = made.chat
    return made
