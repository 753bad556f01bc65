"""Read models and tokenizers from folders, and quantise models to NF4."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vectorlm.algorithms.logprobs import compute_head_in_float32
from vectorlm.data.encoding import with_template
from vectorlm.data.settings import PLAIN_CHAT, ChatSettings
from vectorlm.errors import ConfigError
from vectorlm.sampling.weights.plan import dtype_of
from vectorlm.train.four_bit import four_bit_method, unpacked_weights
from vectorlm.train.shard import transformer_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

STEP_SEPARATOR = "step_separator"
"""Key of tokenizer_config.json for the text that ends a step, if the model scores steps."""


def trust_code(path: str | Path) -> None:
    """Let this process run a model's own Python files, if it has any; transformers then needs only the folder.

    Raises:
        ConfigError: The files cannot be imported, or lack a class that config.json names.
    """
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    folder = str(path)
    classes, of_tokenizer = _own_classes(path, "config.json"), _own_classes(path, "tokenizer_config.json")
    if not classes and not of_tokenizer:
        return
    with _naming(path, "code"):
        if "AutoConfig" in classes:
            config: Any = get_class_from_dynamic_module(classes["AutoConfig"], folder)
            transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
        else:
            config = type(transformers.AutoConfig.from_pretrained(folder))
        for name, reference in classes.items():
            if name.startswith("AutoModel"):
                model: Any = get_class_from_dynamic_module(reference, folder)
                model.config_class = config
                getattr(transformers, name).register(config, model, exist_ok=True)
        if tokenizers := of_tokenizer.get("AutoTokenizer"):
            names = tokenizers if isinstance(tokenizers, list) else [tokenizers, None]
            slow, fast = (name and get_class_from_dynamic_module(name, folder) for name in names)
            transformers.AutoTokenizer.register(config, slow, fast_tokenizer_class=fast, exist_ok=True)


def _own_classes(path: str | Path, file: str) -> dict[str, Any]:
    """Return the classes of a model's own files, by the name of transformers' auto class."""
    classes = _description(path, file).get("auto_map") if Path(path, file).is_file() else None
    return classes if isinstance(classes, dict) else {}


def load_tokenizer(
    path: str | Path, chat: ChatSettings = PLAIN_CHAT, step_separator: str | None = None
) -> PreTrainedTokenizerBase:
    """Read the tokenizer in a model's folder.

    Args:
        path: The model's folder, or its name on the Hub.
        chat: The chat template.
        step_separator: The text that ends a step, for copies of the tokenizer that are saved later; None for none.

    Raises:
        ConfigError: There is no model or no tokenizer, the model has too few embeddings for the tokenizer, or `chat`
            does not fit.
    """
    from transformers import AutoTokenizer

    with _naming(path, "tokenizer"):
        description = _description(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
    # A model for text and images has the size of its vocabulary in the section for text.
    num_embeddings = (description.get("text_config") or description).get("vocab_size")
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if isinstance(num_embeddings, int) and largest >= num_embeddings:
        raise ConfigError(
            f"model={str(path)!r} has embeddings for {num_embeddings} tokens, but its tokenizer has a token "
            f"{largest}. Resize the embeddings (see docs/data.md), or save the matching tokenizer beside the model."
        )
    if step_separator is not None:
        tokenizer.init_kwargs[STEP_SEPARATOR] = step_separator
    with_template(tokenizer, chat.chat_template, chat.chat_template_kwargs)
    return tokenizer


def load_model(
    path: str | Path,
    *,
    flash_attention: bool = False,
    dtype: str = "float32",
    is_empty: bool = False,
    fp32_head: bool = False,
) -> PreTrainedModel:
    """Read a causal or a vision-language model onto the CPU, in training mode; see `load_pretrained`.

    Without a CUDA device, the model's own attention replaces Flash Attention; the results are the same.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    attention = _attention(path, flash_attention)
    auto = AutoModelForImageTextToText if reads_images(path) else AutoModelForCausalLM
    model = load_pretrained(auto, path, dtype, is_empty, attn_implementation=attention).train()
    if fp32_head:
        compute_head_in_float32(model.get_output_embeddings())
    return model


def reads_images(path: str | Path) -> bool:
    """Return whether the model in a folder is a vision-language model, by transformers' own list."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    with _naming(path, "model"):
        if "vision_config" not in _description(path):
            return False  # For most models, this does not import transformers' classes.
        return type(AutoConfig.from_pretrained(path)) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def _attention(path: str | Path, flash_attention: bool) -> str | None:
    """Return the attention implementation for a model; None for the default of transformers."""
    with _naming(path, "model"):
        capped = _description(path).get("attn_logit_softcapping")
    if flash_attention and torch.cuda.is_available():
        return "flash_attention_2"
    # transformers 5.19: torch's kernel silently omits the cap on Gemma 2's attention scores. The trainer's
    # log-probabilities would differ from the engine's.
    return "eager" if capped else None


def load_scorer(
    path: str | Path,
    tokenizer: Any,
    *,
    flash_attention: bool = False,
    dtype: str = "float32",
    is_empty: bool = False,
) -> Any:
    """Read a model that scores whole texts; a missing head starts from small random numbers.

    A new head reads the last token that is not EOS, whether or not texts end in EOS. Its config declares EOS as the
    padding token, which transformers skips.

    Raises:
        ConfigError: It cannot be read, has several labels, or transformers has no scoring model of its architecture.
    """
    from transformers import AutoModelForSequenceClassification

    options = {"num_labels": 1, "attn_implementation": _attention(path, flash_attention)}
    model = load_pretrained(AutoModelForSequenceClassification, path, dtype, is_empty, ("score.",), **options)
    config = model.config.get_text_config()
    if not is_scorer(path):
        ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)
        config.pad_token_id = next((token for token in ends if token is not None), None)
    if config.pad_token_id is None:
        raise ConfigError(
            f"model={str(path)!r} cannot be a reward model: its tokenizer needs an eos_token or a pad_token, which "
            "marks the end of a text. Save the tokenizer with one of them."
        )
    return model.train()


def is_scorer(path: str | Path) -> bool:
    """Return whether the model in a folder has a head for scores."""
    names = _description(path).get("architectures") or ()
    return any(name.endswith("ForSequenceClassification") for name in names)


def load_pretrained(
    auto: Any,
    path: str | Path,
    dtype: str,
    is_empty: bool = False,
    new: tuple[str, ...] = (),
    **arguments: Any,
) -> Any:
    """Read a model with the auto class `auto` of transformers; if `is_empty`, without memory for its parameters.

    Raises:
        ConfigError: It cannot be read, or lacks a tensor whose name does not begin with one of `new`.
    """
    from transformers import AutoConfig, GenerationConfig

    arguments["dtype"] = dtype_of(dtype)
    with _naming(path, "model"):
        is_packed = four_bit_method(_description(path)) is not None
    if not is_empty and not is_packed:
        with _naming(path, "model"), _without_report() if new else nullcontext():
            model, info = auto.from_pretrained(path, output_loading_info=True, **arguments)
        return _complete(model, info, path, new)
    from accelerate import init_empty_weights

    of_config = {name: arguments.pop(name) for name in ("num_labels",) if name in arguments}
    with _naming(path, "model"), init_empty_weights(include_buffers=False):
        config = AutoConfig.from_pretrained(path, **of_config)
        if is_packed:
            del config.quantization_config
        model = auto.from_config(config, **arguments)
    if is_empty:
        model.tie_weights()
        return model
    with _naming(path, "model"), _without_report():
        arguments |= {"config": config, "state_dict": unpacked_weights(path, arguments["dtype"])}
        model, info = type(model).from_pretrained(None, output_loading_info=True, **arguments)
    # A model read from tensors has no folder, but its adapters name the folder as their base.
    model.config.name_or_path = model.name_or_path = str(path)
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(path)
    return _complete(model, info, path, new)


def _complete(model: Any, info: Mapping[str, Any], path: str | Path, new: tuple[str, ...]) -> Any:
    """Return `model`; raise if it lacks a tensor whose name does not begin with one of `new`."""
    if missing := sorted(name for name in info["missing_keys"] if not name.startswith(new)):
        raise ConfigError(
            f"model={str(path)!r} lacks {len(missing)} tensors ({', '.join(missing[:5])}), which would get "
            "random values. Use a complete checkpoint."
        )
    return model


@contextmanager
def _without_report() -> Iterator[None]:
    """Silence transformers' report of missing tensors."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def _naming(path: str | Path, what: str) -> Iterator[None]:
    """Name the folder in errors of transformers."""
    try:
        yield
    except (MemoryError, RuntimeError, ConfigError):
        # Another file would not help, for example if memory runs out.
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).strip()}"
        fix = f"Download or save the {what} again, complete, with an architecture that transformers knows."
        if isinstance(error, ImportError):
            fix = "Install the missing package."
        if re.search("Flash ?Attention", text):
            fix = "Set train_parameters.use_flash_attention to false, or install the package flash-attn."
        raise ConfigError(
            f"the {what} in {str(path)!r} cannot be loaded: {text.rstrip('.')}. {fix}"
        ) from error


def _description(path: str | Path, name: str = "config.json") -> dict[str, Any]:
    # Read this before transformers does: it takes a missing folder for a name on the hub.
    return json.loads(Path(path, name).read_text(encoding="utf-8"))


class NF4Linear(nn.Linear):
    """A linear layer with a frozen weight in NF4 and double quantisation.

    The packed weight is a buffer. FSDP2 does not shard it: each rank has the whole weight. Checkpoints do not have it.

    Source: Dettmers et al. 2023, arXiv 2305.14314, eq. 5.
    """

    def __init__(self, layer: nn.Linear, device: str) -> None:
        from bitsandbytes.functional import quantize_4bit

        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        weight = layer.weight.detach().to(device)
        packed, self.quant_state = quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        self.packed: torch.Tensor
        self.register_buffer("packed", packed.view(self.out_features, -1), persistent=False)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The packed weight, whose device and dtype PEFT reads."""
        return self.packed

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute in the dtype of the input."""
        from bitsandbytes import matmul_4bit

        return matmul_4bit(input, self.packed.view(-1, 1).t(), self.quant_state, bias=self.bias)

    def dequantize(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the weight for some rows of `self.packed`, in the dtype in which it was loaded."""
        from bitsandbytes.functional import dequantize_4bit

        # The 64 numbers of a scale may cross the end of a row: convert the whole weight.
        first = (packed.storage_offset() - self.packed.storage_offset()) // self.packed.shape[1]
        return dequantize_4bit(self.packed.view(-1, 1), self.quant_state)[first : first + len(packed)]


def quantize_blocks(model: nn.Module, device: str) -> nn.Module:
    """Replace all linear layers inside the transformer blocks by `NF4Linear` layers on `device`."""
    for owner, name, layer in list(_linear_layers(model)):
        setattr(owner, name, NF4Linear(layer, device))
    return model


@torch.no_grad()
def round_blocks(model: nn.Module) -> None:
    """Round the weights of all linear layers inside the transformer blocks to NF4, except adapters."""
    for _, _, layer in _linear_layers(model):
        quantized = NF4Linear(layer, str(layer.weight.device))
        layer.weight.copy_(quantized.dequantize(quantized.packed))


def _linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for block in transformer_blocks(model):
        for path, owner in block.named_modules():
            for name, layer in owner.named_children():
                if type(layer) is nn.Linear and layer.in_features % 2 == 0 and "lora_" not in path:
                    yield owner, name, layer
