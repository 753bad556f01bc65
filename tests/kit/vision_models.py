"""Tiny random vision-language models with processors, and images of one colour."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

KINDS = ("qwen2.5-vl", "qwen3-vl", "smolvlm")
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
FAKE, WHOLE, TURN = "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"
"""SmolVLM's tokens around an image and at the end of a turn."""
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
COLOURS = {"r": (220, 30, 30), "g": (30, 200, 40), "b": (40, 60, 220), "y": (230, 220, 40)}

# The template writes one turn per message; `generation` marks the assistant's text.
CHAT_TEMPLATE = """\
{%- macro parts(content) -%}
{%- if content is string -%}{{ content }}{%- else -%}
{%- for part in content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + ':' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{ parts(message.content) + '<|im_end|>' }}{%- endgeneration -%}
{%- else -%}{{ parts(message.content) + '<|im_end|>' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant:' }}{%- endif -%}"""

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def save_llava(path: Path) -> Path:
    """Save a random LLaVA with its processor; transformers 5 and vLLM name its vision model differently."""
    import transformers

    vision = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14, "projection_dim": 64}
    tokenizer = _tokenizer()
    text = {**TEXT, "model_type": "llama", "vocab_size": 112}
    image_token = tokenizer.convert_tokens_to_ids(IMAGE)
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_id=image_token, image_seq_length=16
    )
    transformers.LlavaForConditionalGeneration(config).save_pretrained(path)
    sizes = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(**sizes),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE,
    ).save_pretrained(path)
    return path


def picture(colour: str | tuple[int, int, int], size: tuple[int, int] = (56, 56)) -> Image.Image:
    """Return an image of one colour, a letter of `COLOURS` or RGB; `size` is its width and height."""
    return Image.new("RGB", size, COLOURS[colour] if isinstance(colour, str) else colour)


QWEN_TOKENS = {
    "vision_bos_token": VISION_START,
    "vision_eos_token": VISION_END,
    "image_token": IMAGE,
    "video_token": VIDEO,
}


def _tokenizer(named: Mapping[str, str] = QWEN_TOKENS) -> Any:
    """Return a tokenizer of single printable letters and some special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # The byte alphabet has these names for space and newline.
    names = ["<pad>", "<eos>", "<unk>", *map(chr, range(33, 127)), "\u0120", "\u010a"]
    special = [*named.values(), TURN_START, TURN_END]
    letters = Tokenizer(models.BPE({name: place for place, name in enumerate(names)}, [], unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    letters.add_special_tokens([AddedToken(name, special=True) for name in [*names[:3], *special]])
    return PreTrainedTokenizerFast(
        tokenizer_object=letters,
        eos_token=TURN_END,
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens=named,
    )


def save_vlm(kind: str, path: str | Path, *, seed: int = 0) -> Path:
    """Save a random model of a kind in `KINDS`, with its processor and a chat template; return its folder."""
    if kind == "smolvlm":
        return _save_smolvlm(Path(path), seed)
    import torch
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = _tokenizer()
    text = {**TEXT, "vocab_size": -(-len(tokenizer) // 8) * 8, "pad_token_id": tokenizer.pad_token_id}
    text |= {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    names = ("image_token", "video_token", "vision_start_token", "vision_end_token")
    ids = tokenizer.convert_tokens_to_ids([IMAGE, VIDEO, VISION_START, VISION_END])
    tokens = {f"{name}_id": token for name, token in zip(names, ids, strict=True)}
    config: Any
    if kind == "qwen2.5-vl":
        patch_size, processor_class = 14, transformers.Qwen2_5_VLProcessor
        vision = {**VISION, "patch_size": patch_size, "window_size": 56, "fullatt_block_indexes": [1]}
        config = transformers.Qwen2_5_VLConfig(
            text_config={**text, "rope_parameters": ROPE}, vision_config=vision, **tokens
        )
    else:
        patch_size, processor_class = 16, transformers.Qwen3VLProcessor
        vision = {**VISION, "patch_size": patch_size, "num_position_embeddings": 64}
        rope = {**ROPE, "mrope_interleaved": True}
        config = transformers.Qwen3VLConfig(
            text_config={**text, "head_dim": 32, "rope_parameters": rope},
            vision_config={**vision, "deepstack_visual_indexes": [0]},
            **tokens,
        )
    config.tie_word_embeddings = False
    torch.manual_seed(seed)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(path)
    pixels = (2 * patch_size) ** 2
    processor_class(
        image_processor=Qwen2VLImageProcessorPil(
            patch_size=patch_size, min_pixels=pixels, max_pixels=16 * pixels
        ),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(patch_size=patch_size),
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(path)
    return Path(path)


def _save_smolvlm(path: Path, seed: int) -> Path:
    import torch
    import transformers
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    named = {
        "fake_image_token": FAKE,
        "image_token": IMAGE,
        "end_of_utterance_token": TURN,
        "global_image_token": WHOLE,
    }
    tokenizer = _tokenizer(named)
    text = {**TEXT, "model_type": "llama", "vocab_size": -(-len(tokenizer) // 8) * 8}
    text |= {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    vision = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.SmolVLMConfig(
        text_config={**text, "bos_token_id": None},
        vision_config={**vision, "image_size": 56, "patch_size": 14},
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    transformers.SmolVLMForConditionalGeneration(config).save_pretrained(path)
    longest = {"longest_edge": 56}
    transformers.SmolVLMProcessor(
        image_processor=SmolVLMImageProcessorPil(
            size=longest, max_image_size=longest, do_image_splitting=False
        ),
        tokenizer=tokenizer,
        video_processor=transformers.SmolVLMVideoProcessor(),
        image_seq_len=4,
        chat_template=CHAT_TEMPLATE.replace(VISION_START, "").replace(VISION_END, ""),
    ).save_pretrained(path)
    return path
