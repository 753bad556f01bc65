"""The examples of docs/data.md run as they are written."""

import re
import shlex
from pathlib import Path

import pytest
from rank_processes import save_tiny_llama
from transformers import AutoTokenizer

from vectorlm.cli import main
from vectorlm.data.source import FORMS
from vectorlm.errors import ConfigError
from vectorlm.train.load import load_model, load_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tiny_llama(Path("models/mine"), max_length=1024)


def block(language):
    (text,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return text


def test_the_commands_make_the_datasets_and_print_the_summary(capsys):
    tokenizer = AutoTokenizer.from_pretrained("models/mine")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    )
    tokenizer.save_pretrained("models/mine")
    Path("my.yaml").write_text(block("yaml"))
    Path("raw.jsonl").write_text(block("json"))
    first, second = block("bash").splitlines()
    assert main(shlex.split(first)[1:]) == 0
    assert capsys.readouterr().out == block("text")
    Path("raw.jsonl").write_text(block("json") * 10)
    assert main(shlex.split(second)[1:]) == 0
    assert "rows in     1\n" in capsys.readouterr().out
    assert Path("data/eval/state.json").is_file()


def test_an_interrupted_command_says_that_nothing_has_changed(capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    Path("my.yaml").write_text(block("yaml"))
    monkeypatch.setattr("vectorlm.data.preprocess.preprocess", interrupt)
    assert main(["preprocess", "my.yaml"]) == 130
    assert capsys.readouterr().err.endswith("interrupted; data/train is as it was before\n")


def test_the_forms_of_files_are_those_that_are_read():
    (table,) = re.findall(r"\| `load_path` \|.*?\n\n", PAGE, re.DOTALL)
    assert set(re.findall(r"`(\.\w+)`", table)) == set(FORMS)


def test_the_model_is_resized_for_a_tokenizer_that_outgrew_it():
    tokenizer = AutoTokenizer.from_pretrained("models/mine")
    tokenizer.add_tokens([f"<{number}>" for number in range(30)])
    tokenizer.save_pretrained("models/mine")
    with pytest.raises(ConfigError, match=r"has embeddings for 48 tokens, and its tokenizer has a token 57"):
        load_tokenizer("models/mine")
    exec(block("python"), {})
    load_tokenizer("models/resized")
    assert load_model("models/resized").get_input_embeddings().num_embeddings == 58
