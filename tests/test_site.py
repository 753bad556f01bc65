"""The documentation site: every page is in it, and what its own pages say runs. `make docs` builds it."""

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from rank_processes import save_tiny_llama
from transformers import AutoModelForCausalLM

import vectorlm
from vectorlm import algorithms, errors
from vectorlm.cli import build_parser, main

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    "index.md",
    "concepts.md",
    "troubleshooting.md",
    *(f"howto/{p.name}" for p in DOCS.glob("howto/*.md")),
]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def text_of(page):
    return (DOCS / page).read_text()


def blocks(page, language):
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", text_of(page), re.DOTALL | re.M)
    return [re.sub(rf"^{indent}", "", block, flags=re.M) for indent, block in found]


def in_nav(entries):
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values():
                yield from in_nav(value if isinstance(value, list) else [value])


def run(folder, *command):
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_every_page_is_in_the_navigation_once():
    listed = list(in_nav(SITE["nav"]))
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert len(listed) == len(set(listed))
    assert {page for page in listed if not page.startswith("source/")} == pages
    for page in listed:
        assert not page.startswith("source/") or (ROOT / page.removeprefix("source/")).is_file()


def test_the_reference_has_every_public_name():
    named = {
        page: re.findall(r"^::: (\S+)", text_of(f"reference/{page}.md"), re.M)
        for page in ("vectorlm", "algorithms")
    }
    assert sorted(named["vectorlm"]) == [f"vectorlm.{name}" for name in sorted(vectorlm.__all__)]
    assert sorted(named["algorithms"]) == [
        f"vectorlm.algorithms.{name}" for name in sorted(algorithms.__all__)
    ]
    for module in ("contracts", "errors"):
        assert f"::: vectorlm.{module}\n" in text_of(f"reference/{module}.md")


def error_classes():
    """Read the names of all `VectorLMError`s, without importing what needs optional packages."""
    bases = {}
    for path in Path(vectorlm.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
    known = {"VectorLMError"}
    while new := {name for name, parents in bases.items() if parents & known} - known:
        known |= new
    return known


def test_every_error_has_an_entry_with_meaning_causes_and_remedy():
    entries = dict(
        re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text_of("troubleshooting.md"), re.DOTALL | re.M)
    )
    assert set(entries) == error_classes() >= {"StaleHandle", "RolloutError"}
    for name, entry in entries.items():
        heads = re.findall(r"^\*\*(.*?)\*\*: \S", entry, re.M)
        assert heads == ["Means", "Usual causes", "What to do"], name
    assert errors.VectorLMError in errors.ConfigError.__mro__


def test_the_blocks_that_these_tests_run_are_all_there_are():
    found = {
        page: tuple(len(blocks(page, language)) for language in ("bash", "python", "yaml", "json"))
        for page in PAGES
    }
    assert {page: counts for page, counts in found.items() if any(counts)} == {
        "index.md": (4, 0, 0, 0),
        "howto/own_loop.md": (1, 1, 0, 0),
        "howto/own_reward.md": (0, 1, 1, 1),
        "howto/own_algorithm.md": (0, 1, 1, 0),
        "howto/own_backend.md": (0, 1, 1, 0),
        "howto/lora.md": (3, 0, 1, 0),
        "howto/slurm.md": (1, 0, 0, 0),
        "howto/hang.md": (0, 1, 1, 0),
        "howto/out_of_memory.md": (1, 0, 1, 0),
    }


def commands():
    for page in PAGES:
        for block in blocks(page, "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                yield pytest.param(line, id=f"{page}: {line[:40]}")


@pytest.mark.parametrize("line", list(commands()))
def test_every_command_exists(line):
    words = shlex.split(line)
    match words[0]:
        case "vectorlm":
            args = build_parser().parse_args(words[1:])
            path = getattr(args, "yaml_path", None)
            assert path is None or (ROOT / path).is_file()
        case "python":
            assert run(ROOT, words[1], "--help")
        case "make":
            subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
        case "sbatch":
            assert (ROOT / words[1]).is_file()
        case "export":
            token = subprocess.run(
                ["bash", "-c", f"{line}; echo $VECTORLM_SERVER_TOKEN"], capture_output=True, text=True
            )
            assert len(token.stdout.strip()) >= 16
        case "source":
            assert line in ("source .venv/bin/activate", "source <(vectorlm --completion bash)")
        case _:
            pytest.fail(f"this test does not know {words[0]}")


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with a tiny model, prompts, the files of the pages, and the configs that their snippets go into."""
    monkeypatch.chdir(tmp_path)
    save_tiny_llama(tmp_path / "model", hidden_size=64)
    (tmp_path / "p.jsonl").write_text(blocks("howto/own_reward.md", "json")[0])
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text("{}")
    for page, name in (("own_reward", "my_rewards"), ("own_algorithm", "my_ranks")):
        (tmp_path / f"{name}.py").write_text(blocks(f"howto/{page}.md", "python")[0])
    (tmp_path / "my_inference.py").write_text(
        "from vectorlm.backends.transformers.backend import Transformers as MyInference\n"
    )
    return tmp_path


def config(rewards):
    sampler = {
        "sample_frequency": 1,
        "prompts": "p.jsonl",
        "vllm_dtype": "float32",
        "engine": {"max_model_len": 64},
    }
    train = {"output_dir": "out", "max_seq_len": 64, "optimizer": {"lr": 1e-3}, "sampler": sampler}
    rl = {"algorithm": "grpo", "max_steps": 1, "prompts": "p.jsonl", "prompts_per_step": 2, "group_size": 4}
    return {"model": "model", "train_parameters": train, "rl": rl | {"rewards": rewards}}


def merged(into, extra):
    for key, value in extra.items():
        into[key] = merged(into.get(key, {}), value) if isinstance(value, dict) else value
    return into


@pytest.mark.parametrize("page", ["own_reward", "own_algorithm", "own_backend", "lora", "hang"])
def test_the_settings_of_a_page_pass_the_check(page, workplace, capsys):
    (block,) = blocks(f"howto/{page}.md", "yaml")
    base = config({} if page == "own_reward" else {"my_rewards.py:right": 1.0})
    if page == "own_backend":
        # Other engines have arguments of their own.
        del base["train_parameters"]["sampler"]["vllm_dtype"], base["train_parameters"]["sampler"]["engine"]
    (workplace / "mine.yaml").write_text(yaml.safe_dump(merged(base, yaml.safe_load(block))))
    assert main(["check", "mine.yaml"]) == 0, capsys.readouterr().err


def test_the_settings_for_memory_pass_the_check_of_a_gpu_config(workplace, capsys):
    (block,) = blocks("howto/out_of_memory.md", "yaml")
    base = config({"my_rewards.py:right": 1.0})
    (workplace / "mine.yaml").write_text(yaml.safe_dump(merged(base, yaml.safe_load(block))))
    assert main(["check", "mine.yaml", "--device_memory_gib", "80"]) == 0, capsys.readouterr().err


def test_the_rewards_of_the_page_score_as_they_say(workplace):
    names = {}
    exec((workplace / "my_rewards.py").read_text(), names)
    assert names["right"]("the answer is 7", target=7) == 1.0
    assert [names["right"](text, target=7) for text in ("7 or 8", "none", "-7")] == [0.0, 0.0, 0.0]
    assert names["is_json"](['{"a": 1}', "{a"]) == [1.0, 0.0]


def test_the_algorithm_of_the_page_ranks_a_group(workplace):
    spec = importlib.util.spec_from_file_location("my_ranks", workplace / "my_ranks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    class Scores:
        rewards = torch.tensor([[0.1, 3.0, 0.2], [1.0, 1.0, torch.nan]])
        spread = staticmethod(lambda advantages: advantages)

    advantages = module.RANKS.advantages(Scores, None)
    assert advantages.tolist() == [[-1, 1, 0], [0, 0, 0]]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_loop_of_the_page_runs(workplace, world_size):
    (code,) = blocks("howto/own_loop.md", "python")
    changes = {
        # The README's loop runs with vLLM; here the rest is at stake.
        'SamplingEngine(path, dtype="float32", max_model_len=64)': 'HFEngine(path, dtype="float32")',
        "data/countdown/model": "model",
        "20, world_size=2": f"3, world_size={world_size}",
    }
    for old, new in changes.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    (workplace / "loop.py").write_text(code)
    assert len(ast.literal_eval(run(workplace, "loop.py").splitlines()[-1])) == 3
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (workplace / "my-model").iterdir()
    }


def test_the_deadline_of_the_page_is_an_argument_of_launch(workplace):
    (workplace / "hang.py").write_text(blocks("howto/hang.md", "python")[0])
    run(workplace, "hang.py")


def test_the_backend_of_the_page_is_built(workplace):
    (code,) = blocks("howto/own_backend.md", "python")
    names = {}
    exec(code.replace("path/to/model", "model"), names)
    with names["engine"] as engine:
        assert len(engine.sample([[2, 3]], {"max_tokens": 4, "ignore_eos": True})[0][0].token_ids) == 4


def test_adapters_are_merged_as_the_page_says(workplace):
    from vectorlm.checkpoint.export import export_model
    from vectorlm.ranks.launcher import process_group
    from vectorlm.ranks.topology import Topology
    from vectorlm.train.load import load_tokenizer

    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained("model"), LoraConfig(r=4, target_modules=["q_proj"])
    )
    torch.nn.init.normal_(model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight)
    with process_group(Topology(0, 0, 1, 1, "cpu")):
        export_model(model, load_tokenizer("model"), Path("runs/countdown_lora/final-model"))
    (export,) = (
        line for block in blocks("howto/lora.md", "bash") for line in block.splitlines() if " export " in line
    )
    assert main(shlex.split(export)[1:]) == 0
    tokens = torch.arange(2, 9)[None]
    found = AutoModelForCausalLM.from_pretrained("runs/countdown_lora/merged")(tokens).logits
    torch.testing.assert_close(found, model(tokens).logits, rtol=1e-4, atol=1e-5)  # another order of sums
    assert (found - AutoModelForCausalLM.from_pretrained("model")(tokens).logits).abs().max() > 1e-3
    assert Path("runs/countdown_lora/merged/tokenizer.json").is_file()
