"""Which hot swaps are tried with which family, what came of them, and the table that says so."""

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
    """One engine, and two updates of it."""

    family: str
    tied: bool
    receiver: str
    world_size: int

    def __str__(self) -> str:
        head = "tied" if self.tied else "untied"
        return f"{self.family.replace(' ', '')}-{head}-{self.receiver}-{self.world_size}"


@dataclass(frozen=True)
class Result:
    """The result of one run."""

    run: Run
    greedy_equal: bool
    """After each update, greedy completions are those of transformers."""
    gap: float
    """The largest difference of a token's log-probability from transformers', over both updates."""
    copied: float
    """The share of the weights that the engine copies out of the arena at each update."""
    vllm: str
    transformers: str
    fresh_equal: bool | None = None
    """After the updates, tokens and log-probabilities have the bits of an engine that starts from these weights.
    None if the run was recorded before this was compared."""
    why_padded: str | None = None
    """Why its rows are padded in training; empty if they are packed, None if the run was recorded before."""
    adapted_gap: float | None = None
    """The same gap with merged adapters; None with several ranks, or if the run was recorded before."""


# Tied heads are what packing gets wrong, untied ones what aliasing could: each family meets both receivers.
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
# One family for each oddity, now with this receiver and now with the other; the rest runs when results are recorded.
ALWAYS = [
    Run("Qwen3-MoE", True, "live", 2),
    Run("Phi-3", False, "live", 1),
    Run("GPT-NeoX", True, "packed", 1),
    Run("Granite 4 hybrid", True, "live", 2),
]


def read_results() -> list[Result]:
    """Return what the last recorded run of each test showed, in the order of `RUNS`."""
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    known = {Run(**row.pop("run")): row for row in rows}
    return [Result(run, **known[run]) for run in RUNS if run in known]


def record(result: Result) -> None:
    """Put one result into the file, in place of an older one of the same run."""
    kept = [each for each in read_results() if each.run != result.run]
    rows = sorted([*kept, result], key=lambda each: RUNS.index(each.run))
    RESULTS.write_text(json.dumps([asdict(each) for each in rows], indent=1) + "\n")


def page(results: Sequence[Result]) -> str:
    """Return the text of docs/families.md."""
    versions = sorted({f"vLLM {each.vllm}, transformers {each.transformers}" for each in results})
    lines = [
        "# Model families",
        "",
        "Look up whether vectorlm can update a vLLM engine that runs your model, and train it.",
        "",
        "Each row is a tiny random model on CPU. The test swaps new weights into a running engine twice and",
        "compares the engine with transformers after each update. Greedy completions must be equal, and no",
        "log-probability may differ by 1e-4 or more. Then the test starts a fresh engine from the same weights. Both",
        "engines must return tokens and log-probabilities with the same bits. vLLM computes Gated DeltaNet on CPU",
        "in bfloat16 only; for such a family the test compares with a fresh engine alone.",
        "",
        "The test also trains each model: four steps must lower the loss, and transformers must read the exported",
        "model with the same logits. It then updates the engine with adapters on linear layers and experts, merged.",
        f"Versions: {'; '.join(versions)}. Made by `PYTHONPATH=tests python tests/kit/family_runs.py` from what",
        "`python -m pytest tests/sampling/test_families.py --record-families` wrote to `families.json`.",
        "",
        "| family | what is odd about it | swap, training, export | rows in training | LoRA, merged: largest gap |",
        "| --- | --- | --- | --- | ---: |",
    ]
    for name, family in FAMILIES.items():
        found = [each for each in results if each.run.family == name and each.why_padded is not None]
        gaps = [each.adapted_gap for each in found if each.adapted_gap is not None]
        why = found[0].why_padded if found else None
        rows = {None: "not recorded", "": "packed"}.get(why, f"padded: {why}")
        in_16_bits = " (bfloat16)" if family.dtype != "float32" else ""
        gap = f"{max(gaps):.0e}{in_16_bits}" if gaps else "not recorded"
        lines.append(f"| {name} | {family.layout} | yes | {rows} | {gap} |")
    lines += [
        "",
        "## What was measured",
        "",
        "Path *direct* means that every parameter of the engine is a view of the memory that the trainer writes",
        "to. *direct, n % copied* means that the engine copies that share of the weights at each update. With the",
        "receiver `packed`, the engine packs its matrices again after either.",
        "",
        "| family | head | receiver | ranks | path | largest log-prob gap | greedy | fresh |",
        "| --- | --- | --- | ---: | --- | ---: | --- | --- |",
    ]
    for each in results:
        run = each.run
        path = "direct" if not each.copied else f"direct, {each.copied:.0%} copied"
        in_16_bits = " (bfloat16)" if FAMILIES[run.family].dtype != "float32" else ""
        cells = [
            run.family,
            "tied" if run.tied else "untied",
            run.receiver,
            str(run.world_size),
            path,
            f"{each.gap:.0e}{in_16_bits}",
            "equal" if each.greedy_equal else "differs",
            {True: "same bits", False: "**differs**", None: "not recorded"}[each.fresh_equal],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "## Weights that vLLM computes with",
        "",
        "Some loaders compute with a weight and keep only the result, such as `-exp(A_log)` of Mamba-2. An update",
        "sends such a weight whole, checks that it arrived, and runs vLLM's own loader on it. Then it loads the",
        "weight once more, and no bit may change. For latent attention vLLM keeps parts of a projection in another",
        "order; an update makes them again and checks them in the same way. A loader that computes with several",
        "weights at once is refused: `update` raises `WeightMismatch`, and the engine keeps its weights.",
        "",
        "**Before version 0.1, updates of Mamba-2, Falcon-H1, Granite 4 hybrid and Nemotron-H were reported as",
        "proven, and were wrong**: log-probabilities were 0.76 to 2.35 off. The checksums matched because they",
        "compared the bytes that were sent with the bytes that arrived, and not with what vLLM computes from them.",
        "Do not trust runs that sampled from one of these families then.",
        "",
        "## A family that is not listed",
        "",
        "`vectorlm check my.yaml --fresh_engine` starts the config's engine, sends it the model plus noise, starts",
        "a second engine with the same weights, and compares the bits of both. It needs disk space for the model.",
        "",
        "## LoRA on experts",
        "",
        "transformers keeps the experts of a layer in one tensor. PEFT adapts it with `target_parameters`:",
        "",
        "```yaml",
        "train_parameters:",
        "  lora_peft_config:",
        "    r: 8",
        "    target_modules: [q_proj, v_proj]",
        "    target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]",
        "engine: {lora_mode: merged}",
        "```",
        "",
        "For Qwen3-MoE, OLMoE and DeepSeek-V2 PEFT also does this when `target_modules` names `gate_proj`, `up_proj`",
        "or `down_proj`. Updates need `lora_mode: merged`: vLLM computes adapters of experts on GPUs only, and such an",
        "engine has not been tried. PEFT allows no `lora_dropout` and no DoRA with `target_parameters`.",
        "",
        "## gpt-oss",
        "",
        "It is published with experts in MXFP4, which cannot be trained. `vectorlm model openai/gpt-oss-20b DIR`",
        "writes them in bfloat16; a folder in MXFP4 in place of the name works too. A run refuses MXFP4 and prints",
        "this command.",
        "",
        "## Qwen3.5",
        "",
        "vLLM needs torchvision to load it, which `make` installs. After two updates in bfloat16 the engine has the",
        "bits of a fresh engine. Rows are packed in training.",
        "",
        "## Not possible",
        "",
        "| model | reason |",
        "| --- | --- |",
        *(f"| {name} | {reason} |" for name, (_, reason) in REFUSED.items()),
        "| latent attention on CPUs with AMX | vLLM drops the projection; `VLLM_MLA_DISABLE=1` keeps it |",
    ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page(read_results()))
    sys.exit(0 if {each.run for each in read_results()} == set(RUNS) else "some runs are not recorded")
