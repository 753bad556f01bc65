"""``vectorlm replay``: repeat a logged step and compare it, or find the first step at which two runs differ."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vectorlm.cli.export import find_source, load_source
from vectorlm.errors import ConfigError
from vectorlm.ranks.process_end import scratch_folder
from vectorlm.report.card import noted_of
from vectorlm.report.runs import read_lines
from vectorlm.runs.config.load import load_config
from vectorlm.train.checkpoint.folder import folder_of, steps_in

COMPARED = ("policy/loss", "policy/grad_norm", "policy/entropy", "policy/kl", "reward/trained_mean")
"""Metrics of the groups that a step trained on; the log has no groups that dynamic sampling dropped."""
OF_ROLLOUTS = {
    "prompts": "prompt",
    "tokens": "token_ids",
    "rows of branches": "branches",
    "texts": "completion",
    "the sampler's log-probabilities": "sampler_logprobs",
    "rewards": "reward",
    "advantages": "advantage",
}
"""Compared values of the rollouts of two runs and their keys, in the order in which a step computes them."""
OF_METRICS = {"gradient norm": "policy/grad_norm", "loss": "policy/loss"}


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm replay``."""
    parser.add_argument("run", metavar="RUN", help="the output folder of a reinforcement learning run")
    help_text = "the step to repeat, from the checkpoint before it; the run needs rl.rollout.save_tokens"
    parser.add_argument("--step", type=int, metavar="N", help=help_text)
    help_text = "print the first step where RUN and OTHER_RUN differ, and the differences"
    parser.add_argument("--bisect", metavar="OTHER_RUN", help=help_text)


def replay_command(args: argparse.Namespace) -> int:
    """Compare a step with the log, or two runs with each other; return 0 if they are equal, otherwise 1."""
    if (args.step is None) == (args.bisect is None):
        raise ConfigError(
            "the command needs exactly one of --step N and --bisect OTHER_RUN. Pass one of them."
        )
    if args.bisect is not None:
        differences = list(_differences(Path(args.run), Path(args.bisect)))
        print("\n".join(differences) or "no step differs, as far as both have come")
        return int(bool(differences))
    return _replay(Path(args.run), args.step)


def _by_step(path: Path, key: str) -> dict[int, list[dict[str, Any]]]:
    if not path.is_file():
        raise ConfigError(
            f"{path} does not exist: RUN must be the output folder of a reinforcement learning run. Correct it."
        )
    found: dict[int, list[dict[str, Any]]] = {}
    for line in read_lines(path):
        if isinstance(line.get(key), int):
            found.setdefault(line[key], []).append(line)
    return found


def _differences(run: Path, other: Path) -> Iterator[str]:
    """Yield the differences of the first step that differs, causes before their effects."""
    rollouts = [_by_step(folder / "rollouts.jsonl", "train_step") for folder in (run, other)]
    metrics = [_by_step(folder / "metrics.jsonl", "step") for folder in (run, other)]
    measured = metrics[0].keys() & metrics[1].keys() - {0}
    # A step whose groups are all dropped has no rollouts, and the last step of a crashed run has no metrics.
    common = sorted(measured | (rollouts[0].keys() & rollouts[1].keys()))
    if not common:
        raise ConfigError(f"{run} and {other} have no step in common, so they cannot be compared.")
    for step in common:
        here, there = (steps.get(step, []) for steps in rollouts)
        found = []
        if len(here) != len(there):
            found.append(f"step {step}: {len(here)} rollouts and {len(there)}")
        for what, key in OF_ROLLOUTS.items():
            pairs = [
                (a.get(key), b.get(key)) for a, b in zip(here, there, strict=False) if key in a and key in b
            ]
            unlike = [(row, a, b) for row, (a, b) in enumerate(pairs) if a != b]
            if unlike:
                row, a, b = unlike[0]
                where = f"{len(unlike)} of {len(pairs)} rollouts, the first {row}"
                found.append(f"step {step}: {what} differ in {where}: {str(a)[:60]!r} and {str(b)[:60]!r}")
        for what, key in OF_METRICS.items():
            a, b = (steps[step][-1].get(key) if step in measured else None for steps in metrics)
            if a != b:
                found.append(f"step {step}: the {what} differs: {a} and {b}")
        if found:
            yield from found
            return


def _replay(run: Path, step: int) -> int:
    """Repeat the steps from the checkpoint before `step` in a temporary folder, and compare the last one."""
    from vectorlm.algorithms.registry import get_algorithm
    from vectorlm.ranks.launcher import launch
    from vectorlm.runs.preflight.checked import preflight
    from vectorlm.train.settings import EvaluationSettings

    logged = _by_step(run / "metrics.jsonl", "step")
    if step < 1 or step not in logged:
        last = f"ends at step {max(logged)}" if logged else "has no step"
        raise ConfigError(f"--step {step} is not in {run}/metrics.jsonl, which {last}.")
    config = load_config(run / "config.yaml")
    train, rl = config.train_parameters, config.rl
    if rl is None:
        raise ConfigError(f"{run} must be a reinforcement learning run. Name another folder.")
    if logged[step][-1].get("rollout/groups") == 0:
        raise ConfigError(
            f"--step {step}: this step trained on no group, so it cannot be repeated. Choose another step."
        )
    spec = get_algorithm(rl.algorithm.name)
    if spec.needs_greedy or spec.needs_parts:
        raise ConfigError(
            f"rl.algorithm={spec.name}: its steps cannot be repeated, because they need more than is logged. "
            "Use --bisect."
        )
    masks = rl.async_ is not None and rl.async_.overdue == "mask"
    max_lag = rl.async_.max_staleness if masks and rl.async_ is not None else None
    kept = folder_of(run / "checkpoints", step)
    if not kept.is_dir() and noted_of(run / "final-model", "step", int) == step:
        kept = run / "final-model"
    first = max((saved for saved in steps_in(run / "checkpoints") if saved < step), default=0)
    with scratch_folder(run, "replay-") as scratch:
        # The run locks its folder too.
        output = scratch / "run"
        if first:
            source = folder_of(run / "checkpoints", first)
            # Links take no disk space.
            shutil.copytree(source, folder_of(output / "checkpoints", first), copy_function=os.link)
        keep = replace(
            train.keep, keep_best=False, final_model="last", early_stopping_patience=None, best_metric=None
        )
        # The scripted engine has no weights to share.
        train = replace(
            train, output_dir=str(output), checkpointing_enabled=True, keep=keep, share_base=False
        )
        sources = {name: replace(source, held_out=None) for name, source in rl.collect.sources.items()}
        rl = replace(
            rl,
            collect=replace(rl.collect, sources=sources),
            async_=None,
            save_every=rl.num_steps,
            show_every=0,
        )
        config = replace(config, train_parameters=train, evaluation=EvaluationSettings(), rl=rl)
        config = replace(config, trackers={}, enable_wandb_logging=False, push_to_hub=None)
        world_size = json.loads((run / "run.json").read_text())["versions"]["world_size"]
        checked = preflight(config, world_size)
        launch(_on_rank, checked, run / "rollouts.jsonl", step, max_lag, world_size=world_size)
        (again,) = _by_step(output / "metrics.jsonl", "step")[step]
        start = f"the checkpoint of step {first}" if first else "the start"
        print(f"{run}: repeating steps {first + 1} to {step} from {start}")
        return int(not _is_as_logged(logged[step][-1], again, kept, output / "final-model"))


@dataclass(frozen=True)
class _StopAfter:
    """A callback that ends the run after a step."""

    last_step: int

    def on_step(self, run: Any, step: int, metrics: Mapping[str, float]) -> None:
        """Stop after `last_step`."""
        if step == self.last_step:
            run.stop()


def _on_rank(checked: Any, path: Path, step: int, max_lag: int | None) -> None:
    from vectorlm import FakeEngine
    from vectorlm.rl.rollouts.replay import RecordedGroups
    from vectorlm.runs.reinforcement import reinforce

    with FakeEngine(lambda prompt, version: "") as engine:
        reinforce(
            checked,
            engine=engine,
            callbacks=[_StopAfter(step)],
            recorded=RecordedGroups(path, step, max_lag),
        )


def _is_as_logged(logged: Mapping[str, Any], again: Mapping[str, Any], kept: Path, model: Path) -> bool:
    is_same = True
    for name in COMPARED:
        before, now = logged.get(name), again.get(name)
        is_same &= before == now
        print(
            f"  {name:19}  {f'{before}, as logged' if before == now else f'{before} was logged, and is {now}'}"
        )
    if not kept.is_dir():
        print(f"  {'weights':19}  not compared: {kept} does not exist")
        return is_same
    known, found = (load_source(find_source(path))[0].state_dict() for path in (kept, model))
    unlike = [name for name, tensor in known.items() if not tensor.equal(found[name].to(tensor.dtype))]
    text = f"{len(unlike)} of {len(known)} tensors differ" if unlike else "as logged"
    print(f"  {'weights':19}  {text}")
    return is_same and not unlike
