"""Convert text and chat messages to the token ids that engines take."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, TypeVar

from vectorlm.data.images import PicturedIds, image_tokens_of, images_of, is_image, plain_image, takes_images
from vectorlm.errors import ConfigError, EngineError
from vectorlm.settings import nearest
from vectorlm.types import Prompt, PromptRecord

Read = TypeVar("Read")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")

VARIABLES = "vectorlm_chat_template_kwargs"
"""Attribute of a tokenizer for the variables of `with_template`."""
OWN_VARIABLES = {
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "return_dict",
}
"""Variables that vectorlm sets itself when it calls the template."""

SPOKEN = "(what-the-policy-wrote)"
"""Placeholder for the policy's turn when a template renders the replies."""
OTHER = "(something-else)"
SHOWN_BY_ALL = {"system", "user", "assistant"}
"""Roles that all templates render or refuse; they ignore none of them."""
THOUGHT_END = re.compile(r"[<\[]/(?:\w+:)?think(?:ing)?[>\]]", re.IGNORECASE)
THOUGHT = re.compile(
    rf"[<\[](?:\w+:)?think(?:ing)?[>\]].*?(?:{THOUGHT_END.pattern}|\Z)", re.IGNORECASE | re.DOTALL
)
"""``<think>…</think>``, also as ``<thinking>``, ``<seed:think>`` and ``[THINK]``."""


def has_tokenizer(model: str | Path) -> bool:
    """Return whether a model's folder has a tokenizer; true for a name on the hub."""
    return not Path(model).is_dir() or any((Path(model) / name).exists() for name in TOKENIZER_FILES)


def has_chat_template(model: str | Path) -> bool:
    """Return whether the tokenizer in a model's folder has a chat template."""
    settings = Path(model, "tokenizer_config.json")
    return Path(model, "chat_template.jinja").is_file() or (
        settings.is_file() and bool(json.loads(settings.read_text(encoding="utf-8")).get("chat_template"))
    )


def load_tokenizer(name: str | Path, **options: Any) -> Any:
    """Read a model's tokenizer; raises `EngineError` if there is none."""
    from transformers import AutoTokenizer

    if not has_tokenizer(name):
        raise EngineError(f"{str(name)!r} has no tokenizer: prompts must be token ids.")
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:  # transformers raises all kinds of errors for broken files.
        text = (
            f"the tokenizer of {str(name)!r} cannot be read ({type(error).__name__}: {error}). Save it again."
        )
        raise EngineError(text) from error


def read_template(path: str) -> str:
    """Read the file with a chat template.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template={path!r} cannot be read: {error}") from error


def with_template(tokenizer: Any, chat_template: str | None, variables: Mapping[str, Any]) -> Any:
    """Make the tokenizer render chats with the template in the file `chat_template` and with `variables`; return it.

    Raises:
        ConfigError: The file cannot be read, or the template does not read a variable.
    """
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    if variables:
        read = set(re.findall(r"[A-Za-z_]\w*", str(tokenizer.chat_template or "")))
        for name in variables:
            if name in read - OWN_VARIABLES:
                continue
            rule = (
                "is set by vectorlm itself" if name in OWN_VARIABLES else "is not read by the chat template"
            )
            fix = "" if name in OWN_VARIABLES else nearest(name, read - OWN_VARIABLES)
            if name == "tools":
                fix = (
                    "Give an environment `tools`, or sample the prompt {'prompt': messages, 'tools': [...]}."
                )
            raise ConfigError(f"chat_template_kwargs.{name} {rule}. {fix}".rstrip())
        setattr(tokenizer, VARIABLES, dict(variables))
    return tokenizer


class TextModelError(EngineError):
    """Messages have images, and the model reads only text."""


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **how: Any) -> Any:
    """Apply the tokenizer's chat template to `messages`, with the variables of `with_template`.

    Raises:
        TextModelError: A message has images, and the model reads only text.
    """
    how = {**getattr(tokenizer, VARIABLES, {}), **how}
    if images_of(messages) and not takes_images(tokenizer):
        raise TextModelError(
            f"the messages have images, but the model in {tokenizer.name_or_path!r} takes only text: its folder has no "
            "processor_config.json or preprocessor_config.json. Use a vision-language model, or prompts of text."
        )
    return _rendered(lambda plain: tokenizer.apply_chat_template(plain, **how), messages)


def marked_spans(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[tuple[int, int]]:
    """Return the spans of the rendered chat, in characters, that its template marks with ``{% generation %}``."""
    from transformers.utils.chat_template_utils import render_jinja_template

    # Annotated as text, but it returns the spans too.
    rendered: Any = _rendered(
        lambda plain: render_jinja_template(
            [plain],
            tools,
            chat_template=tokenizer.get_chat_template(None, tools),
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
            **getattr(tokenizer, VARIABLES, {}),
        ),
        messages,
    )
    return list(rendered[1][0])


def _require_shown(
    messages: Sequence[Mapping[str, Any]], render: Callable[[Sequence[Mapping[str, Any]]], Any], shown: Any
) -> None:
    """Raise `EngineError` if the template ignores the messages of a role; `shown` is `render` of all messages."""
    roles = {message.get("role", "user") for message in messages if message.get("content")}
    # Some templates silently skip roles that they do not know, such as `developer` and `tool`.
    for role in sorted(roles - SHOWN_BY_ALL):
        others = [{**one, "content": OTHER} if one.get("role") == role else one for one in messages]
        if render(others) == shown:
            raise EngineError(
                f"the tokenizer's chat template omits messages with the role {role!r}. Use another role, or a "
                "template (chat_template.jinja) that renders it."
            )


def _rendered(render: Callable[[list[dict[str, Any]]], Any], messages: Sequence[Mapping[str, Any]]) -> Any:
    try:
        return render([plain_message(message) for message in messages])
    except TypeError:
        # Some templates append the arguments to a text, such as DeepSeek's.
        return render([plain_message(message, parses=False) for message in messages])


def plain_message(
    message: Mapping[str, Any], *, parses: bool = True, is_data: bool = False
) -> dict[str, Any]:
    """Convert a message from any of OpenAI's forms to the form that chat templates read.

    Parts of text become one text, unless there are images. Arguments of calls become objects, or JSON text without
    `parses`. Null keys are removed, because tables give every message the keys of all others; nulls in arguments stay.

    Raises:
        ValueError: The content is neither text nor parts of text and images, or a call's arguments are not JSON. With
            `is_data`, arguments must be an object without NaN and infinity; a policy may write other arguments.
    """
    found = {key: value for key, value in message.items() if value is not None}
    if "tool_calls" in found:
        found["tool_calls"] = _plain_calls(found["tool_calls"], parses, is_data)
    content = found.get("content", "")
    parts = content if isinstance(content, list) else []
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in parts]
    if isinstance(content, str) or (message.get("role") == "tool" and not any(kinds)):
        return found  # A tool may return any JSON value.
    if not isinstance(content, list):
        raise ValueError(f"its content is {str(content)[:60]!r}, but must be text")
    if other := [
        kind for kind, part in zip(kinds, parts, strict=True) if kind != "text" and not is_image(part)
    ]:
        raise ValueError(
            "a part of its content has no `type`, such as text or image"
            if other[0] is None
            else f"a part of its content has the type {other[0]!r}, but only text and images are supported"
        )
    if any(map(is_image, parts)):
        return {**found, "content": list(map(_plain_part, parts))}
    return {**found, "content": text_of_message(found)}


def _plain_part(part: Mapping[str, Any]) -> dict[str, Any]:
    return plain_image(part) if is_image(part) else {"type": "text", "text": str(part.get("text") or "")}


def _plain_calls(value: Any, parses: bool, is_data: bool) -> Any:
    if isinstance(value, list | tuple):
        return [_plain_calls(item, parses, is_data) for item in value]
    if not isinstance(value, Mapping):
        return value
    found = {key: _plain_calls(item, parses, is_data) for key, item in value.items() if item is not None}
    if (arguments := value.get("arguments")) is None:
        return found
    try:
        plain = {} if (plain := decoded(arguments)) is None else plain
    except ValueError as error:
        raise ValueError(f"the arguments of a call are not JSON: {error}") from None
    if is_data:
        require_json(plain)
        if not isinstance(plain, Mapping):
            raise ValueError(f"the arguments of a call are {str(plain)[:60]!r}, but must be a JSON object")
    if not parses:
        # Keep the original text, unless it was encoded twice.
        is_text = isinstance(arguments, str) and not arguments.lstrip().startswith('"')
        plain = arguments if is_text else json.dumps(plain, ensure_ascii=False)
    return {**found, "arguments": plain}


def end_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the ids that end an answer: the tokenizer's EOS, and the EOS tokens in the model's config."""
    ends = [tokenizer.eos_token_id]
    # Like transformers and vLLM, read config.json only if there is no generation_config.json.
    for name in ("generation_config.json", "config.json"):
        path = Path(tokenizer.name_or_path or "", name)
        if path.is_file():
            try:
                named = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            except ValueError:
                continue  # transformers and vLLM ignore it too.
            ends += named if isinstance(named, list) else [named]
            break
    return frozenset(end for end in ends if end is not None)


def decoded(value: Any) -> Any:
    """Decode JSON text, also if it was encoded twice; return None for an empty text, and other values unchanged.

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
    """Raise ValueError if a value contains a number that JSON lacks, such as infinity (from 1e400)."""
    try:
        json.dumps(value, allow_nan=False, default=str)
    except ValueError:
        raise ValueError(f"{str(value)[:60]!r} contains a number that JSON cannot represent") from None


def without_nulls(value: Any) -> Any:
    """Return a JSON value without the null keys of its objects."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def tools_of(columns: Mapping[str, Any]) -> Any:
    """Return the list in a row's column ``tools``, which may be JSON text; None if there is none.

    Raises:
        ValueError: It is not a list, not JSON, or contains a number that JSON lacks.
    """
    try:
        tools = decoded(columns.get("tools"))
    except ValueError as error:
        raise ValueError(f"'tools' is not JSON: {error}") from None
    if not isinstance(tools, list | tuple | None):
        raise ValueError(f"'tools' is {str(tools)[:60]!r}, but must be a list of tools")
    require_json(tools)
    return tools


def asked(record: PromptRecord, own_tools: Sequence[Any] = ()) -> Any:
    """Return the prompt to send to the engine; messages come with the tools of their row and `own_tools`."""
    if record.token_ids is not None:
        return record.token_ids
    tools = [*(tools_of(record.columns) or ()), *own_tools] if is_messages(record.prompt) else None
    return {"prompt": record.prompt, "tools": tools} if tools else record.prompt


def require_whole_characters(value: Any) -> None:
    """Raise ValueError if a text or JSON value contains a lone surrogate, for example from a truncated JSON escape."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"it contains half of a surrogate pair, {text[error.start]!a}") from None


def escaped_halves(value: Any) -> Any:
    """Return a text or JSON value with lone surrogates written as escapes."""
    if isinstance(value, str):
        escaped = value.encode(errors="backslashreplace").decode()
        return value if escaped == value else escaped  # A `Picture` keeps its content.
    if isinstance(value, Mapping):
        return {key: escaped_halves(item) for key, item in value.items()}
    return [escaped_halves(item) for item in value] if isinstance(value, list) else value


def is_messages(prompt: Any) -> bool:
    """Return whether a prompt is a list of chat messages."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def split_unfinished(chat: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    """Split a chat before an unfinished answer; return the messages and the answer's text, "" if there is none."""
    if not chat or chat[-1]["role"] != "assistant":
        return list(chat), ""
    return list(chat[:-1]), text_of_message(chat[-1])


def text_of_message(message: Mapping[str, Any]) -> str:
    """Return the text of a message, with its parts joined."""
    content = message.get("content")
    parts = [{"text": content}] if isinstance(content, str) else content or ()
    return "".join(str(part.get("text") or "") for part in parts)


def without_thoughts(text: str) -> str:
    """Return the text of a reasoning model without its thoughts.

    An unfinished thought reaches to the end of the text. Text before a ``</think>`` without a ``<think>`` is a thought
    too, because many templates write the ``<think>`` themselves.
    """
    return THOUGHT_END.split(THOUGHT.sub("", text))[-1]


def chat_of(prompt: Any, text: str) -> list[Mapping[str, Any]] | None:
    """Return a prompt of messages with a completion appended; None if the prompt is not a chat."""
    if not is_messages(prompt):
        return None
    before, start = split_unfinished(prompt)
    return [*before, {"role": "assistant", "content": start + text}]


def encode(prompt: Any, tokenizer: Callable[[], Any]) -> list[int]:
    """Return the token ids of one prompt; `tokenizer` is called only for text and messages.

    Text gets the tokenizer's special tokens, but no second BOS; messages get the template's special tokens. If the last
    message is the assistant's, the model continues it. Token ids of a chat with images are `PicturedIds`.
    """
    prompt, tools = _opened(prompt)
    if isinstance(prompt, str):
        # A subclass of str may override __str__.
        text = str.__str__(prompt)
        require_whole_characters(text)
        tokens = list(tokenizer().encode(text))
        bos = getattr(tokenizer(), "bos_token", None)
        if bos and text.startswith(bos):
            written = tokenizer().encode(text, add_special_tokens=False)
            doubled = [written[0], *written]
            if written[0] == tokenizer().bos_token_id and tokens[: len(doubled)] == doubled:
                warnings.warn(f"a prompt already begins with {bos}, so no second one is added", stacklevel=2)
                return tokens[1:]
        return tokens
    if is_messages(prompt):
        token_ids = _of_chat(
            prompt, tokenizer(), tools, lambda found: list(found["input_ids"]), return_dict=True
        )
        if not (pictures := images_of(prompt)):
            return token_ids
        # Otherwise the engine would put pictures in the wrong places.
        if (count := token_ids.count(image_tokens_of(tokenizer()).placeholder)) != len(pictures):
            raise EngineError(
                f"the chat has {len(pictures)} images, but the chat template writes {count} placeholders for them. Use "
                "a template that shows every image, and texts without the placeholder's name."
            )
        return PicturedIds.of(token_ids, pictures)
    if isinstance(prompt, PicturedIds):
        return prompt
    return [int(token) for token in prompt]


def _opened(prompt: Any) -> tuple[Any, Any]:
    """Return a prompt without the mapping around it, and the tools in the mapping."""
    if not isinstance(prompt, Mapping):
        return prompt, None
    return prompt["prompt_token_ids" if "prompt_token_ids" in prompt else "prompt"], prompt.get("tools")


def _of_chat(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, tools: Any, read: Callable[[Any], Read], **how: Any
) -> Read:
    """Render a chat up to the policy's turn; return the result of `read` for the template's output."""
    require_whole_characters(messages)
    continues = messages[-1]["role"] == "assistant"
    how |= {"add_generation_prompt": not continues, "continue_final_message": continues, "tools": tools}

    def render(chat: Sequence[Mapping[str, Any]]) -> Read:
        return read(render_chat(tokenizer, chat, **how))

    _require_shown(messages, render, shown := render(messages))
    return shown


ANCHORS = "\na."
"""Characters that may precede a text that is tokenised as a continuation; one of them does not merge with it."""
MAX_EXPANSION = 12
"""Largest number of tokens per byte of a text that is not ASCII: normalisation (NFKC) turns 3 bytes into 33."""
NUM_SPECIAL = 8
"""Largest number of special tokens that a tokenizer puts around a text, and of spaces that it puts before a text."""


def length_bound(prompt: Any, tokenizer: Callable[[], Any]) -> int:
    """Return an upper bound for the number of tokens from `encode`, in a tenth of its time.

    Raises the errors of `encode` for messages that the template refuses or leaves out.
    """
    prompt, tools = _opened(prompt)
    if is_messages(prompt):
        prompt = _of_chat(prompt, tokenizer(), tools, str, tokenize=False)
    if isinstance(prompt, str):
        require_whole_characters(prompt)
        # No token is shorter than a byte.
        expansion = 1 if prompt.isascii() else MAX_EXPANSION
        return expansion * len(prompt.encode()) + NUM_SPECIAL
    return len(prompt)


def encode_reply(
    messages: Sequence[Mapping[str, Any]],
    replies: Sequence[Mapping[str, Any]],
    written: Sequence[int],
    tokenizer: Any,
    tools: Any = None,
) -> list[int]:
    """Return the tokens between the policy's turn and its next turn: the end of the turn, and the replies.

    The policy's own tokens are kept, and an end token that it wrote is not doubled. Templates may rewrite earlier turns
    (remove thoughts, for example), but this never changes tokens that the policy has read.

    Args:
        messages: The chat before the policy's turn.
        replies: The messages after the policy's turn.
        written: The tokens of the policy's turn.
        tokenizer: Its template renders the chat, with `tools`.

    Raises:
        EngineError: The template ignores messages of the assistant, or replies of some role.
    """
    # An unfinished answer is part of the policy's turn.
    before, _ = split_unfinished(messages)
    chat = [*before, {"role": "assistant", "content": SPOKEN}]
    require_whole_characters(list(replies))

    def text_after(replies: Sequence[Mapping[str, Any]]) -> str:
        text = render_chat(
            tokenizer, [*chat, *replies], tools=tools, tokenize=False, add_generation_prompt=True
        )
        _, found, rest = text.rpartition(SPOKEN)
        if not found:
            raise EngineError(
                "the tokenizer's chat template omits the assistant's turn before a reply. Use another template."
            )
        return str(rest)

    _require_shown(replies, text_after, rest := text_after(replies))
    tokens = list(tokenizer.encode(rest, add_special_tokens=False))
    written = list(written)
    longest = min(len(written), len(tokens))
    overlap = next(size for size in range(longest, -1, -1) if written[len(written) - size :] == tokens[:size])
    return tokens[overlap:]


def encode_all(prompts: Sequence[Prompt], tokenizer: Callable[[], Any]) -> list[list[int]]:
    """Return the token ids of each prompt; raises `EngineError` with the index of a bad prompt."""
    found = []
    for index, prompt in enumerate(prompts):
        try:
            found.append(encode(prompt, tokenizer))
        except (ConfigError, EngineError):
            raise
        except Exception as error:  # Templates may raise any exception.
            raise EngineError(f"prompt {index} cannot be encoded: {type(error).__name__}: {error}") from error
    return found


def encode_behind(tokenizer: Any, before: str, text: str) -> list[int]:
    """Return the token ids of a text that continues `before`: SentencePiece puts no space before it.

    If a token crosses the border, or nothing is before, the text is encoded after a character that does not merge.
    """
    for anchor in filter(None, (before, *ANCHORS)):
        start, whole = (tokenizer.encode(part, add_special_tokens=False) for part in (anchor, anchor + text))
        if whole[: len(start)] == start:
            return list(whole[len(start) :])
    return list(tokenizer.encode(text, add_special_tokens=False))


def encode_apart(tokenizer: Any, texts: Sequence[Sequence[str]]) -> Iterator[list[list[int]]]:
    """Yield the token ids of the pieces of each text; no token crosses the border of a piece.

    A later piece is tokenised as a continuation of the piece before, because SentencePiece puts a space before texts.
    """

    def ids_of(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []

    def behind(start: list[int], whole: list[int], piece: str) -> list[int]:
        # Unless a token crosses the border.
        return whole[len(start) :] if whole[: len(start)] == start else encode_behind(tokenizer, "", piece)

    def last(before: str, piece: str) -> str:
        return piece or before

    befores = [list(accumulate(["", *pieces], last))[:-1] for pieces in texts]
    pairs = list(zip(chain(*befores), chain(*texts), strict=True))
    starts, wholes = ids_of([before for before, _ in pairs]), ids_of(["".join(pair) for pair in pairs])
    found = map(behind, starts, wholes, chain(*texts))
    for pieces in texts:
        yield [next(found) for _ in pieces]


def shown_prompt(prompt: Prompt) -> str:
    """Return a prompt for display: the last of its messages, or the number of its token ids."""
    if isinstance(prompt, str) or not prompt:
        return str(prompt)
    last = prompt[-1]
    return f"({len(prompt)} tokens)" if isinstance(last, int) else shown_content(last.get("content", ""))


def shown_content(content: Any) -> str:
    """Return the content of a message for display, with the names of its images."""
    if not isinstance(content, list) or not any(map(is_image, content)):
        return str(content)

    def shown(part: Any) -> str:
        if not is_image(part):
            return str(part.get("text", "")) if isinstance(part, Mapping) else str(part)
        name = str(plain_image(part).get("image", "")).rpartition("/")[2]
        return f"[image {name[:20]}] "

    return "".join(map(shown, content))
