from pathlib import Path

import pytest
from kit.config_texts import FULL, MINIMAL

from vectorlm.runs.config.load import load_config, save_config


@pytest.mark.parametrize("text", [MINIMAL, FULL])
def test_a_saved_config_reads_back_identically(write_config, text):
    config = load_config(write_config(text))
    save_config(config, "saved.yaml")
    assert load_config("saved.yaml") == config


@pytest.mark.parametrize(
    "note",
    ["1e-5", "12e5", "true", "null", "2024-01-01", "a: b", "# x", "", " ", "é\n漢\t", "{", "x" * 500, ".inf"],
)
def test_a_text_that_looks_like_something_else_stays_text(write_config, note):
    config = load_config(write_config())
    config.wandb_config["note"] = [note]
    save_config(config, "saved.yaml")
    assert load_config("saved.yaml").wandb_config == {"note": [note]}


@pytest.mark.parametrize("date", ["2026-11-27", "2026-11-27 10:00:00"])
def test_a_date_is_text(write_config, date):
    """JSON has no type for dates, and checkpoints are saved as JSON."""
    path = write_config(f"{MINIMAL}wandb_config: {{name: {date}}}\n")
    assert load_config(path).wandb_config == {"name": date}
    assert load_config(path, [f"wandb_config={{name: {date}}}"]).wandb_config == {"name": date}


@pytest.mark.parametrize("number", [1e-5, 1e300, 3, -100, float("inf"), 0.1, True, None])
def test_a_number_stays_a_number(write_config, number):
    config = load_config(write_config())
    config.wandb_config["number"] = number
    save_config(config, "saved.yaml")
    read = load_config("saved.yaml").wandb_config["number"]
    assert read == number
    assert type(read) is type(number)


def test_defaults_and_overrides_are_written_out(write_config):
    config = load_config(write_config(), ["train_parameters.epochs=9"])
    save_config(config, "saved.yaml")
    with open("saved.yaml") as file:
        lines = [line.strip() for line in file]
    assert "epochs: 9" in lines
    assert "seed: 11" in lines
    assert "reward_model: null" in lines
    assert not any(line.startswith("origins") for line in lines)


def test_a_saved_config_is_readable_in_any_script(write_config):
    save_config(load_config(write_config(), ["model=modèle"]), "saved.yaml")
    assert "model: modèle\n" in Path("saved.yaml").read_text(encoding="utf-8")


def test_values_shared_inside_the_config_are_written_out_each_time(write_config):
    config = load_config(write_config())
    config.wandb_config.update(a=(shared := ["x"]), b=shared)
    save_config(config, "saved.yaml")
    with open("saved.yaml") as file:
        assert "&" not in file.read()
