"""Make data for a first run with images: pictures with questions, and a tiny random Qwen2.5-VL.

Run ``python examples/make_pictures.py --output_dir data/pictures --seed 0``; the same arguments write the same files
again. The folder then holds

- ``model/``: random weights, with tokenizer, image processor and chat template;
- ``images/``: pictures of one to four squares of one colour on a grid of three by three;
- ``train.jsonl`` and ``held_out.jsonl``: for each picture a question about its colour or its number of squares.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLVideoProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

COLOURS = {"red": (220, 40, 40), "green": (40, 190, 60), "blue": (50, 70, 220), "yellow": (230, 210, 50)}
NUMBERS = ("one", "two", "three", "four")
QUESTIONS = ("colour?", "number?")
CELL, GRID = 28, 3
"""Width of a cell in pixels, and cells in a row; the model reads a cell as one token."""
SPECIAL_TOKENS = (
    "<pad>",
    "<unk>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|im_start|>",
    "<|im_end|>",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with a token for each word of the task."""
    words = (*QUESTIONS, *COLOURS, *NUMBERS)
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    pattern = "|".join(word.replace("?", r"\?") for word in words)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=list(SPECIAL_TOKENS[2:]),
        extra_special_tokens={
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
        },
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """Return a random Qwen2.5-VL of 0.2 million parameters; vLLM's CPU attention needs heads of at least 32."""
    names = ("vision_start", "vision_end", "image", "video")
    ids = tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS[2:6]))
    text = {
        "vocab_size": -(-len(tokenizer) // 8) * 8,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    }
    vision = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": CELL // 2,
        "window_size": 4 * CELL,
        "fullatt_block_indexes": [0],
        "initializer_range": 0.1,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=False,
        **{f"{name}_token_id": token for name, token in zip(names, ids, strict=True)},
    )
    torch.manual_seed(seed)
    return Qwen2_5_VLForConditionalGeneration(config)


def draw(random: Random, path: Path) -> tuple[str, str]:
    """Draw a picture; return its colour and its number of squares as words."""
    colour, number = random.choice(list(COLOURS)), random.randint(1, len(NUMBERS))
    picture = Image.new("RGB", (CELL * GRID, CELL * GRID), (245, 245, 245))
    shade = tuple(value + random.randint(-15, 15) for value in COLOURS[colour])
    for cell in random.sample(range(GRID * GRID), number):
        row, column = divmod(cell, GRID)
        square = Image.new("RGB", (CELL - 6, CELL - 6), shade)
        picture.paste(square, (column * CELL + 3, row * CELL + 3))
    picture.save(path)
    return colour, NUMBERS[number - 1]


def write_questions(folder: Path, name: str, count: int, random: Random) -> None:
    """Draw `count` pictures, and write a question about each into ``NAME.jsonl``."""
    rows = []
    for index in range(count):
        path = folder / "images" / f"{name}_{index}.png"
        answers = draw(random, path)
        kind = index % len(QUESTIONS)
        parts = [{"type": "image"}, {"type": "text", "text": QUESTIONS[kind]}]
        prompt = [{"role": "user", "content": parts}]
        rows.append({"prompt": prompt, "images": [str(path)], "answer": answers[kind]})
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Parse the arguments and write the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, default=Path("data/pictures"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_train", type=int, default=512, help="pictures to learn from")
    parser.add_argument("--num_eval", type=int, default=128, help="held-out pictures")
    arguments = parser.parse_args()

    folder: Path = arguments.output_dir
    (folder / "images").mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    build_model(tokenizer, arguments.seed).save_pretrained(folder / "model")
    pixels = (CELL * GRID) ** 2
    Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessorPil(
            patch_size=CELL // 2, min_pixels=CELL * CELL, max_pixels=pixels
        ),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(patch_size=CELL // 2),
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder / "model")
    random = Random(f"pictures-{arguments.seed}")
    write_questions(folder, "train", arguments.num_train, random)
    write_questions(folder, "held_out", arguments.num_eval, random)
    print(f"{folder}: {arguments.num_train} pictures to learn from, {arguments.num_eval} held out")


if __name__ == "__main__":
    main()
