"""Models with names of the Hugging Face Hub, and sequences of the model's own maximal length."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from datasets import Dataset
from huggingface_hub import constants
from kit.config_texts import MINIMAL
from kit.rank_processes import save_tiny_llama
from kit.tiny_runs import rows

from vectorlm.cli import main
from vectorlm.errors import ConfigError
from vectorlm.runs.config.load import load_config
from vectorlm.runs.preflight.local_model import (
    local_folder,
    missing_files,
    own_length,
    resolve_model,
    with_download,
)
from vectorlm.runs.preflight.resume import identity_of
from vectorlm.runs.preflight.settings import setting_problems

NAME = "acme/tiny"
ON_HUB = ("model: models/tiny", f"model: {NAME}")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("hub") / "model", hidden_size=64)


@pytest.fixture
def cache(write_config, tmp_path, monkeypatch):
    """Return an empty cache near the config, without access to the Hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf/hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hf/hub"


def lay_out(cache, model, *names, revision="5f1c"):
    """Put files of a model into the cache as a download does: links from a snapshot to blobs."""
    folder = cache / "models--acme--tiny"
    for made in (folder / "blobs", folder / "refs", folder / "snapshots" / revision):
        made.mkdir(parents=True, exist_ok=True)
    (folder / "refs/main").write_text(revision)
    for path in model.iterdir():
        if not names or path.name in names:
            blob = folder / "blobs" / f"{revision}-{path.name}"
            blob.write_bytes(path.read_bytes())
            (folder / "snapshots" / revision / path.name).symlink_to(f"../../blobs/{blob.name}")
    return folder / "snapshots" / revision


def refusal(path, capsys):
    assert main(["check", path]) == 2
    return capsys.readouterr().err


def test_a_name_is_the_snapshot_in_the_cache(cache, model, write_config):
    snapshot = lay_out(cache, model)
    config = resolve_model(load_config(write_config(MINIMAL, ON_HUB)))
    assert config.model == str(snapshot)
    assert config.notes == (f"model: {NAME} is {snapshot}",)
    assert (
        identity_of(config, 1)["contents"]
        == identity_of(load_config("my.yaml", [f"model={model}"]), 1)["contents"]
    )


ADAPTERS = {
    "peft_type": "LORA",
    "r": 8,
    "target_modules": ["v_proj", "q_proj"],
    "bias": "none",
    "inference_mode": True,
}


def adapters_on(base, **options):
    """Write a description of adapters on a model; return the config change that makes them the model."""
    Path("trained").mkdir(exist_ok=True)
    described = {**ADAPTERS, "base_model_name_or_path": str(base), **options}
    Path("trained/adapter_config.json").write_text(json.dumps(described))
    return "models/tiny", "trained"


def test_adapters_are_their_base_and_their_options(model, write_config):
    config = resolve_model(load_config(write_config(MINIMAL, adapters_on(model, lora_dropout=0.0))))
    train = config.train_parameters
    assert (config.model, train.adapters) == (str(model), "trained")
    options = {"r": 8, "target_modules": ["v_proj", "q_proj"], "lora_dropout": 0.0, "exclude_modules": []}
    assert train.lora_peft_config == options
    assert resolve_model(config) == config
    assert config.notes == (f"model: the LoRA adapters in trained are on {model}",)
    given = "train_parameters.lora_peft_config={r: 8, target_modules: [q_proj, v_proj], lora_dropout: 0.0}"
    assert resolve_model(load_config("my.yaml", [given])).train_parameters == train
    whole = resolve_model(load_config("my.yaml", ["train_parameters.merge_adapters=True"]))
    assert whole.train_parameters.lora_peft_config is None
    contents = identity_of(config, 1)["contents"]
    Path("trained/adapter_model.safetensors").write_text("other numbers")
    assert identity_of(config, 1)["contents"] != contents


@pytest.mark.parametrize(
    ("options", "given", "text"),
    [
        ({}, "lora_peft_config={r: 4}", "lora_peft_config.r=4 must be 8"),
        ({}, "lora_peft_config={target_modules: all-linear}", "target_modules='all-linear' must be ["),
        ({}, "lora_peft_config={use_dora: True}", "use_dora=true must be null"),
        ({}, "lora_peft_config={layers_to_transform: 0}", "layers_to_transform=0 must be null"),
        ({"peft_type": "IA3"}, "seed=1", "the adapters in trained are IA3"),
        (
            {"base_model_name_or_path": "no/such"},
            "seed=1",
            "the base model 'no/such' of the adapters in trained",
        ),
        ({}, "adapters=elsewhere", "train_parameters.adapters='elsewhere'"),
    ],
)
def test_adapters_that_cannot_be_gone_on_with_are_refused_by_name(model, write_config, options, given, text):
    change = adapters_on(model, **options)
    if given.startswith("adapters="):
        change = ("models/tiny", str(model))
    with pytest.raises(ConfigError, match=re.escape(text)):
        resolve_model(load_config(write_config(MINIMAL, change), [f"train_parameters.{given}"]))


def test_adapters_in_two_places_are_refused(model, write_config):
    config = load_config(write_config(MINIMAL, adapters_on(model)), ["train_parameters.adapters=others"])
    with pytest.raises(ConfigError, match=r"train_parameters.adapters='others'.*model='trained'"):
        resolve_model(config)


def test_what_adapters_begin_with_decides_what_may_be_done_with_them(model, write_config):
    refused = {
        "lora_peft_config.use_dora=true": ({"use_dora": True}, ["train_parameters.sampler={prompts: [abc]}"]),
        "lora_peft_config.task_type='SEQ_CLS'": ({"task_type": "SEQ_CLS"}, []),
        "merge_adapters=true": (
            {},
            ["train_parameters.merge_adapters=True", "train_parameters.lora_peft_config={r: 8}"],
        ),
    }
    for text, (options, overrides) in refused.items():
        config = resolve_model(load_config(write_config(MINIMAL, adapters_on(model, **options)), overrides))
        assert any(text in problem for problem in setting_problems(config, 1)), text


def test_a_folder_of_that_name_comes_first(cache, model, write_config):
    lay_out(cache, model)
    Path(NAME).mkdir(parents=True)
    assert resolve_model(load_config(write_config(MINIMAL, ON_HUB))).model == NAME


def test_a_model_that_is_not_in_the_cache_comes_with_the_command_that_fetches_it(cache, write_config, capsys):
    text = refusal(write_config(MINIMAL, ON_HUB), capsys)
    assert f"model='{NAME}'" in text
    assert f"it is not in {cache}. Run `hf download {NAME}`, or name a folder. (my.yaml:1)" in text


def test_what_a_half_downloaded_model_lacks_is_named(cache, model, write_config, capsys):
    lay_out(cache, model, "config.json", "tokenizer.json")
    assert f"it lacks model.safetensors in {cache}" in refusal(write_config(MINIMAL, ON_HUB), capsys)


def test_every_file_that_an_index_names_must_be_there(model, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    index = '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    (tmp_path / "model-1.safetensors").touch()
    assert missing_files(tmp_path) == ["model-2.safetensors"]
    (tmp_path / "model-2.safetensors").touch()
    assert missing_files(tmp_path) == []
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert missing_files(tmp_path) == ["a readable model.safetensors.index.json"]


def test_weights_in_one_file_do_without_those_that_an_index_of_another_format_names(model, tmp_path):
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "pytorch_model-1.bin"}}')
    assert missing_files(tmp_path) == []


def test_a_path_is_not_looked_for_on_the_hub(cache, model, write_config, capsys):
    lay_out(cache, model)
    for path in ("./acme/tiny", "/acme/tiny", "a/b/c", "../tiny"):
        assert local_folder(path) == path
    path = write_config(MINIMAL, ("models/tiny", "./acme/tiny"))
    assert (
        "model='./acme/tiny' is not a folder. Download the model and name its folder. (my.yaml:1)"
        in refusal(path, capsys)
    )


def test_online_a_model_is_downloaded_without_the_files_of_other_libraries(
    cache, model, write_config, monkeypatch
):
    asked = []

    def download(name, revision, local_dir, allow_patterns):
        assert (revision, local_dir) == (None, None)
        asked.append(allow_patterns)
        return str(lay_out(cache, model))

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    config = load_config(write_config(MINIMAL, ON_HUB))
    assert (config.model, asked) == (NAME, [])
    assert with_download(config).model == str(cache / "models--acme--tiny/snapshots/5f1c")
    assert "*.safetensors" in asked[0]
    assert "*.gguf" not in asked[0]
    # A complete snapshot is not requested again, even if the Hub has a newer revision.
    with_download(load_config("my.yaml"))
    assert len(asked) == 1


def test_a_revision_is_the_snapshot_of_its_name(cache, model, write_config, capsys):
    newest = lay_out(cache, model, revision="5f1c")
    older = lay_out(cache, model, revision="04aa")
    (cache / "models--acme--tiny/refs/main").write_text("5f1c")
    (cache / "models--acme--tiny/refs/v1").write_text("04aa")
    for name, folder in ((NAME, newest), (f"{NAME}@v1", older), (f"{NAME}@04aa", older)):
        assert local_folder(name) == str(folder)
    path = write_config(MINIMAL, ("model: models/tiny", f"model: {NAME}@v9"))
    assert f"hf download {NAME} --revision v9" in refusal(path, capsys)


def test_a_revision_is_downloaded_by_its_name(cache, model, write_config, monkeypatch):
    asked = []

    def download(name, revision, local_dir, allow_patterns):
        asked.append((name, revision))
        return str(lay_out(cache, model, revision=revision))

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    config = with_download(load_config(write_config(MINIMAL, ("model: models/tiny", f"model: {NAME}@v2"))))
    assert (config.model, asked) == (str(cache / "models--acme--tiny/snapshots/v2"), [(NAME, "v2")])


@pytest.mark.parametrize("setting", ["model", "train_parameters.adapters"])
def test_adapters_and_their_base_come_from_the_hub(
    cache, model, write_config, monkeypatch, setting, tmp_path
):
    described = {**ADAPTERS, "base_model_name_or_path": NAME, "revision": "5f1c"}
    asked = []

    def download(name, revision, local_dir, allow_patterns):
        asked.append((name, revision))
        if name == NAME:
            found = lay_out(cache, model)
            (cache / "models--acme--tiny/refs/main").write_text("another")
            return str(found)
        folder = cache / "models--acme--lora/snapshots/1a"
        folder.mkdir(parents=True)
        (folder.parents[1] / "refs").mkdir()
        (folder.parents[1] / "refs/main").write_text("1a")
        (folder / "adapter_config.json").write_text(json.dumps(described))
        (folder / "adapter_model.safetensors").touch()
        return str(folder)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    overrides = [f"model={NAME}@5f1c", f"{setting}=acme/lora"]
    config = with_download(load_config(write_config(), overrides))
    assert config.model == str(cache / "models--acme--tiny/snapshots/5f1c")
    assert config.train_parameters.adapters == str(cache / "models--acme--lora/snapshots/1a")
    options = {"r": 8, "target_modules": ["v_proj", "q_proj"], "exclude_modules": []}
    assert config.train_parameters.lora_peft_config == options
    assert sorted(asked) == [("acme/lora", None), (NAME, "5f1c")]


def test_code_that_a_model_names_must_be_there(model, tmp_path):
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    described = json.loads((model / "config.json").read_text())
    described["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "other/repo--theirs.Model"}
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert missing_files(tmp_path) == ["own.py"]
    (tmp_path / "own.py").touch()
    assert missing_files(tmp_path) == []
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["slow.T", null]}}')
    assert missing_files(tmp_path) == ["slow.py"]


def test_a_download_that_fails_says_why(cache, write_config, monkeypatch):
    def fail(*args, **more):
        raise OSError("403: you must agree to the terms\nmore")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ConfigError, match=r"Hub failed: 403: you must agree to the terms\. Correct the name"):
        with_download(load_config(write_config(MINIMAL, ON_HUB)))


@pytest.mark.slow
def test_the_commands_take_a_name_from_the_cache_of_HF_HOME(model, write_config, tmp_path):
    """The commands run in separate processes, because the library reads HF_HOME at import."""
    snapshot = lay_out(tmp_path / "hf/hub", model)
    for split in ("train", "eval"):
        Dataset.from_list(rows(4)).save_to_disk(f"data/{split}")
    path = write_config(MINIMAL, ON_HUB, ("max_seq_len: 128", "max_seq_len: -1"))
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}

    def vectorlm(*words):
        command = [sys.executable, "-m", "vectorlm", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    printed = vectorlm("check", path)
    assert f"#   note           model: {NAME} is {snapshot}\n" in printed.replace(
        "note          ", "note           "
    )
    assert "max_seq_len: -1 is the model's own length, 64 tokens\n" in printed
    assert "> abc" in vectorlm(
        "sample", "--model", NAME, "--prompt", "abc", "--max_tokens", "2", "--engine", "hf"
    )


def test_minus_one_is_the_model_s_own_length(write_config, model):
    path = write_config(MINIMAL, ("models/tiny", str(model)), ("max_seq_len: 128", "max_seq_len: -1"))
    config = resolve_model(load_config(path))
    assert config.train_parameters.max_seq_len == 64
    assert config.notes == ("max_seq_len: -1 is the model's own length, 64 tokens",)
    # The length is unknown until the model exists.
    assert resolve_model(load_config(path, ["model=./absent"])).train_parameters.max_seq_len == -1


@pytest.mark.parametrize(
    ("description", "length"),
    [
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 512}}, 512),
        ({"vocab_size": 8, "text_config": 3}, None),
    ],
)
def test_families_call_their_length_by_several_names(description, length):
    assert own_length(description) == length


def test_a_model_that_names_no_length_cannot_stand_for_one(write_config, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"vocab_size": 8}')
    with pytest.raises(ConfigError, match="max_seq_len=-1"):
        resolve_model(
            load_config(
                write_config(MINIMAL, ("models/tiny", "model"), ("max_seq_len: 128", "max_seq_len: -1"))
            )
        )
