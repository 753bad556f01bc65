"""Inputs of a vision-language model besides its token ids: pixels, and positions on three axes."""

from __future__ import annotations

import inspect
import io
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from vectorlm.data.images import ImageTokens, Picture, PlacedPicture
from vectorlm.sampling.weights.model_size import names_of_vision
from vectorlm.train.packing import Packing, Rows, to_device
from vectorlm.train.settings import KEPT_PASSES

TEXT_INPUTS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
"""Results of a processor that are not passed on: a pass has these inputs already, or makes them."""


class Images:
    """The pictures in the passes of one vision-language model, prepared by transformers' own processor."""

    def __init__(self, tokens: ImageTokens, model: Any) -> None:
        """Find which image inputs the transformers model `model` reads."""
        self._tokens = tokens
        self._inner = model.base_model
        self._reads = inspect.signature(model.base_model.forward).parameters.keys()
        self._pixels: OrderedDict[tuple[str, ...], dict[str, torch.Tensor]] = OrderedDict()

    def with_blank(self, rows: Rows) -> Rows:
        """Append a row with a blank picture, which requests no token, to rows without pictures.

        Ranks gather the weights of the vision model together: if one rank computes a picture, all must compute one.
        """
        blank = Picture.of_bytes(_blank())
        tokens = torch.tensor(self._tokens.expansion(blank))
        (num, old), length = rows.input_ids.shape, len(tokens)

        def longer(x: torch.Tensor, last: Any) -> torch.Tensor:
            found = x.new_zeros(num + 1, max(old, length))
            found[:num, :old], found[num, :length] = x, last
            return found

        start = int((tokens == self._tokens.image_token).int().argmax())
        return Rows(
            longer(rows.input_ids, tokens),
            longer(rows.attention_mask, 1),
            longer(rows.is_asked, False),
            [*rows.groups, -2],
            images=[*[[]] * num, [PlacedPicture(blank, start)]],
            routes=rows.routes,
            replayed=rows.replayed,
        )

    def arguments(self, rows: Rows, device: torch.device, packing: Packing | None = None) -> dict[str, Any]:
        """Return the further arguments of a pass for its pictures; empty if its rows have no pictures.

        Without a `packing` rows are padded, and the model computes positions itself.
        """
        if rows.images is None or not any(rows.images):
            return {}
        if packing is None:
            pieces = [(row, 0, length) for row, length in enumerate(rows.attention_mask.sum(dim=1).tolist())]
            input_ids = rows.input_ids
        else:
            pieces, input_ids = list(packing.pieces), packing.input_ids
        pictures = [
            placed.picture
            for row, first, last in pieces
            for placed in rows.images[row]
            if first <= placed.start < last
        ]
        found: dict[str, Any] = {}
        if "mm_token_type_ids" in self._reads:
            found["mm_token_type_ids"] = (input_ids == self._tokens.image_token).int()
        if packing is not None and hasattr(self._inner, "get_rope_index"):
            positions = {row: self._positions(rows, row) for row in {row for row, _, _ in pieces}}
            found["position_ids"] = torch.cat(
                [positions[row][..., first:last] for row, first, last in pieces], -1
            )
        found |= self._pixels_of(pictures)
        return {name: to_device(value, device) for name, value in found.items()}

    def _positions(self, rows: Rows, row: int) -> torch.Tensor:
        """Return the positions of one row, int64 [3, 1, T]."""
        assert rows.images is not None
        length = int(rows.attention_mask[row].sum())
        input_ids = rows.input_ids[row : row + 1, :length]
        pictures = [placed.picture for placed in rows.images[row]]
        if not pictures:
            return torch.arange(length).expand(3, 1, -1)
        grids = {name: value for name, value in self._pixels_of(pictures).items() if name != "pixel_values"}
        given = {"mm_token_type_ids": (input_ids == self._tokens.image_token).int(), **grids}
        reads = inspect.signature(self._inner.get_rope_index).parameters
        positions, _ = self._inner.get_rope_index(
            input_ids, **{name: value for name, value in given.items() if name in reads}
        )
        found: torch.Tensor = positions
        return found

    def _pixels_of(self, pictures: Sequence[Picture]) -> Mapping[str, torch.Tensor]:
        """Return the processor's result for some pictures, as if they were in one text."""
        key = tuple(map(str, pictures))
        if not pictures:
            return {}
        if key not in self._pixels:
            made = self._tokens.processed([picture.open() for picture in pictures])
            self._pixels[key] = {name: value for name, value in made.items() if name not in TEXT_INPUTS}
            while len(self._pixels) > KEPT_PASSES:
                self._pixels.popitem(last=False)
        self._pixels.move_to_end(key)
        return self._pixels[key]


@cache
def _blank() -> bytes:
    from PIL import Image

    Image.new("RGB", (32, 32)).save(buffer := io.BytesIO(), format="PNG")
    return buffer.getvalue()


def weights_of_parts(causal: Any, parts: Collection[str]) -> list[torch.nn.Parameter]:
    """Return the weights of some parts of a vision-language model: `vision`, `projector`, `language`."""
    vision = [causal.get_submodule(name) for name in names_of_vision(causal)]
    language = [language_model_of(causal), causal.get_input_embeddings(), causal.get_output_embeddings()]
    by_part = {
        name: {id(weight) for module in modules for weight in module.parameters()}
        for name, modules in (("vision", vision), ("language", language))
    }

    def part_of(weight: torch.nn.Parameter) -> str:
        return next((name for name, weights in by_part.items() if id(weight) in weights), "projector")

    return [weight for weight in causal.parameters() if part_of(weight) in parts]


def language_model_of(causal: Any) -> Any:
    """Return the part of a transformers model that reads tokens; for a text model, the whole model."""
    return causal.get_decoder() if getattr(causal.config, "vision_config", None) is not None else causal
