"""README and docs/: links work, commands and settings exist, and generated parts are current."""

import json
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import yaml
from kit.families import FAMILIES, save_family
from kit.pages import PAGES, ROOT, blocks, commands, run, text_of
from transformers import AutoTokenizer

import vectorlm
from vectorlm import algorithms
from vectorlm.cli import build_parser, main
from vectorlm.errors import ConfigError
from vectorlm.packages import is_installed
from vectorlm.runs.config.load import load_config
from vectorlm.runs.config.reference import render_reference
from vectorlm.train.load import load_model, load_tokenizer

COMMANDS = sorted({line for page in PAGES if page != "docs/sizes.md" for line in commands(page)})
SETTINGS = [(page, block) for page in PAGES for block in blocks(page, "yaml")]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file(page):
    targets = re.findall(r"\]\(([^)#\s]+)", text_of(page))
    folder = (ROOT / page).parent
    assert [target for target in targets if ":" not in target and not (folder / target).exists()] == []


def in_nav(entries):
    for entry in entries:
        for value in entry.values() if isinstance(entry, dict) else [entry]:
            yield from in_nav(value) if isinstance(value, list) else [value]


def test_the_site_has_every_page_and_the_reference_every_public_name():
    listed = sorted(page for page in in_nav(yaml.safe_load(text_of("mkdocs.yml"))["nav"]))
    assert [page for page in listed if not page.startswith("source/")] == [
        page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")
    ]
    named = re.findall(r"^::: vectorlm\.(\S+)", text_of("docs/reference/vectorlm.md"), re.M)
    assert sorted(named) == sorted(vectorlm.__all__)
    for module, name in re.findall(
        r"^::: (vectorlm\.\S+)\.(\w+)$", text_of("docs/reference/algorithms.md"), re.M
    ):
        assert getattr(algorithms, name) is getattr(import_module(module), name)


def test_the_page_of_settings_is_what_the_schema_renders():
    assert text_of("docs/config.md") == render_reference(), (
        "run: python -m vectorlm.runs.config.reference > docs/config.md"
    )


@pytest.fixture
def table(monkeypatch):
    """Return the program that writes the tables."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return import_module("table")


def test_the_tables_are_those_of_the_result_files(table):
    for page in table.pages_with_tables():
        text = text_of(page)
        assert table.with_tables(text, page) == text, f"{page}: run python benchmarks/table.py"


def test_every_result_has_a_commit_a_date_and_the_list_of_the_code_that_it_measures(table):
    files = {path.stem: path for path in (ROOT / "benchmarks/results").glob("*.json")}
    assert sorted(files) == sorted(table.RESULTS)
    assert all(json.loads(path.read_text()).keys() >= {"commit", "date"} for path in files.values())
    code = [path.removeprefix(":!") for result in table.RESULTS.values() for path in result.code]
    assert [path for path in code if not (ROOT / path).exists()] == []


def test_a_result_is_older_than_its_code_once_more_than_texts_and_local_names_changed(
    table, monkeypatch, tmp_path
):
    def git(*words):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    code, result = tmp_path / "vectorlm/swap.py", tmp_path / "benchmarks/results/swap.json"
    code.parent.mkdir()
    code.write_text('"""Swap."""\nSIZE = 1  # of a piece\ndef sizes(all): return [SIZE for entry in all]\n')
    for words in (["init"], ["add", "."], ["commit", "-m", "start"]):
        git(*words)
    result.parent.mkdir(parents=True)
    found = {"commit": git("rev-parse", "HEAD"), "command": "python benchmarks/swap.py", "date": "2026-11-26"}
    result.write_text(json.dumps({**found, "rows": [{"ms": 1}]}))
    monkeypatch.setattr(table, "ROOT", tmp_path)
    monkeypatch.setattr(table, "RESULTS", {"swap": table.Result(("vectorlm",), (table.Table("Swaps"),))})
    code.write_text(
        '"""Swap weights."""\nSIZE = 1  # bytes\ndef sizes(rows): return [SIZE for row in rows]\n'
    )
    assert table.results_older_than_their_code() == []
    code.write_text(
        '"""Swap weights."""\nSIZE = 2  # bytes\ndef sizes(rows): return [SIZE for row in rows]\n'
    )
    assert table.results_older_than_their_code() == ["swap"]
    page = "<!-- benchmarks: begin swap -->\n<!-- benchmarks: end -->"
    plain, marked = (table.with_tables(page, "docs/a.md", names) for names in ([], ["swap"]))
    assert plain != marked == table.with_tables(marked, "docs/a.md")
    result.write_text(json.dumps({**found, "commit": "0" * 40, "rows": [{"ms": 1}]}))
    assert table.results_older_than_their_code() == ["swap"], "a commit that is not there cannot be compared"


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_exists(line):
    words = shlex.split(line, comments=True)
    if words[0] == "vectorlm":
        assert build_parser().parse_args(words[1:]).run_command
    if words[0] == "make":
        subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
    files = [word for word in words if re.fullmatch(r"(configs|examples|docker|tests)/[\w./]+", word)]
    assert all((ROOT / name).is_file() for name in files)


@pytest.mark.slow
def test_the_commands_of_vllm_parse():
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # The module moved within the supported versions of vLLM.
    home = "launchers" if find_spec("vllm.entrypoints.launchers") else "openai"
    cli_args = import_module(f"vllm.entrypoints.{home}.cli_args")
    parser = cli_args.make_arg_parser(FlexibleArgumentParser())
    starts = ("vllm serve ", "python -m vllm.entrypoints.openai.api_server ")
    lines = [(line, start) for line in COMMANDS for start in starts if line.startswith(start)]
    assert len(lines) == 4
    for line, start in lines:
        cli_args.validate_parsed_serve_args(parser.parse_args(shlex.split(line.removeprefix(start))))


TINY_LLAMA = {"hidden_size": 64, "max_length": 1024}


@pytest.fixture
def workplace(folder, tmp_path, monkeypatch):
    """Return a folder with a tiny model, prompts, and the files that the pages use."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "p.jsonl").write_text(blocks("docs/howto/own_reward.md", "json")[0])
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text("{}")
    for page, name in (("own_reward", "my_rewards"), ("own_algorithm", "my_ranks"), ("callbacks", "own")):
        (tmp_path / f"{name}.py").write_text(blocks(f"docs/howto/{page}.md", "python")[0])
    (tmp_path / "my_inference.py").write_text(
        "from vectorlm.sampling.backends.transformers import Transformers as MyInference\n"
    )
    return tmp_path


BASE = """
model: model
train_parameters:
  output_dir: out
  max_seq_len: 64
  optimizer: {lr: 1.0e-3}
engine: {dtype: float32, max_model_len: 64}
evaluation: {every: 1, prompts: p.jsonl}
rl:
  algorithm: grpo
  max_steps: 1
  prompts: p.jsonl
  prompts_per_step: 2
  group_size: 4
  rewards: {"my_rewards.py:right": 1.0}
"""


def merged(into, extra):
    for key, value in extra.items():
        old = into.get(key)
        into[key] = merged(old if isinstance(old, dict) else {}, value) if isinstance(value, dict) else value
    return into


@pytest.mark.parametrize(("page", "block"), SETTINGS, ids=[page for page, _ in SETTINGS])
def test_the_settings_of_a_page_exist_and_those_of_the_guides_pass_the_check(page, block, workplace, capsys):
    base, settings = yaml.safe_load(BASE), yaml.safe_load(block)
    if "rewards" in settings.get("rl", {}):
        del base["rl"]["rewards"]
    if "inference" in settings.get("engine", {}):
        del base["engine"]  # Other engines have other arguments.
    Path("mine.yaml").write_text(block if "model" in settings else yaml.safe_dump(merged(base, settings)))
    load_config("mine.yaml")
    if "howto" in page and ("quantization" not in block or is_installed("bitsandbytes")):
        more = ["--device_memory_gib", "80"] if "out_of_memory" in page else []
        if "_parallel" in block:
            more = ["--world_size", "4"]
            experts = {"num_experts": 8, "num_key_value_heads": 2, "max_position_embeddings": 1024}
            family = FAMILIES["Qwen3-MoE"]
            save_family(replace(family, settings={**family.settings, **experts}), workplace / "model")
        assert main(["check", "mine.yaml", *more]) == 0, capsys.readouterr().err


def test_the_algorithm_of_the_guide_ranks_a_group(workplace):
    spec = spec_from_file_location("my_ranks", workplace / "my_ranks.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)

    class Scores:
        rewards = torch.tensor([[0.1, 3.0, 0.2], [1.0, 1.0, torch.nan]])
        spread = staticmethod(lambda advantages: advantages)

    assert module.RANKS.advantages(Scores, module.RANKS.settings).tolist() == [[-1, 1, 0], [0, 0, 0]]


def test_the_engines_of_the_pages_answer(workplace):
    exec(blocks("docs/engines.md", "python")[0], {})
    names = {}
    exec(blocks("docs/howto/own_backend.md", "python")[0].replace("path/to/model", "model"), names)
    with names["engine"] as engine:
        assert len(engine.sample([[2, 3]], {"max_tokens": 4, "ignore_eos": True})[0][0].token_ids) == 4


@pytest.mark.slow
def test_the_deadline_of_the_guide_is_an_argument_of_launch(workplace):
    code = blocks("docs/howto/hang.md", "python")[0]
    assert code.count("timeout_s=60.0") == 1
    # On a busy machine a rank may need longer than that to load torch.
    Path("hang.py").write_text(code.replace("timeout_s=60.0", "timeout_s=400.0"))
    run(workplace, "hang.py")


def test_the_commands_of_the_data_page_make_datasets(workplace):
    tokenizer = AutoTokenizer.from_pretrained("model")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    )
    tokenizer.save_pretrained("model")
    Path("models").mkdir()
    Path("models/mine").symlink_to(workplace / "model")
    Path("my.yaml").write_text(blocks("docs/data.md", "yaml")[0])
    Path("raw.jsonl").write_text(blocks("docs/data.md", "json")[0])
    first, second = commands("docs/data.md")
    assert main(shlex.split(first)[1:]) == 0
    Path("raw.jsonl").write_text(blocks("docs/data.md", "json")[0] * 10)
    assert main(shlex.split(second)[1:]) == 0
    assert Path("data/eval/state.json").is_file()


def test_a_model_is_resized_for_a_tokenizer_that_outgrew_it(workplace):
    tokenizer = AutoTokenizer.from_pretrained("model")
    tokenizer.add_tokens([f"<{number}>" for number in range(30)])
    tokenizer.save_pretrained("model")
    Path("models").mkdir()
    Path("models/mine").symlink_to(workplace / "model")
    with pytest.raises(ConfigError, match="models/mine"):
        load_tokenizer("models/mine")
    exec(blocks("docs/data.md", "python")[0], {})
    load_tokenizer("models/resized")
    assert load_model("models/resized").get_input_embeddings().num_embeddings == 58
