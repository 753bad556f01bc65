"""The page of model sizes that fit, and the configs for GPUs, checked with models without weights."""

import shlex
import sys
from itertools import product
from pathlib import Path

import pytest

from vectorlm.cli import main
from vectorlm.runs.preflight import settings as preflight_settings

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "benchmarks"))

import sizes  # noqa: E402

CONFIGS = sorted(path.name for path in (ROOT / "configs/cuda").glob("*.yaml"))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in sizes.MODELS:
        sizes.make_folder(folder / name, name)
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return sizes.page(tmp_path_factory.mktemp("page"))


@pytest.fixture
def checkout(models, tmp_path, monkeypatch):
    """Make a folder with the files that the page's commands use."""
    monkeypatch.chdir(tmp_path)
    # A plan does not need the package installed.
    monkeypatch.setattr(preflight_settings, "is_installed", lambda name: True)
    Path("configs").symlink_to(ROOT / "configs")
    Path("models").symlink_to(models)
    for name in ("train", "eval"):
        Path("data", name).mkdir(parents=True)
        Path("data", name, "dataset_info.json").write_text("{}")
        Path("data", f"{name}.jsonl").write_text('{"prompt": "1", "numbers": [1, 2], "target": 3}\n')


@pytest.mark.slow
def test_the_page_says_what_the_plan_computes(page):
    assert sizes.PAGE.read_text() == page


@pytest.mark.slow
def test_the_command_of_every_cell_says_the_same(page, checkout, capsys):
    number = 0
    what_fits, _, _ = page.partition("## Longest sequences")
    for line in what_fits.splitlines():
        names, devices, *ways = [cell.strip() for cell in line.strip("|").split("|")] + [""]
        cases = [*product(names.split(", "), devices.split(", "))]
        if cases[0][0] not in sizes.MODELS:
            continue
        del ways[-1]
        places = [(gigabytes, kind) for gigabytes in sizes.DEVICE_GB for kind in sizes.KINDS]
        for (gigabytes, kind), way in zip(places, ways, strict=True):
            does_fit = way != sizes.NOTHING
            settings = sizes.overrides(kind, way if does_fit else "CPU offload")
            for name, num_devices in cases:
                words = shlex.split(sizes.command(name, int(num_devices), gigabytes, settings))
                assert main(words[1:]) == (0 if does_fit else 2), (words, capsys.readouterr())
                number += 1
    assert number == len(sizes.MODELS) * len(sizes.NUM_DEVICES) * len(sizes.DEVICE_GB) * len(sizes.KINDS)


@pytest.mark.slow
def test_the_longest_sequence_of_a_model_passes_the_check_and_the_next_does_not(models, checkout, capsys):
    for name, where in product(sizes.MODELS, sizes.LONG):
        num_devices, gigabytes, kind, most = where
        length = sizes.longest(models / name, name, *where)
        for tried, is_longer in ((length, False), (4 * (length or 512), True)):
            if tried in sizes.LENGTHS:
                words = sizes.command(
                    name, num_devices, gigabytes, sizes.long_settings(name, kind, most, tried)
                )
                assert main(shlex.split(words)[1:]) == (2 if is_longer else 0), (words, capsys.readouterr())


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_for_gpus_fits_on_what_it_is_written_for(checkout, name, capsys):
    line = next(
        line for line in (ROOT / "configs/cuda" / name).read_text().splitlines() if "vectorlm check" in line
    )
    words = shlex.split(line.partition("vectorlm check")[2])
    assert words[0] == f"configs/cuda/{name}"
    assert main(["check", *words]) == 0, capsys.readouterr()
    assert "memory of the node's host" in capsys.readouterr().out
