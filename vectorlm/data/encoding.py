"""Text, chat messages and token ids as the token ids that every engine takes."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from vectorlm.errors import EngineError
from vectorlm.types import Prompt, PromptRecord

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
KEYS = {"prompt", "prompt_token_ids", "tools"}
"""Keys of a prompt that is a mapping: those of vLLM's ``TextPrompt`` and ``TokensPrompt``, and the template's tools."""

SPOKEN = "(what-the-policy-wrote)"
"""Stands for the policy's turn where a template renders what follows."""
OTHER = "(something-else)"
SHOWN_BY_ALL = {"system", "user", "assistant"}
"""Roles that templates render, or refuse."""
THOUGHT_END = re.compile(r"[<\[]/(?:\w+:)?think(?:ing)?[>\]]", re.IGNORECASE)
THOUGHT = re.compile(
    rf"[<\[](?:\w+:)?think(?:ing)?[>\]].*?(?:{THOUGHT_END.pattern}|\Z)", re.IGNORECASE | re.DOTALL
)
"""``<think>…</think>``, also as ``<thinking>``, ``<seed:think>`` and ``[THINK]``."""
PRINTED_CHAT = re.compile(r"\s*\[\s*\{\s*(['\"])(?:role|content|from)\1\s*:.*\}\s*\]\s*", re.DOTALL)
"""A list of messages as Python or numpy prints it."""


def has_tokenizer(model: str | Path) -> bool:
    """Return whether there is a tokenizer beside a model; of a name that is no folder, the hub has to say."""
    return not Path(model).is_dir() or any((Path(model) / name).exists() for name in TOKENIZER_FILES)


def has_chat_template(model: str | Path) -> bool:
    """Return whether the tokenizer in a model's folder has a chat template."""
    settings = Path(model, "tokenizer_config.json")
    return Path(model, "chat_template.jinja").is_file() or (
        settings.is_file() and bool(json.loads(settings.read_text(encoding="utf-8")).get("chat_template"))
    )


def load_tokenizer(name: str | Path, **options: Any) -> Any:
    """Read a model's tokenizer as it is; raises `EngineError` where there is none."""
    from transformers import AutoTokenizer

    if not has_tokenizer(name):
        raise EngineError(f"{str(name)!r} has no tokenizer: prompts must be token ids.")
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(f"the tokenizer of {str(name)!r} cannot be read: {error}") from error


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **how: Any) -> Any:
    """Return what the tokenizer's chat template makes of `messages`; the library calls templates nowhere else."""
    return _rendered(lambda plain: tokenizer.apply_chat_template(plain, **how), messages)


def marked_spans(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[tuple[int, int]]:
    """Return from where to where, in characters of the rendered chat, its template marks ``{% generation %}``."""
    from transformers.utils.chat_template_utils import render_jinja_template

    # It returns the spans too, and is said to return text.
    rendered: Any = _rendered(
        lambda plain: render_jinja_template(
            [plain],
            tools,
            chat_template=tokenizer.get_chat_template(None, tools),
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        ),
        messages,
    )
    return list(rendered[1][0])


def _require_shown(
    messages: Sequence[Mapping[str, Any]], render: Callable[[Sequence[Mapping[str, Any]]], Any], shown: Any
) -> None:
    """Raise `EngineError` where a template renders `messages` as `shown` whatever those of some role say."""
    roles = {each.get("role", "user") for each in messages if each.get("content")}
    # Some templates know a few roles, and pass over any other without a word: `developer`, `tool`.
    for role in sorted(roles - SHOWN_BY_ALL):
        others = [{**each, "content": OTHER} if each.get("role") == role else each for each in messages]
        if render(others) == shown:
            raise EngineError(
                f"the tokenizer's chat template leaves out messages of the role {role!r}, which the model would not "
                "read. Use another role, or a template (chat_template.jinja) that renders it."
            )


def _rendered(render: Callable[[list[dict[str, Any]]], Any], messages: Sequence[Mapping[str, Any]]) -> Any:
    try:
        return render([plain_message(each) for each in messages])
    except TypeError:
        # Some templates put the arguments behind a text, DeepSeek's for example.
        return render([plain_message(each, parses=False) for each in messages])


def plain_message(
    message: Mapping[str, Any], *, parses: bool = True, is_data: bool = False
) -> dict[str, Any]:
    """Return a message as chat templates read it, whichever of OpenAI's forms it has.

    Parts of text become one text, and the arguments of calls objects (JSON text without `parses`). Keys that are null
    are left out, since tables give every message the keys of all others; arguments stay as they are.

    Raises:
        ValueError: The content is neither text nor parts of text, or the arguments of a call are not JSON. With
            `is_data` also if they are no object, or hold a number that JSON does not have; a policy may write both.
    """
    found = {key: each for key, each in message.items() if each is not None}
    if "tool_calls" in found:
        found["tool_calls"] = _plain_calls(found["tool_calls"], parses, is_data)
    content = found.get("content", "")
    parts = content if isinstance(content, list) else []
    kinds = [each.get("type") if isinstance(each, Mapping) else None for each in parts]
    if isinstance(content, str) or (message.get("role") == "tool" and not any(kinds)):
        return found  # What a tool returns may be any JSON value.
    if not isinstance(content, list):
        raise ValueError(f"its content is {str(content)[:60]!r}, and must be text")
    if other := [kind for kind in kinds if kind != "text"]:
        raise ValueError(f"a part of its content has the type {other[0]!r}, and models read text alone")
    return {**found, "content": text_of_message(found)}


def _plain_calls(value: Any, parses: bool, is_data: bool) -> Any:
    if isinstance(value, list | tuple):
        return [_plain_calls(each, parses, is_data) for each in value]
    if not isinstance(value, Mapping):
        return value
    found = {key: _plain_calls(each, parses, is_data) for key, each in value.items() if each is not None}
    if (arguments := value.get("arguments")) is None:
        return found
    try:
        plain = {} if (plain := decoded(arguments)) is None else plain
    except ValueError as error:
        raise ValueError(f"the arguments of a call are not JSON: {error}") from None
    if is_data:
        require_json(plain)
        if not isinstance(plain, Mapping):
            raise ValueError(f"the arguments of a call are {str(plain)[:60]!r}, and must be a JSON object")
    if not parses:
        # The text as it came, unless it was encoded twice.
        is_text = isinstance(arguments, str) and not arguments.lstrip().startswith('"')
        plain = arguments if is_text else json.dumps(plain, ensure_ascii=False)
    return {**found, "arguments": plain}


def end_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the ids that end an answer: the tokenizer's EOS, and those that the model in its folder names."""
    ends = [tokenizer.eos_token_id]
    # transformers and vLLM read config.json where there is no generation_config.json.
    for name in ("generation_config.json", "config.json"):
        path = Path(tokenizer.name_or_path or "", name)
        if path.is_file():
            named = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            ends += named if isinstance(named, list) else [named]
            break
    return frozenset(end for end in ends if end is not None)


def decoded(value: Any) -> Any:
    """Return what JSON text stands for, also if it was encoded twice; None for an empty text, other values as they are.

    Raises:
        ValueError: A text is not JSON.
    """
    while isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{value[:60]!r} ({error})") from None
    return value


def require_json(value: Any) -> None:
    """Raise ValueError if a value holds a number that JSON does not have, such as the infinity that 1e400 becomes."""
    try:
        json.dumps(value, allow_nan=False, default=str)
    except ValueError:
        raise ValueError(f"{str(value)[:60]!r} holds a number that JSON cannot write") from None


def chat_in(value: Any) -> Any:
    """Return the messages of a value that is their JSON text, or one object of lists; any other value as it is.

    Raises:
        ValueError: A text looks like a printed list of messages, and is not JSON.
    """
    found = value
    if isinstance(value, str):
        if not value.lstrip().startswith(("[", "{", '"')):
            return value
        try:
            found = decoded(value)
        except ValueError as error:
            if PRINTED_CHAT.fullmatch(value):
                raise ValueError(f"it looks like a list of messages, and is not JSON: {error}") from None
            return value
    if isinstance(found, Mapping):
        lists = list(found.values())
        if not isinstance(found.get("role"), list) or len({*map(len, lists)}) != 1:
            lists = [[each] for each in lists]
        # Tables may hold the roles in one list, and the contents in another.
        found = [dict(zip(found, each, strict=True)) for each in zip(*lists, strict=True)]
    is_chat = isinstance(found, list) and all(
        isinstance(each, Mapping) and not {"role", "from"}.isdisjoint(each) for each in found
    )
    return found if found and is_chat else value


def without_nulls(value: Any) -> Any:
    """Return a JSON value without the keys of its objects that are null."""
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def tools_of(columns: Mapping[str, Any]) -> Any:
    """Return the list in a row's column ``tools``, which may be JSON text; None if there is none.

    Raises:
        ValueError: It is no list, is not JSON, or holds a number that JSON does not have.
    """
    try:
        tools = decoded(columns.get("tools"))
    except ValueError as error:
        raise ValueError(f"'tools' is not JSON: {error}") from None
    if not isinstance(tools, list | tuple | None):
        raise ValueError(f"'tools' is {str(tools)[:60]!r}, and must be a list of tools")
    require_json(tools)
    return tools


def asked(record: PromptRecord, own_tools: Sequence[Any] = ()) -> Any:
    """Return what a model is asked: the prompt, and with messages the tools of its row and of its environment."""
    tools = [*(tools_of(record.columns) or ()), *own_tools] if is_messages(record.prompt) else None
    return {"prompt": record.prompt, "tools": tools} if tools else record.prompt


def require_whole_characters(value: Any) -> None:
    """Raise ValueError if half a character is in a text or JSON value, as a cut escape of JSON leaves it."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"it holds half a character, {text[error.start]!a}, which no text has") from None


def escaped_halves(value: Any) -> Any:
    """Return a text or JSON value with half characters written as escapes."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, Mapping):
        return {key: escaped_halves(each) for key, each in value.items()}
    return [escaped_halves(each) for each in value] if isinstance(value, list) else value


def is_messages(prompt: Any) -> bool:
    """Return whether a prompt is chat messages."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def split_begun(chat: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    """Return a chat without the answer that its last message has begun, and what is there of it; "" if none has."""
    if not chat or chat[-1]["role"] != "assistant":
        return list(chat), ""
    return list(chat[:-1]), text_of_message(chat[-1])


def text_of_message(message: Mapping[str, Any]) -> str:
    """Return the text of a message, of its parts together."""
    content = message.get("content")
    parts = [{"text": content}] if isinstance(content, str) else content or ()
    return "".join(str(part.get("text") or "") for part in parts)


def without_thoughts(text: str) -> str:
    """Return the text of a reasoning model without its thoughts.

    A thought that never ends reaches to the end of the text. Text before an end that nothing began is a thought too:
    many templates write the ``<think>`` themselves.
    """
    return THOUGHT_END.split(THOUGHT.sub("", text))[-1]


def chat_of(prompt: Any, text: str) -> list[Mapping[str, Any]] | None:
    """Return the chat that a prompt and a completion are together; None where the prompt is no chat."""
    if not is_messages(prompt):
        return None
    before, begun = split_begun(prompt)
    return [*before, {"role": "assistant", "content": begun + text}]


def encode(prompt: Any, tokenizer: Callable[[], Any]) -> list[int]:
    """Return the token ids of one prompt; `tokenizer` is called for text and messages alone.

    Text gets the tokenizer's special tokens, but no second BOS; those of messages are the template's. A last message of
    the assistant's is an answer that has begun, and is left open.
    """
    tools = None
    if isinstance(prompt, Mapping):
        tools = prompt.get("tools")
        prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
    if isinstance(prompt, str):
        # A class of a script's may print itself in another way.
        text = str.__str__(prompt)
        require_whole_characters(text)
        tokens = list(tokenizer().encode(text))
        bos = getattr(tokenizer(), "bos_token", None)
        if bos and text.startswith(bos):
            written = tokenizer().encode(text, add_special_tokens=False)
            if written[0] == tokenizer().bos_token_id and tokens[: len(written) + 1] == [
                written[0],
                *written,
            ]:
                warnings.warn(f"a prompt begins with {bos}, which is not doubled", stacklevel=2)
                return tokens[1:]
        return tokens
    if is_messages(prompt):
        require_whole_characters(prompt)
        has_begun = prompt[-1]["role"] == "assistant"
        how = {"add_generation_prompt": not has_begun, "continue_final_message": has_begun}

        def ids_of(chat: Sequence[Mapping[str, Any]]) -> list[int]:
            return list(render_chat(tokenizer(), chat, tools=tools, return_dict=True, **how)["input_ids"])

        _require_shown(prompt, ids_of, ids := ids_of(prompt))
        return ids
    return [int(token) for token in prompt]


def encode_reply(
    messages: Sequence[Mapping[str, Any]],
    replies: Sequence[Mapping[str, Any]],
    written: Sequence[int],
    tokenizer: Any,
    tools: Any = None,
) -> list[int]:
    """Return the tokens between what the policy wrote and its next turn: the end of its turn, and the replies.

    What the policy wrote is not tokenised again, and an end that it wrote itself is not doubled. Templates that rewrite
    earlier turns (that take thoughts out, for example) do so to nothing that the policy has read.

    Args:
        messages: The chat before the policy's turn.
        replies: Messages after it.
        written: The tokens of the policy's turn.
        tokenizer: Its template renders the chat, with `tools`.

    Raises:
        EngineError: The template does not show what an assistant says, or a reply of some role.
    """
    # An answer that had begun is part of the policy's turn.
    before, _ = split_begun(messages)
    chat = [*before, {"role": "assistant", "content": SPOKEN}]
    require_whole_characters(list(replies))

    def text_after(replies: Sequence[Mapping[str, Any]]) -> str:
        text = render_chat(
            tokenizer, [*chat, *replies], tools=tools, tokenize=False, add_generation_prompt=True
        )
        _, found, rest = text.rpartition(SPOKEN)
        if not found:
            raise EngineError(
                "the tokenizer's chat template leaves out what the assistant says before a reply."
            )
        return str(rest)

    _require_shown(replies, text_after, rest := text_after(replies))
    tokens = list(tokenizer.encode(rest, add_special_tokens=False))
    written = list(written)
    longest = min(len(written), len(tokens))
    overlap = next(size for size in range(longest, -1, -1) if written[len(written) - size :] == tokens[:size])
    return tokens[overlap:]


def encode_all(prompts: Sequence[Prompt], tokenizer: Callable[[], Any]) -> list[list[int]]:
    """Return the token ids of each prompt; raises `EngineError` that names the prompt which has none."""
    found = []
    for index, prompt in enumerate(prompts):
        try:
            found.append(encode(prompt, tokenizer))
        except EngineError:
            raise
        except Exception as error:  # A template may raise whatever its author chose.
            raise EngineError(f"prompt {index} cannot be encoded: {type(error).__name__}: {error}") from error
    return found


def encode_apart(tokenizer: Any, texts: Sequence[Sequence[str]]) -> Iterator[list[list[int]]]:
    """Yield the token ids of the pieces of each text, as a model that continues one piece would write the next.

    No token holds characters of two pieces. SentencePiece puts a space before a text, and none before a later piece.
    """

    def ids_of(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []

    def behind(start: list[int], whole: list[int], piece: str) -> list[int]:
        if whole[: len(start)] == start:
            return whole[len(start) :]
        # A token lies across the border: encode the piece behind a character that does not merge with it.
        for anchor in "\na.":
            start, whole = ids_of([anchor, anchor + piece])
            if whole[: len(start)] == start:
                return whole[len(start) :]
        return ids_of([piece])[0]

    def last(before: str, piece: str) -> str:
        return piece or before

    befores = [list(accumulate(["", *pieces], last))[:-1] for pieces in texts]
    pairs = list(zip(chain(*befores), chain(*texts), strict=True))
    starts, wholes = ids_of([before for before, _ in pairs]), ids_of(["".join(pair) for pair in pairs])
    found = map(behind, starts, wholes, chain(*texts))
    for pieces in texts:
        yield [next(found) for _ in pieces]


def shown_prompt(prompt: Prompt) -> str:
    """Return a prompt as a line for people shows it: of chat messages the last, of token ids their number."""
    if isinstance(prompt, str) or not prompt:
        return str(prompt)
    last = prompt[-1]
    return f"({len(prompt)} tokens)" if isinstance(last, int) else str(last.get("content", ""))


def as_list(prompts: Sequence[Prompt] | str) -> list[Prompt]:
    """Return a list of prompts; one text is one prompt. Raises TypeError, naming what is not a prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        what, keys = type(prompts).__name__, ", ".join(map(repr, prompts))
        fix = "Pass a list of texts, token ids or conversations."
        if "input_ids" in prompts:
            fix = "Pass its lists of token ids, made without padding: prompts['input_ids']."
        elif "role" in prompts:
            fix = "Put the message into a conversation, and this into a list: [[message]]."
        raise TypeError(f"prompts is a {what} with the keys {keys}, not a list of prompts. {fix}")
    if not isinstance(prompts, Iterable):
        raise TypeError(f"prompts={prompts!r} must be a text or a list of prompts.")
    listed = list(prompts)
    for index, prompt in enumerate(listed):
        if not _is_prompt(prompt):
            fix = ""
            if isinstance(prompt, Mapping) and "role" in prompt:
                fix = " Put the conversation in a list: [messages]."
            elif hasattr(prompt, "__index__"):
                fix = " Put the token ids in a list: [token_ids]."
            raise TypeError(
                f"prompt {index} is {str(prompt)[:60]!r}, a {type(prompt).__name__}: a prompt is text, token ids or "
                f"chat messages ({{'role': …, 'content': …}}).{fix}"
            )
    return listed


def _is_prompt(prompt: Any) -> bool:
    """Look at the first element alone: prompts may be long."""
    if isinstance(prompt, str):
        return True
    if isinstance(prompt, Mapping):
        return bool(prompt) and prompt.keys() <= KEYS
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        # Arrays and tensors of token ids are not a `Sequence`.
        return hasattr(prompt, "tolist") and hasattr(prompt, "__len__") and getattr(prompt, "ndim", 1) == 1
    if not len(prompt):
        return True
    if isinstance(prompt[0], Mapping):
        return {"role", "content"} <= prompt[0].keys()
    return hasattr(prompt[0], "__index__")
