"""Hot swaps to test with each family, their results, and the table of docs/families.md."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kit.families import FAMILIES, REFUSED

DOCS = Path(__file__).parents[2] / "docs"
RESULTS, PAGE = DOCS / "families.json", DOCS / "families.md"


@dataclass(frozen=True)
class Run:
    """A test of one engine with two updates."""

    family: str
    tied: bool
    receiver: str
    world_size: int

    def __str__(self) -> str:
        head = "tied" if self.tied else "untied"
        return f"{self.family.replace(' ', '')}-{head}-{self.receiver}-{self.world_size}"


@dataclass(frozen=True)
class Result:
    """Result of one run."""

    run: Run
    greedy_equal: bool
    """Whether greedy completions equal transformers' completions after each update."""
    gap: float
    """Largest difference between a token's log-probability and transformers' value, over both updates."""
    copied: float
    """Share of the weights that the engine copies out of the arena at each update."""
    vllm: str
    transformers: str
    fresh_equal: bool | None = None
    """Whether, after the updates, tokens and log-probabilities have the bits of an engine that starts from these
    weights. None if the run was recorded before this comparison existed."""
    why_padded: str | None = None
    """Reason for padding the rows in training; empty if they are packed, None if the run was recorded before."""
    adapted_gap: float | None = None
    """The `gap` with merged adapters; None with several ranks, or if the run was recorded before."""


# Packing can get tied heads wrong, and aliasing untied heads: each family runs with both receivers.
ON_ONE_RANK = [
    Run(name, tied, receiver, 1)
    for name, family in FAMILIES.items()
    for tied, receiver in [(not family.never_tied, "packed"), (family.always_tied, "live")]
]
ON_TWO_RANKS = [
    Run(name, not family.never_tied, ("live", "packed")[index % 2], 2)
    for index, (name, family) in enumerate(FAMILIES.items())
]
RUNS = [*ON_ONE_RANK, *ON_TWO_RANKS]
# One family for each special case, with alternating receivers; the other runs need the option that records results.
ALWAYS = [
    Run("Qwen3-MoE", True, "live", 2),
    Run("Phi-3", False, "live", 1),
    Run("GPT-NeoX", True, "packed", 1),
    Run("Granite 4 hybrid", True, "live", 2),
]


def read_results() -> list[Result]:
    """Return the last recorded result of each run, in the order of `RUNS`."""
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    known = {Run(**row.pop("run")): row for row in rows}
    return [Result(run, **known[run]) for run in RUNS if run in known]


def record(result: Result) -> None:
    """Write one result to the file; it replaces an older result of the same run."""
    kept = [other for other in read_results() if other.run != result.run]
    rows = sorted([*kept, result], key=lambda row: RUNS.index(row.run))
    RESULTS.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


TEXT = """\
# Model families

Look up whether vectorlm supports your model. You can train and export all families below, and update them in a
running engine. All support packing several texts into a row{padded}.

| family | copied | gap | gap with LoRA |
| --- | ---: | ---: | ---: |
{table}

- *copied*: share of the weights that each update copies from shared memory.
- *gap*: largest difference between log-probabilities of the updated engine and of transformers. *gap with LoRA*: the
  same with merged adapters on linear layers and experts. For families marked *bfloat16*, the tests only require
  equality with a fresh engine, because on CPU vLLM computes Gated DeltaNet only in bfloat16.

The numbers are from tiny random models on CPU, with {versions}, on one and on two
ranks ([all runs](families.json)). The tests update an engine twice, start a fresh engine, train four steps, export the
model, and merge LoRA adapters.

## Check a family that is not listed

```bash
vectorlm check my.yaml --fresh_engine
```

The command compares an updated engine with a fresh one, bit for bit, and needs disk space for a model copy.

## LoRA on experts

transformers stacks the weights of a layer's experts in tensors that PEFT adapts with `target_parameters`:

```yaml
train_parameters:
  lora_peft_config:
    r: 8
    target_modules: [q_proj, v_proj]
    target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]
engine: {{lora_mode: merged}}
```

- For Qwen3-MoE, OLMoE and DeepSeek-V2, PEFT also adapts experts if `target_modules` names `gate_proj`, `up_proj` or
  `down_proj`.
- Updates need `lora_mode: merged`.
- PEFT does not combine `target_parameters` with `lora_dropout` or DoRA.

## gpt-oss and Qwen3.5

The published experts of gpt-oss are in MXFP4, which cannot be trained. Convert them to bfloat16:

```bash
vectorlm model openai/gpt-oss-20b models/gpt-oss-20b
```

Qwen3.5 works in bfloat16. To load it, vLLM needs torchvision, which `make install` installs.

## Limits

| model | reason |
| --- | --- |
{refused}
| experts of Nemotron-H | vLLM computes them on GPUs only |
| latent attention on CPUs with AMX | vLLM drops `kv_b_proj`; `VLLM_MLA_DISABLE=1` keeps it |
| models whose vLLM loader combines several weights | `update` raises `WeightMismatch`; the engine keeps its weights |
"""


def page(results: Sequence[Result]) -> str:
    """Return the text of docs/families.md."""
    lines, padded = [], {}
    for name, family in FAMILIES.items():
        found = [result for result in results if result.run.family == name]
        padded.update((name, result.why_padded) for result in found if result.why_padded)
        adapted = [result.adapted_gap for result in found if result.adapted_gap is not None]
        copied = max((result.copied for result in found), default=0.0)
        cells = [
            name,
            f"{copied:.0%}" if copied else "-",
            _shown([result.gap for result in found], family.dtype),
            _shown(adapted, family.dtype),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return TEXT.format(
        padded=f", except {'; '.join(f'{name} ({why})' for name, why in padded.items())}" if padded else "",
        table="\n".join(lines),
        versions="; ".join(
            sorted({f"vLLM {row.vllm} and transformers {row.transformers}" for row in results})
        ),
        refused="\n".join(f"| {name} | {reason} |" for name, (_, reason) in REFUSED.items()),
    )


def _shown(gaps: Sequence[float], dtype: str) -> str:
    """Format the largest gap, with its dtype if it is not float32."""
    if not gaps:
        return "not recorded"
    return f"{max(gaps):.0e}" if dtype == "float32" else f"{max(gaps):.0e} ({dtype})"


if __name__ == "__main__":
    PAGE.write_text(page(read_results()))
    sys.exit(0 if {result.run for result in read_results()} == set(RUNS) else "some runs are not recorded")
