"""Images of prompts: read them from the forms that datasets and chats use, and name them by path or hash."""

from __future__ import annotations

import base64
import hashlib
import io
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import url2pathname

from vectorlm.errors import ConfigError

HASH = "sha256"
COLUMNS = ("images", "image")
"""Columns with the pictures of a row's chat: a list of pictures, or a single picture."""
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff"}
MARK = "<image>"
"""Text that stands for the next picture of a row, in verl's datasets."""


class ImageError(ValueError):
    """An image cannot be read."""


class Picture(str):
    """An image of a prompt. As text it is its path, or ``sha256:…`` if it came without one."""

    __slots__ = ("_data",)
    _data: bytes | None

    @classmethod
    def of_bytes(cls, data: bytes) -> Picture:
        """Return the picture in an encoded file (PNG, JPEG, …)."""
        return cls(f"{HASH}:{hashlib.sha256(data).hexdigest()}").holding(data)

    @property
    def data(self) -> bytes:
        """The encoded file; raises `ImageError` if it cannot be read."""
        found = getattr(self, "_data", None)
        if found is None:
            try:
                found = Path(self).read_bytes()
            except OSError as error:
                raise ImageError(f"the image {str(self)!r} cannot be read: {error.strerror}") from error
        return found

    def with_data(self) -> Picture:
        """Return the same picture with its content, for a process that may not see its file."""
        return Picture(self).holding(self.data)

    def holding(self, data: bytes) -> Picture:
        """Give the picture its content, and return it."""
        self._data = data
        return self

    @property
    def is_held(self) -> bool:
        """Whether the picture's content is in memory."""
        return getattr(self, "_data", None) is not None

    def as_text(self) -> str:
        """Return a text that `picture_of` can read: the picture's path, or a ``data:`` URL."""
        data = getattr(self, "_data", None)
        return str(self) if data is None else f"data:;base64,{base64.b64encode(data).decode()}"

    def open(self) -> Any:
        """Return a ``PIL.Image`` in RGB, with the orientation of its EXIF data applied.

        Raises:
            ImageError: The file cannot be read, or is not an image.
        """
        from PIL import Image

        data = self.data
        return _decoded(lambda: Image.open(io.BytesIO(data)), str(self))

    def __reduce__(self) -> Any:
        return _restored, (str(self), getattr(self, "_data", None))


def _decoded(read: Callable[[], Any], name: str) -> Any:
    """Return the ``PIL.Image`` that `read` returns in RGB, with the orientation of its EXIF data applied."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(read()).convert("RGB")
    except MemoryError:
        raise
    # PIL raises all kinds of errors for a damaged file, such as SyntaxError for a PNG.
    except Exception as error:
        raise ImageError(f"the image {name!r} cannot be decoded: {error}") from error


def _restored(name: str, data: bytes | None) -> Picture:
    return Picture(name) if data is None else Picture(name).holding(data)


def picture_of(value: Any) -> Picture:
    """Return the picture in a path, a ``file://`` or ``data:`` URL, bytes, a ``PIL.Image`` or a mapping of `datasets`.

    Raises:
        ValueError: The value is none of these, a URL on the network, or a damaged ``PIL.Image``.
    """
    if isinstance(value, Picture):
        return value
    # {"bytes", "path"} of datasets.Image(decode=False), {"url"} of OpenAI, {"image"} of verl
    if isinstance(value, Mapping):
        names = ("bytes", "path", "url", "image")
        given = next((value[name] for name in names if value.get(name) is not None), None)
        if given is None:
            raise ValueError(f"{str(value)[:60]!r} is not an image: give `bytes`, a `path` or a `url`")
        return picture_of(given)
    if isinstance(value, bytes | bytearray):
        return Picture.of_bytes(bytes(value))
    if isinstance(value, str | Path):
        url = urlsplit(str(value))
        if url.scheme == "data":
            kind, _, content = str(value).partition(",")
            data = base64.b64decode(content) if kind.endswith(";base64") else unquote_to_bytes(content)
            return Picture.of_bytes(data)
        if url.scheme in ("http", "https"):
            raise ValueError(
                f"the image {str(value)[:80]!r} is on the network; download it, and give its path"
            )
        return Picture(url2pathname(url.path) if url.scheme == "file" else str(value))
    if hasattr(value, "save"):
        # A PNG file holds neither all modes nor the orientation of another file.
        buffer = io.BytesIO()
        _decoded(lambda: value, str(value)[:80]).save(buffer, format="PNG")
        return Picture.of_bytes(buffer.getvalue())
    raise ValueError(f"{str(value)[:60]!r} is not an image: give a path, a URL, bytes or a PIL.Image")


def looks_like_image(value: Any) -> bool:
    """Return whether the value of a column is an image or looks like the path of an image; no file is opened."""
    if isinstance(value, list | tuple):
        return bool(value) and looks_like_image(value[0])
    if isinstance(value, str | Path):
        return Path(value).suffix.lower() in SUFFIXES
    return hasattr(value, "getpixel") or (isinstance(value, Mapping) and value.keys() == {"bytes", "path"})


def is_image(part: Any) -> bool:
    """Return whether a part of a message's content is an image."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def plain_image(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return an image part as ``{"type": "image", "image": Picture}``, without `image` if the part names no image.

    Raises:
        ValueError: See `picture_of`.
    """
    names = ("image", "image_url", "url", "path", "base64", "bytes")
    given = next((part[name] for name in names if part.get(name) is not None), None)
    if isinstance(given, str) and given == part.get("base64"):
        given = base64.b64decode(given)
    try:
        return {"type": "image"} if given is None else {"type": "image", "image": picture_of(given)}
    except ValueError as error:
        raise ValueError(f"a part of its content is wrong: {error}") from None


def images_of(prompt: Any) -> list[Picture]:
    """Return the pictures of a chat in order; texts and token ids have none.

    Raises:
        ValueError: A part names no image.
    """
    found = []
    is_chat = bool(prompt) and not isinstance(prompt, str) and isinstance(prompt[0], Mapping)
    for message in prompt if is_chat else ():
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else ():
            if is_image(part):
                if "image" not in (plain := plain_image(part)):
                    raise ValueError(
                        "a part of the type image names no image. Add `image` to it, or a column `images` to the row."
                    )
                found.append(plain["image"])
    return found


def column_images(row: Mapping[str, Any]) -> list[Any]:
    """Return the images in the columns `images` and `image` of a row."""
    images = row.get("images")
    several = list(images) if isinstance(images, list | tuple) else [images]
    return [image for image in (*several, row.get("image")) if image is not None]


def with_images(messages: Sequence[Mapping[str, Any]], images: Sequence[Any]) -> list[dict[str, Any]]:
    """Return a chat whose image parts hold the pictures of a row's column `images`, in order.

    Without image parts, ``<image>`` in a text is the next picture, as in verl. Without image parts and ``<image>``, all
    pictures come before the text of the user's first message, as in TRL.

    Raises:
        ValueError: There are more or fewer empty image parts than pictures.
    """
    left = [picture_of(image) for image in images]
    chat = [dict(message) for message in messages]
    if left and not _has_image_parts(chat):
        chat = _with_marks_as_parts(chat)
    if left and not _has_image_parts(chat):
        first = next((message for message in chat if message.get("role") == "user"), None)
        if first is None:
            raise ValueError("the column 'images' has pictures, but no message is the user's")
        text = first.get("content") or []
        text = [{"type": "text", "text": text}] if isinstance(text, str) else list(text)
        first["content"] = [{"type": "image"}] * len(left) + text

    def filled(part: Any) -> Any:
        if not is_image(part) or "image" in (part := plain_image(part)):
            return part
        if not left:
            has = (
                f"'images' has {len(images)} pictures"
                if images
                else "'images' or 'image' is missing or empty"
            )
            raise ValueError(f"the chat has more image parts than pictures: the column {has}")
        return {"type": "image", "image": left.pop(0)}

    chat = _with_parts(chat, filled)
    if left:
        raise ValueError(f"the column 'images' has {len(left)} more pictures than the chat has image parts")
    return chat


def _has_image_parts(chat: Sequence[Mapping[str, Any]]) -> bool:
    contents = [message["content"] for message in chat if isinstance(message.get("content"), list)]
    return any(is_image(part) for content in contents for part in content)


def has_marks(chat: Any) -> bool:
    """Return whether a text of the user in a chat has ``<image>``."""
    return any(_is_marked(message) for message in chat)


def _is_marked(message: Mapping[str, Any]) -> bool:
    text = message.get("content")
    return message.get("role") == "user" and isinstance(text, str) and MARK in text


def _with_marks_as_parts(chat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat with image parts for ``<image>`` in the user's texts."""

    def parts_of(text: str) -> list[dict[str, Any]]:
        first, *others = ({"type": "text", "text": piece} for piece in text.split(MARK))
        parts = [first, *(part for other in others for part in ({"type": "image"}, other))]
        return [part for part in parts if part.get("text") != ""]

    return [
        {**message, "content": parts_of(message["content"])} if _is_marked(message) else dict(message)
        for message in chat
    ]


def with_content(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose pictures hold their content, because their sender may overwrite the files.

    Raises:
        ValueError: A picture cannot be read.
    """

    def held(part: Any) -> Any:
        if not is_image(part) or "image" not in (plain := plain_image(part)):
            return part
        return {"type": "image", "image": Picture.of_bytes(plain["image"].data)}

    return _with_parts(messages, held)


def _with_parts(messages: Sequence[Mapping[str, Any]], change: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Return copies of messages, with `change` applied to every part of their contents."""
    return [
        {**message, "content": list(map(change, message["content"]))}
        if isinstance(message.get("content"), list)
        else dict(message)
        for message in messages
    ]


def with_paths(value: Any, folder: Path) -> Any:
    """Write the pictures without a path to `folder`; return the JSON value with the paths of their files."""
    if isinstance(value, Picture):
        path = folder / value.removeprefix(f"{HASH}:")
        if not value.startswith(f"{HASH}:"):
            return value
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(value.data)
        return Picture(path)
    if isinstance(value, Mapping):
        return {name: with_paths(item, folder) for name, item in value.items()}
    return [with_paths(item, folder) for item in value] if isinstance(value, list | tuple) else value


class PicturedIds(list[int]):
    """The token ids of a prompt with pictures; each picture is one placeholder token, which the engine expands."""

    pictures: tuple[Picture, ...] = ()

    @classmethod
    def of(cls, token_ids: Iterable[int], pictures: Iterable[Picture]) -> PicturedIds:
        """Return `token_ids` with their pictures in order."""
        found = cls(token_ids)
        found.pictures = tuple(picture.with_data() for picture in pictures)
        return found

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and self.pictures == getattr(other, "pictures", ())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        # Ranks compare the texts of their prompts.
        own = (one if one.startswith(f"{HASH}:") else Picture.of_bytes(one.data) for one in self.pictures)
        return f"PicturedIds({super().__repr__()}, pictures=[{', '.join(own)}])"


def pictures_of(prompt: Any) -> tuple[Picture, ...]:
    """Return the pictures of encoded token ids, in the order of their placeholders."""
    return getattr(prompt, "pictures", ())


@dataclass(frozen=True)
class PlacedPicture:
    """A picture in a row whose placeholders are expanded."""

    picture: Picture
    start: int
    """Index of the picture's first token in the row."""


class ImageTokens:
    """The tokens of pictures, from the model's processor in transformers; no code here depends on the model.

    On the way to the engine a picture is one placeholder token, which vLLM expands. `expand` does the same for the
    trainer.
    """

    def __init__(self, processor: Any) -> None:
        """Find the placeholder of `processor`.

        Raises:
            ConfigError: The chat template writes no placeholder for an image.
        """
        self._processor = processor
        self._expansions: dict[str, array[int]] = {}
        self.placeholder, self._text = self._find_placeholder()
        """The token that the chat template writes for an image."""
        self.image_token: int = getattr(processor, "image_token_id", None) or self.placeholder
        """The token whose embeddings a picture's features replace."""
        other = getattr(processor, "video_token_id", None)
        self.reserved = {self.placeholder, self.image_token} | ({other} if isinstance(other, int) else set())
        """Tokens that a model's forward pass treats as pictures, even if the policy has sampled them."""

    def save(self, folder: str | Path) -> None:
        """Write the processor's files into a model's folder."""
        self._processor.save_pretrained(folder)

    def processed(self, images: Sequence[Any], text: str | None = None) -> Mapping[str, Any]:
        """Return the processor's output for a list of ``PIL.Image`` and a text; by default, a text of placeholders."""
        text = self._text * len(images) if text is None else text
        found: Mapping[str, Any] = self._processor(
            text=[text], images=[list(images)], add_special_tokens=False, return_tensors="pt"
        )
        return found

    def _find_placeholder(self) -> tuple[int, str]:
        from PIL import Image

        def ids_of(content: Any) -> list[int]:
            chat = [{"role": "user", "content": content}]
            # SmolVLM's processor itself would warn about one of its arguments.
            tokenizer, template = self._processor.tokenizer, self._processor.chat_template
            if template is None:
                return []
            text = tokenizer.apply_chat_template(chat, tokenize=False, chat_template=template)
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        image, text = {"type": "image"}, {"type": "text", "text": "a"}
        one, two = ids_of([image, text]), ids_of([image, image, text])
        blank = Image.new("RGB", (224, 224))
        for token in dict.fromkeys(token for token in one if two.count(token) > one.count(token)):
            written = str(self._processor.tokenizer.convert_ids_to_tokens(token))
            try:
                found = self.processed([blank], written)["input_ids"][0].tolist()
            except Exception:
                # The token is not the placeholder, but next to it, such as the start of vision.
                continue
            if found != [token]:
                return token, written
        raise ConfigError(
            "the model's chat template writes no placeholder for an image. Use another template."
        )

    def expand(
        self, token_ids: Iterable[int], pictures: Iterable[Picture]
    ) -> tuple[list[int], list[PlacedPicture]]:
        """Replace the placeholders of a prompt by the tokens of its pictures, as vLLM does.

        Raises:
            ValueError: A picture cannot be read, or there are more or fewer placeholders than pictures.
        """
        found: list[int] = []
        placed: list[PlacedPicture] = []
        for tokens, picture in self.pieces(token_ids, pictures):
            if picture is not None:
                placed.append(PlacedPicture(picture, len(found) + tokens.index(self.image_token)))
            found += tokens
        return found, placed

    def pieces(
        self, token_ids: Iterable[int], pictures: Iterable[Picture]
    ) -> Iterator[tuple[list[int], Picture | None]]:
        """Yield the tokens that replace each token, and the picture that they show, or None.

        Raises the errors of `expand`.
        """
        left = list(pictures)
        for token in token_ids:
            if token != self.placeholder:
                yield [token], None
            elif left:
                picture = left.pop(0)
                yield self.expansion(picture), picture
            else:
                raise ValueError("a prompt has more placeholders of images than images")
        if left:
            raise ValueError("a prompt has fewer placeholders of images than images")

    def length(self, token_ids: Sequence[int], pictures: Iterable[Picture]) -> int:
        """Return the number of a prompt's tokens in the engine; other tokens may look like placeholders.

        Raises:
            ValueError: A picture cannot be read.
        """
        return len(token_ids) + sum(len(self.expansion(picture)) - 1 for picture in pictures)

    def expansion(self, picture: Picture) -> list[int]:
        """Return the tokens that replace a picture's placeholder."""
        if picture not in self._expansions:
            found = self.processed([picture.open()], self._text)["input_ids"][0].tolist()
            self._expansions[picture] = array("q", found)
        return self._expansions[picture].tolist()


IMAGE_TOKENS = "vectorlm_image_tokens"
"""Attribute of a tokenizer for its model's `ImageTokens`."""


def takes_images(tokenizer: Any) -> bool:
    """Return whether the folder of a tokenizer's model has an image processor."""
    from transformers.utils import cached_file

    options = {
        name: False
        for name in ("_raise_exceptions_for_missing_entries", "_raise_exceptions_for_connection_errors")
    }
    place = str(getattr(tokenizer, "name_or_path", None) or "")
    names = ("processor_config.json", "preprocessor_config.json")
    return bool(place) and any(cached_file(place, name, **options) is not None for name in names)


def image_tokens_of(tokenizer: Any) -> ImageTokens:
    """Return the `ImageTokens` of a tokenizer's model, which the tokenizer caches.

    Raises:
        ConfigError: The processor cannot be read, for example because a package is missing.
    """
    if not hasattr(tokenizer, IMAGE_TOKENS):
        from transformers import AutoProcessor

        name = tokenizer.name_or_path
        try:
            processor = AutoProcessor.from_pretrained(name)
        except (ImportError, OSError, ValueError) as error:
            raise ConfigError(
                f"the image processor of {name!r} cannot be read: {error} Install what it names, or complete the "
                "folder."
            ) from error
        if not hasattr(processor, "image_processor"):
            raise ConfigError(f"the processor of {name!r} reads no images. Complete the folder.")
        processor.tokenizer.chat_template = processor.chat_template = tokenizer.chat_template
        setattr(tokenizer, IMAGE_TOKENS, ImageTokens(processor))
    found: ImageTokens = getattr(tokenizer, IMAGE_TOKENS)
    return found
