"""The model card: the README.md of an exported model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from vectorlm.packages import versions_of
from vectorlm.report.runs import PACKAGES, START, read_lines, read_settings
from vectorlm.train.lora import hub_name

SHOWN = (
    "train/loss",
    "eval/loss",
    "eval/pair_accuracy",
    "eval/step_accuracy",
    "eval/accuracy",
    "reward/mean",
    "reference/kl",
)
"""Metrics whose newest values are in the card."""

_FULL = """```python
from transformers import {auto}, {reader}

model = {auto}.from_pretrained("path/to/this-folder")
{name} = {reader}.from_pretrained("path/to/this-folder")
```

    vectorlm sample --model path/to/this-folder --prompt "..."
    vllm serve path/to/this-folder
"""
_REWARD_MODEL = """```python
from transformers import AutoModelForSequenceClassification, AutoTokenizer

model = AutoModelForSequenceClassification.from_pretrained("path/to/this-folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this-folder")
```

In a config of vectorlm, its score is a reward: `rl.reward_models: {path/to/this-folder: 1.0}`.
"""
_ADAPTER = """This folder holds LoRA adapters, without the base model.

```python
from peft import PeftModel
from transformers import {auto}, {reader}

base = {auto}.from_pretrained("{base}")
model = PeftModel.from_pretrained(base, "path/to/this-folder")
{name} = {reader}.from_pretrained("path/to/this-folder")
```

    vectorlm sample --model path/to/this-folder --prompt "..."

To serve it, merge it into its base first:

    vectorlm export path/to/this-folder --merge --output path/to/merged
    vllm serve path/to/merged
"""
_SCORER_ADAPTER = """This folder holds LoRA adapters and the head of a reward model, without the base. Merge it first:

    vectorlm export path/to/this-folder --merge --output path/to/merged

In a config of vectorlm, its score is a reward then: `rl.reward_models: {path/to/merged: 1.0}`.
"""


def card_of(run: Path, step: int | None, *, is_adapter: bool, auto: str = "AutoModelForCausalLM") -> str:
    """Return the card of a model that a run trained.

    Args:
        run: The run's folder, with ``config.yaml`` and ``metrics.jsonl``; missing files are left out.
        step: The step of the model's weights; None if unknown.
        is_adapter: Whether the model is LoRA adapters without their base.
        auto: The class of transformers that reads the model; see `auto_class`. Reward models have another one.
    """
    config_text = _read(run / "config.yaml")
    config = yaml.safe_load(config_text) or {}
    train, rl = config.get("train_parameters"), config.get("rl")
    is_scorer = config.get("reward_model") is not None
    has_lora = isinstance(train, dict) and train.get("lora_peft_config") is not None
    reads_images = auto == "AutoModelForImageTextToText"
    task = "image-text-to-text" if reads_images else "text-generation"
    head: dict[str, Any] = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-classification" if is_scorer else task,
        "tags": ["vectorlm", *(["lora"] if has_lora else [])],
    }
    # The Hub cannot link to a path of this machine.
    base = hub_name(str(config.get("model", "./")))
    origin = "Exported by vectorlm.\n"
    if base is not None:
        head["base_model"] = base
    if step is not None:
        head["step"] = step
    if is_adapter and isinstance(train, dict):
        names = ("dtype", "quantization")
        head |= {name: train[name] for name in names if train.get(name) is not None}
    if "model" in config:
        name = base or f"{Path(config['model']).name} (a folder on the machine that trained it)"
        kind = "a reward model" if is_scorer else "supervised fine-tuning"
        if isinstance(rl, dict):
            algorithm = rl.get("algorithm")
            name_of_algorithm = algorithm.get("name") if isinstance(algorithm, dict) else algorithm
            kind = f"reinforcement learning ({Path(str(name_of_algorithm)).name})"
        what = "with LoRA adapters" if has_lora else "all weights"
        steps = "" if step is None else f", step {step}"
        origin = f"Base model: {name}. Trained by vectorlm: {kind}, {what}{steps}.\n"
    sections = [f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n", f"# {run.absolute().name}\n\n{origin}"]
    results: dict[str, str] = {}
    for line in read_lines(run / "metrics.jsonl"):
        if step is not None and line["step"] <= step:
            results |= {
                name: f"| `{name}` | {line[name]:.4g} | {line['step']} |\n"
                for name in SHOWN
                if line.get(name) is not None
            }
    if results:
        rows = "".join(results[name] for name in SHOWN if name in results)
        sections.append(f"## Results\n\n| metric | value | after step |\n| --- | --- | --- |\n{rows}")
    # The export may run on another machine than the training.
    found = read_settings(run / START).get("versions") or versions_of(PACKAGES)
    versions = ", ".join(f"{name} {found[name]}" for name in PACKAGES if name in found)
    of_adapter, whole = (_SCORER_ADAPTER, _REWARD_MODEL) if is_scorer else (_ADAPTER, _FULL)
    use = of_adapter if is_adapter else whole
    if not is_scorer:
        reader = "AutoProcessor" if reads_images else "AutoTokenizer"
        name = reader.removeprefix("Auto").lower()
        use = use.format(auto=auto, reader=reader, name=name, base=base or "path/to/its-base")
    sections += [f"## Use it\n\n{use}", f"## Versions\n\n{versions}\n"]
    if config_text:
        fold = "<details>\n<summary>config.yaml</summary>\n\n"
        sections.append(f"## Settings\n\n{fold}````yaml\n{config_text.rstrip()}\n````\n\n</details>\n")
    return "\n".join(sections)


def noted_of(model: Path, name: str, kind: type) -> Any:
    """Return the value of type `kind` under `name` in the card of an exported model; None if the card has none.

    `step` is the step of the weights. `dtype` and `quantization` describe the base that adapters were trained on.
    """
    parts = _read(model / "README.md").split("---\n")
    try:
        head = yaml.safe_load(parts[1]) if len(parts) > 2 else None
    except yaml.YAMLError:
        return None
    found = head.get(name) if isinstance(head, dict) else None
    return found if isinstance(found, kind) else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
