"""``vectorlm sample``, as a user runs it at a terminal."""

import io
import shutil
import subprocess
import sys

import pytest
from kit.rank_processes import save_tiny_llama

from vectorlm.cli import main
from vectorlm.cli.sample import read_pairs
from vectorlm.sampling.inline_engines import HFEngine

GREEDY = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(save_tiny_llama(tmp_path_factory.mktemp("ask") / "model", hidden_size=64))


def ask(model_path, *arguments):
    return main(["sample", "--model", model_path, "--engine", "hf", *arguments])


def test_each_prompt_is_printed_with_its_answer(model_path, capsys):
    arguments = ["--prompt", "abc", "--prompt", "xyz", "--temperature", "0", "--max_tokens", "5"]
    assert ask(model_path, *arguments, "--param", "ignore_eos=true") == 0
    with HFEngine(model_path) as engine:
        one, other = (text.strip() for text in engine.generate_text(["abc", "xyz"], GREEDY))
    assert capsys.readouterr().out == f"> abc\n{one}\n\n> xyz\n{other}\n"


def test_several_completions_are_numbered_and_a_seed_repeats_them(model_path, capsys):
    printed = []
    for _ in range(2):
        assert ask(model_path, "--prompt", "abc", "--n", "2", "--seed", "3") == 0
        printed.append(capsys.readouterr().out)
    prompt, *answers = printed[0].splitlines()
    assert prompt == "> abc"
    assert [answer[:4] for answer in answers] == ["[1] ", "[2] "]
    assert printed[0] == printed[1]


def test_without_a_prompt_every_line_of_the_input_is_one(model_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc\n\nxyz\n"))
    assert ask(model_path, "--max_tokens", "2") == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("> ")] == [
        "> abc",
        "> xyz",
    ]


def test_a_prompt_for_a_model_of_chats_is_said_to_be_plain_text(model_path, tmp_path, capsys):
    note = "this tokenizer has a chat template"
    assert ask(model_path, "--prompt", "abc", "--max_tokens", "1") == 0
    assert note in capsys.readouterr().err
    folder = shutil.copytree(model_path, tmp_path / "plain")
    (folder / "chat_template.jinja").unlink()
    assert ask(str(folder), "--prompt", "abc", "--max_tokens", "1") == 0
    assert note not in capsys.readouterr().err
    assert ask(str(folder), "--prompt", "abc", "--chat") == 2
    assert "chat template" in capsys.readouterr().err


def test_a_chat_is_the_same_as_its_rendered_text(model_path, capsys):
    from transformers import AutoTokenizer

    chat = [{"role": "system", "content": "abc"}, {"role": "user", "content": "xyz"}]
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    greedy = ["--max_tokens", "4", "--temperature", "0"]
    assert ask(model_path, "--prompt", "xyz", "--system", "abc", *greedy) == 0
    found = capsys.readouterr()
    assert ask(model_path, "--prompt", text, *greedy) == 0
    assert found.out.splitlines()[-1] == capsys.readouterr().out.splitlines()[-1]
    assert not found.err


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--prompt", "a", "--param", "temprature=1"], "'temperature'"),
        (["--prompt", "a", "--param", "top_p=3"], "top_p=3"),
        (["--prompt", "a", "--param", "top_p"], "--param top_p"),
        (["--prompt", "a", "--param", "stop=[a"], "--param stop=[a"),
        (["--prompt", "a", "--prompt", " "], "--prompt must not be empty"),
        ([], "--prompt TEXT"),
    ],
)
def test_a_wrong_argument_ends_with_one_line_and_code_2(model_path, capsys, monkeypatch, arguments, name):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert ask(model_path, *arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("ConfigError: ")
    assert printed.err.count("\n") == 1
    assert name in printed.err


def test_values_are_read_as_in_a_config():
    assert read_pairs("--param", "top_p=0.9", ["temperature=1e-1", "stop=[a, b]"]) == {
        "temperature": 0.1,
        "stop": ["a", "b"],
    }


def test_a_folder_without_a_model_is_named_before_anything_heavy_is_imported(tmp_path):
    for name in ("other", "step-00000004/shards", "final-model"):
        (tmp_path / name).mkdir(parents=True)
    other = "Name a folder that save_pretrained wrote."
    export = f"`vectorlm export {tmp_path / 'step-00000004'}`"
    checkpoint = f"It is a checkpoint: run {export}, and name the new folder."
    for folder, what in (
        (tmp_path / "other", f"must have a config.json. {other}"),
        (tmp_path / "step-00000004", f"must have a config.json. {checkpoint}"),
        (tmp_path, f"must have a config.json. Name {tmp_path / 'final-model'}."),
        (
            tmp_path / "absent",
            f"is not a folder. {tmp_path} has the folders final-model, other, step-00000004. Name one with a model.",
        ),
    ):
        code = (
            "import sys; from vectorlm.cli import main; code = main(sys.argv[1:]); "
            "sys.exit(code if not {'torch', 'vllm', 'transformers'} & set(sys.modules) else 9)"
        )
        command = [sys.executable, "-c", code, "sample", "--model", str(folder), "--prompt", "a"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr == f"ConfigError: --model {folder} {what}\n"


def test_an_engine_that_fails_ends_with_one_line_and_code_1(model_path, capsys):
    assert ask(model_path, "--prompt", "a" * 80) == 1
    assert capsys.readouterr().err == (
        "EngineError: a prompt has 80 tokens: the engine holds 64, the completion included. "
        "Shorten the prompt, or raise max_model_len.\n"
    )


@pytest.mark.slow
def test_vllm_answers_too_and_its_refusals_are_one_line(model_path, capsys):
    common = ["sample", "--model", model_path, "--prompt", "abc", "--temperature", "0", "--max_tokens", "5"]
    assert main([*common, "--param", "ignore_eos=true"]) == 0
    with HFEngine(model_path) as engine:
        text = engine.generate_text("abc", GREEDY)[0].strip()
    assert capsys.readouterr().out == f"> abc\n{text}\n"
    for wrong, rule in (
        ("temprature=1", "Did you mean 'temperature'?"),
        ("top_p=1.5", "must be a number > 0"),
    ):
        assert main([*common, "--param", wrong]) == 2
        # The command refuses the parameter before it starts an engine.
        (error,) = capsys.readouterr().err.splitlines()
        assert error.startswith(f"ConfigError: {wrong} ")
        assert rule in error
