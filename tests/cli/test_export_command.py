"""``vectorlm export``: checkpoints and adapters become folders that transformers, PEFT and vLLM load."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kit.families import FAMILIES, save_family
from kit.letters import letter_tokenizer
from kit.rank_processes import on_ranks, save_tiny_llama
from kit.sft_runs import WITH_CHECKPOINTS, are_equal, lines, make_config, train
from kit.vision_models import save_vlm
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

import vectorlm.runs.start
from vectorlm.cli import main
from vectorlm.cli.export import find_source, load_source
from vectorlm.cli.sample import open_engine
from vectorlm.packages import is_installed
from vectorlm.report.card import card_of
from vectorlm.runs.preflight.local_model import resolve_model
from vectorlm.runs.start import Run, base_settings_of
from vectorlm.train.checkpoint.export import export_model
from vectorlm.train.load import load_model, load_tokenizer
from vectorlm.train.lora import add_lora, load_adapters, tokenizer_folder

LORA = {
    "r": 2,
    "lora_alpha": 32,
    "target_modules": ["q_proj", "down_proj"],
    "modules_to_save": ["lm_head"],
}


def run_of(inputs, name, lora):
    """Train on two ranks, to get checkpoints with two shards."""
    config = make_config(inputs, inputs / name, WITH_CHECKPOINTS, keep_best=True, lora_peft_config=lora)
    on_ranks(2, train, config)
    return inputs / name


@pytest.fixture(scope="module")
def full(inputs):
    return run_of(inputs, "full", None)


@pytest.fixture(scope="module")
def adapters(inputs):
    return run_of(inputs, "adapters", LORA)


def export_of(capsys, *arguments):
    assert main(["export", *map(str, arguments)]) == 0
    return Path(capsys.readouterr().out.strip())


@pytest.mark.slow
def test_the_newest_checkpoint_of_a_run_is_its_final_model(full, tmp_path, capsys):
    path = export_of(capsys, full)
    assert path == full / "step-00000003-model"
    assert are_equal(load_file(path / "model.safetensors"), load_file(full / "final-model/model.safetensors"))
    names = {file.name for file in (full / "final-model").iterdir()}
    assert {file.name for file in path.iterdir()} == names
    assert (path / "README.md").read_text() == (full / "final-model" / "README.md").read_text()
    other = export_of(capsys, full / "checkpoints" / "step-00000002", "--output", tmp_path / "new" / "other")
    assert not are_equal(load_file(other / "model.safetensors"), load_file(path / "model.safetensors"))
    assert "step: 2\n" in (other / "README.md").read_text()
    best = json.loads((full / "checkpoints/step-00000003/identity.json").read_text())["best_step"]
    assert export_of(capsys, full, "--best", "--output", tmp_path / "best").name == "best"
    assert f"step: {best}\n" in (tmp_path / "best" / "README.md").read_text()


@pytest.mark.parametrize(
    ("folder", "name"),
    [("..", "run"), ("checkpoints/step-00000003", "."), ("checkpoints/step-00000003", "..")],
)
def test_a_relative_path_gives_a_folder_in_the_run(full, tmp_path, capsys, monkeypatch, folder, name):
    run = tmp_path / "run"
    shutil.copytree(full / "checkpoints", run / "checkpoints")
    shutil.copy(full / "config.yaml", run)
    monkeypatch.chdir(run / folder)
    assert export_of(capsys, name).samefile(run / "step-00000003-model")
    assert sorted(item.name for item in (run / "checkpoints").iterdir()) == [
        item.name for item in sorted((full / "checkpoints").iterdir())
    ]


@pytest.mark.slow
def test_weights_are_converted(full, capsys):
    path = export_of(capsys, full / "final-model", "--dtype", "bfloat16")
    assert path == full / "final-model-bfloat16"
    before, after = (load_file(full / name / "model.safetensors") for name in ("final-model", path.name))
    assert are_equal(after, {name: tensor.bfloat16() for name, tensor in before.items()})
    assert json.loads((path / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["GLM-4-MoE-Lite", "Mixtral"])
def test_weights_get_the_dtypes_in_which_transformers_reads_them(tmp_path, capsys, name, dtype):
    family = replace(FAMILIES[name], settings={**FAMILIES[name].settings, "vocab_size": 128})
    save_family(family, tmp_path / "model")
    letter_tokenizer().save_pretrained(tmp_path / "model")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype)
    read.save_pretrained(tmp_path / "expected")
    path = export_of(capsys, tmp_path / "model", "--dtype", dtype)
    expected, found = (load_file(folder / "model.safetensors") for folder in (tmp_path / "expected", path))
    assert are_equal(found, expected)
    assert {name: item.dtype for name, item in found.items()} == {
        name: item.dtype for name, item in expected.items()
    }
    assert json.loads((path / "config.json").read_text())["dtype"] == dtype


def test_a_reward_model_is_converted_with_its_head(tmp_path, capsys):
    config = LlamaConfig(
        **{"vocab_size": 128, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "num_labels": 1, "pad_token_id": 2},
    )
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "scorer")
    letter_tokenizer().save_pretrained(tmp_path / "scorer")
    path = export_of(capsys, tmp_path / "scorer", "--dtype", "bfloat16")
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "scorer", path))
    assert are_equal(after, {name: tensor.bfloat16() for name, tensor in before.items()})
    assert json.loads((path / "config.json").read_text())["architectures"] == [
        "LlamaForSequenceClassification"
    ]


@pytest.mark.slow
def test_adapters_of_a_checkpoint_are_exported_alone_or_merged(inputs, adapters, capsys):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    alone, merged = export_of(capsys, adapters), export_of(capsys, adapters, "--merge")
    assert (alone.name, merged.name) == ("step-00000003-model", "step-00000003-merged")
    of_run = adapters / "final-model"
    assert are_equal(*(load_file(folder / "adapter_model.safetensors") for folder in (alone, of_run)))
    again = export_of(capsys, of_run, "--merge")
    assert are_equal(*(load_file(folder / "model.safetensors") for folder in (merged, again)))
    assert "step: 3\n" in (again / "README.md").read_text()
    tokens = torch.arange(8)[None]
    base = AutoModelForCausalLM.from_pretrained(inputs / "model")
    start = base(tokens).logits
    expected = PeftModel.from_pretrained(base, of_run)(tokens).logits
    found = AutoModelForCausalLM.from_pretrained(merged)(tokens).logits
    # The difference is fp32 round-off: W x + B A x against (W + B A) x.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (found - start).abs().max() > 0.01
    assert AutoTokenizer.from_pretrained(merged)("abc").input_ids == [2, 3, 4]
    assert "peft" not in (merged / "README.md").read_text().split("---")[1]


@pytest.mark.slow
@pytest.mark.parametrize("merges", [False, True])
def test_a_run_goes_on_from_adapters(inputs, adapters, tmp_path, capsys, merges):
    text = WITH_CHECKPOINTS.replace("{inputs}/model", str(adapters / "final-model"))
    run = tmp_path / "more"
    config = make_config(inputs, run, text, save_frequency=9, merge_adapters=merges)
    on_ranks(2, train, config)
    before, after = (lines(folder / "metrics.jsonl") for folder in (adapters, run))
    # If the adapters are merged, the difference is fp32 round-off.
    assert after[0]["eval/loss"] == pytest.approx(before[-1]["eval/loss"], rel=1e-5)
    assert after[-1]["eval/loss"] != after[0]["eval/loss"]
    of_run = run / "final-model"
    if merges:
        assert are_equal(
            *(load_file(folder / "model.safetensors") for folder in (of_run, export_of(capsys, run)))
        )
        return
    assert json.loads((of_run / "adapter_config.json").read_text())["r"] == LORA["r"]
    merged = [
        export_of(capsys, folder, "--merge", "--output", tmp_path / f"{folder.name}-merged")
        for folder in (of_run, run)
    ]
    assert are_equal(*(load_file(folder / "model.safetensors") for folder in merged))


@pytest.mark.slow
def test_a_checkpoint_of_continued_adapters_has_the_adapters_of_a_vision_model(inputs, tmp_path, capsys):
    base = save_vlm("qwen2.5-vl", tmp_path / "model")
    options = {"r": 2, "target_modules": ["qkv", "q_proj"], "exclude_modules": []}
    start = tmp_path / "adapters"
    export_model(add_lora(load_model(base), options), load_tokenizer(base), start)
    text = WITH_CHECKPOINTS.replace("{inputs}/model", str(start))
    config = make_config(inputs, tmp_path / "run", text, save_frequency=9, freeze=[])
    on_ranks(1, train, config)
    paths = (start, tmp_path / "run/final-model", export_of(capsys, tmp_path / "run"))
    before, final, exported = (load_file(path / "adapter_model.safetensors") for path in paths)
    assert any("visual" in name for name in before)
    assert before.keys() == final.keys()
    assert are_equal(final, exported)


def test_an_embedding_that_the_head_shares_cannot_be_merged(tmp_path, capsys):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(save_tiny_llama(tmp_path / "tied", tied=True))
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["embed_tokens"], task_type="CAUSAL_LM"))
    model.save_pretrained(tmp_path / "adapters")
    assert main(["export", str(tmp_path / "adapters"), "--merge"]) == 2
    assert "share one weight (tie_word_embeddings)" in capsys.readouterr().err
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["adapters", "tied"]


def elsewhere(tensors):
    return {
        name.replace("model.layers", "model.language_model.layers"): tensor
        for name, tensor in tensors.items()
    }


def deeper(tensors):
    return tensors | {
        name.replace("layers.0", "layers.7"): tensor.clone() for name, tensor in tensors.items()
    }


def shallower(tensors):
    return {name: tensor for name, tensor in tensors.items() if "layers.0" not in name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (elsewhere, "12 tensors have no place in it (base_model.model.model.language_model.layers.0."),
        (deeper, "4 tensors have no place in it (base_model.model.model.layers.7."),
        (shallower, "4 tensors are missing (base_model.model.model.layers.0."),
        (lambda tensors: {}, "the tensor 'base_model.model.lm_head.weight' is missing"),
    ],
)
def test_adapters_that_do_not_fit_their_base_are_refused_wherever_they_are_read(
    adapters, tmp_path, capsys, change, message
):
    path = tmp_path / "adapters"
    shutil.copytree(adapters / "final-model", path)
    save_file(change(load_file(path / "adapter_model.safetensors")), path / "adapter_model.safetensors")
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "abc", "numbers": [1], "target": 1}\n')
    of_questions = ["--prompts", str(questions), "--reward", "countdown"]
    for command in (
        lambda: main(["export", str(path), "--merge"]),
        lambda: sample(path, "--engine", "hf"),
        lambda: main(["evaluate", "--model", str(path), "--engine", "hf", *of_questions]),
    ):
        assert command() == 2
        assert message in capsys.readouterr().err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["adapters", "questions.jsonl"]


def test_what_cannot_be_exported_is_one_line_that_says_what_to_do(full, adapters, tmp_path, capsys):
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    (tmp_path / "lost" / "checkpoints").mkdir(parents=True)
    shutil.copytree(full / "checkpoints/step-00000003", tmp_path / "lost/checkpoints/step-00000003")
    shutil.copytree(full / "final-model", tmp_path / "unsaved" / "final-model")
    for arguments, text in (
        ([tmp_path / "unsaved"], "is already a model folder"),
        ([tmp_path / "nowhere"], "nowhere is not a folder"),
        ([tmp_path], "neither a checkpoint"),
        ([tmp_path / "new"], "no complete checkpoint"),
        ([tmp_path / "lost"], "config.yaml"),
        ([full / "final-model"], "--dtype"),
        ([full / "final-model", "--best"], "--best"),
        ([full, "--merge"], "--merge"),
        ([full, "--output", full / "final-model"], "final-model exists"),
        ([adapters / "final-model"], "--merge"),
        ([adapters, "--dtype", "bfloat16"], "--dtype"),
    ):
        assert main(["export", *map(str, arguments)]) == 2, arguments
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.count("\n") == 1
        assert text in printed.err


def test_a_checkpoint_that_is_not_as_it_was_written_leaves_no_folder(full, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(full / "checkpoints", run / "checkpoints")
    shutil.copy(full / "config.yaml", run)
    shard = run / "checkpoints/step-00000003/shards/__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert main(["export", str(run)]) == 1
    assert "__0_0.distcp has changed" in capsys.readouterr().err
    assert sorted(entry.name for entry in run.iterdir()) == ["checkpoints", "config.yaml"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_export_that_is_cut_off_leaves_no_half_folder(full, tmp_path, capsys, monkeypatch, error):
    def write(self, work, **_):
        (work / "half").write_text("a half")
        raise error

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", write)
    arguments = ["export", str(full), "--output", str(tmp_path / "model")]
    wanted = f"the model {tmp_path}/model cannot be written (OSError: [Errno 28] No space left"
    if isinstance(error, KeyboardInterrupt):
        wanted = f"interrupted; nothing of {tmp_path}/model is left"
    assert main(arguments) == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert wanted in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def sample(model, *arguments):
    greedy = ["--temperature", "0", "--max_tokens", "6", "--param", "ignore_eos=true"]
    return main(["sample", "--model", str(model), "--prompt", "abcd", *greedy, *arguments])


@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=pytest.mark.slow)])
def test_adapters_are_sampled_from_on_their_base(inputs, adapters, capsys, engine):
    printed = []
    merged = inputs / f"merged-for-{engine}"
    export_of(capsys, adapters / "final-model", "--merge", "--output", merged)
    for model, by in ((adapters / "final-model", engine), (merged, "hf"), (inputs / "model", "hf")):
        assert sample(model, "--engine", by) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert printed[0] != printed[2]


def test_a_missing_base_model_is_named(adapters, tmp_path, capsys):
    path = tmp_path / "moved"
    shutil.copytree(adapters / "final-model", path)
    for base in (str(tmp_path / "gone"), "example/no-such-model"):
        options = json.loads((path / "adapter_config.json").read_text()) | {"base_model_name_or_path": base}
        (path / "adapter_config.json").write_text(json.dumps(options))
        for command in (
            lambda: sample(path, "--engine", "hf"),
            lambda: main(["export", str(path), "--merge"]),
        ):
            assert command() == 2
            assert f"the base model '{base}' of the adapters in {path}" in capsys.readouterr().err
    (path / "adapter_config.json").write_text("{}")
    assert sample(path, "--engine", "hf") == 2
    assert f"{path}/adapter_config.json does not name a base model" in capsys.readouterr().err


SERVE = """
import json, sys
from vllm import LLM, SamplingParams

engine = LLM(sys.argv[1], dtype="float32", enforce_eager=True, kv_cache_memory_bytes=16 << 20)
params = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)
found = [output.outputs[0] for output in engine.generate(["abcd", "xyz"], params, use_tqdm=False)]
print(json.dumps([[[token, steps[token].logprob] for token, steps in zip(completion.token_ids, completion.logprobs)]
                  for completion in found]))
"""


def served(folder):
    """Return tokens and log-probabilities of a plain vLLM engine, without this library."""
    how = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    command = [sys.executable, "-c", SERVE, str(folder)]
    done = subprocess.run(command, env=os.environ | how, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def by_transformers(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    answers = []
    for prompt in ("abcd", "xyz"):
        tokens, found = tokenizer(prompt, return_tensors="pt").input_ids, []
        for _ in range(6):
            with torch.no_grad():
                logprobs = model(tokens).logits[0, -1].log_softmax(-1)
            found.append([int(logprobs.argmax()), float(logprobs.max())])
            tokens = torch.cat([tokens, logprobs.argmax()[None, None]], dim=1)
        answers.append(found)
    return answers


@pytest.mark.slow
def test_plain_vllm_serves_exports_as_transformers_computes_them(inputs, full, adapters, capsys):
    folders = [full / "final-model", inputs / "merged-to-serve"]
    export_of(capsys, adapters, "--merge", "--output", folders[1])
    for folder in folders:
        for found, expected in zip(served(folder), by_transformers(folder), strict=True):
            assert [token for token, _ in found] == [token for token, _ in expected]
            # The difference is fp32 round-off between two implementations.
            assert [x for _, x in found] == pytest.approx([x for _, x in expected], abs=1e-4)


@pytest.mark.parametrize(("quantization", "rounded_in"), [("nf4", [torch.bfloat16]), (None, [])])
def test_adapters_apart_from_their_run_are_merged_into_the_base_they_were_trained_on(
    tmp_path, monkeypatch, quantization, rounded_in
):
    """The rounding is patched, because it needs bitsandbytes."""
    rounded = []
    monkeypatch.setattr(vectorlm.runs.start, "round_blocks", lambda model: rounded.append(model.dtype))
    path, base = adapters_of(tmp_path, "bfloat16", quantization)
    model, _ = load_source(find_source(path), merges=True)
    assert rounded == rounded_in
    expected = load_adapters(path, load_model(base, dtype="bfloat16")).merge_and_unload()
    assert are_equal(model.state_dict(), expected.state_dict())


@pytest.mark.parametrize("card", ["", "---\ndtype: bfloat16\n---\n"])
@pytest.mark.parametrize("other", ["- a list", "services: {web: {}}", "{"])
def test_adapters_apart_from_their_run_do_not_read_another_config(tmp_path, capsys, card, other):
    path, base = adapters_of(tmp_path, "bfloat16", None)
    (path / "README.md").write_text(card)
    (path.parent / "config.yaml").write_text(other)
    merged = export_of(capsys, path, "--merge")
    dtype = "bfloat16" if card else "float32"
    expected = load_adapters(path, load_model(base, dtype=dtype)).merge_and_unload()
    assert are_equal(load_model(merged, dtype=dtype).state_dict(), expected.state_dict())
    assert "config.yaml" not in (merged / "README.md").read_text()


def test_adapters_in_a_run_with_a_card_of_another_program_read_its_config(tmp_path):
    path, _ = adapters_of(tmp_path, "bfloat16", None)
    final = path.rename(tmp_path / "run/final-model")
    (final / "README.md").unlink()
    config = {"model": str(tmp_path / "base"), "dataset": {"train_ds": "x", "train_bs": 1}}
    train = {"output_dir": "run", "max_seq_len": 8, "optimizer": {"lr": 0.1}, "dtype": "bfloat16"}
    (tmp_path / "run/config.yaml").write_text(json.dumps({**config, "train_parameters": train}))
    assert base_settings_of(tmp_path / "run", final).dtype == "float32"
    (tmp_path / "run/run.json").write_text("{}")
    assert base_settings_of(tmp_path / "run", final).dtype == "bfloat16"


def adapters_of(path, dtype, quantization, **size):
    """Write a base in float32, and adapters that say how a run loaded it; return their folder and the base's."""
    base = save_tiny_llama(path / "base", **size)
    train_parameters = {"lora_peft_config": {"r": 2}, "dtype": dtype, "quantization": quantization}
    (path / "run").mkdir()
    (path / "run/config.yaml").write_text(json.dumps({"train_parameters": train_parameters}))
    card = card_of(path / "run", 1, is_adapter=True)
    adapted = add_lora(load_model(base), {"r": 2, "target_modules": ["q_proj"]})
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.fill_(0.01)
    export_model(adapted, letter_tokenizer(), path / "apart/adapters", card)
    return path / "apart/adapters", base


def coarsely(model, steps=1024):
    """Round as NF4 does, but more coarsely and without bitsandbytes."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name and "lora_" not in name:
                weight.copy_((weight * steps).round() / steps)


@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=pytest.mark.slow)])
def test_adapters_are_sampled_from_with_the_rounded_base_and_their_own_tokenizer(
    tmp_path, monkeypatch, capsys, engine
):
    monkeypatch.setattr(vectorlm.runs.start, "round_blocks", partial(coarsely, steps=32))
    path, base = adapters_of(tmp_path, "float32", "nf4", hidden_size=64)
    tokenizer = load_tokenizer(base)
    tokenizer.chat_template = "{{ messages[0].content }}b"
    tokenizer.save_pretrained(path)
    merged = export_of(capsys, path, "--merge")
    found = []
    for model, adapter in ((str(base), str(path)), (str(merged), None)):
        arguments = {"dtype": "float32", "kv_cache_memory_bytes": 16 << 20} if engine == "vllm" else {}
        with open_engine(engine, model, adapter, arguments) as opened:
            chat, params = (
                [{"role": "user", "content": "a"}],
                {"max_tokens": 6, "temperature": 0, "logprobs": 0},
            )
            found += opened.sample([chat], {**params, "ignore_eos": True})[0]
    of_adapters, of_merged = found
    assert of_adapters.prompt_token_ids == of_merged.prompt_token_ids == (2, 3)
    assert (of_adapters.token_ids, of_adapters.text) == (of_merged.token_ids, of_merged.text)
    # Engines with the same weights agree bit for bit.
    assert of_adapters.sampler_logprobs == of_merged.sampler_logprobs


@pytest.mark.skipif(is_installed("bitsandbytes"), reason="the package would round the base")
def test_without_the_package_that_rounds_the_base_adapters_are_refused(tmp_path, capsys):
    path, _ = adapters_of(tmp_path, "float32", "nf4")
    for command in (lambda: sample(path, "--engine", "hf"), lambda: main(["export", str(path), "--merge"])):
        assert command() == 2
        assert "needs the package bitsandbytes, which is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("adapter_model.safetensors", b"x", "cannot be read (Error while deserializing header"),
        ("adapter_model.safetensors", None, "have no adapter_model.safetensors"),
        ("adapter_config.json", {"peft_type": "UNKNOWN"}, "adapter_config.json cannot be read by PEFT"),
        ("adapter_config.json", {"peft_type": None}, "adapter_config.json cannot be read by PEFT"),
        ("adapter_config.json", b'{"peft_ty', "does not name a base model"),
        # Cards of other programs.
        ("README.md", b"---\ndtype: 4bit\nquantization: gptq\n---\n", ""),
        ("README.md", b"\xff\xfe", ""),
    ],
)
def test_broken_adapters_are_named(tmp_path, capsys, file, content, message):
    path, base = adapters_of(tmp_path, "float32", None)
    load_tokenizer(base).save_pretrained(path)
    if isinstance(content, dict):
        content = json.dumps(json.loads((path / file).read_text()) | content).encode()
    (path / file).unlink()
    if content is not None:
        (path / file).write_bytes(content)
    for command in (lambda: sample(path, "--engine", "hf"), lambda: main(["export", str(path), "--merge"])):
        assert command() == (2 if message else 0)
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_harness_scores_adapters_with_the_rounded_base(tmp_path, monkeypatch, capsys):
    pytest.importorskip("lm_eval")
    monkeypatch.setattr(vectorlm.runs.start, "round_blocks", partial(coarsely, steps=32))
    path, base = adapters_of(tmp_path, "float32", "nf4")
    load_tokenizer(base).save_pretrained(path)
    merged = export_of(capsys, path, "--merge")
    (tmp_path / "docs.jsonl").write_text('{"question": "abcdef"}\n')
    task = f"""
task: rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/docs.jsonl}}, cache_dir: {tmp_path}/cache}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
    (tmp_path / "rolling.yaml").write_text(task)
    found = []
    for model in (path, merged, base):
        command = ["evaluate", "--engine", "hf", "--tasks", str(tmp_path / "rolling.yaml"), "--output"]
        assert main([*command, str(tmp_path / "found.json"), "--model", str(model)]) == 0
        found.append(json.loads((tmp_path / "found.json").read_text())["samples"]["rolling"][0]["resps"])
    # W x + B A x and (W + B A) x differ by fp32 round-off.
    numbers = [float(str(resps).strip("[]'")) for resps in found]
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-5)
    assert numbers[0] != pytest.approx(numbers[2], abs=1e-3)


def test_a_folder_without_a_processor_has_no_tokenizer_for_a_vision_model(tmp_path):
    for name in ("base", "own"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer_config.json").touch()
    base, own = tmp_path / "base", tmp_path / "own"
    assert [tokenizer_folder(base, adapters) for adapters in (None, own)] == [base, own]
    (base / "preprocessor_config.json").touch()
    assert tokenizer_folder(base, own) == base
    (own / "processor_config.json").touch()
    assert tokenizer_folder(base, own) == own


@pytest.mark.parametrize(("before", "now"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_run_merges_adapters_into_the_base_they_were_trained_on(inputs, tmp_path, monkeypatch, before, now):
    monkeypatch.setattr(vectorlm.runs.start, "round_blocks", coarsely)
    path, base = adapters_of(tmp_path, before, "nf4")
    text = WITH_CHECKPOINTS.replace("{inputs}/model", str(path))
    config = resolve_model(make_config(inputs, tmp_path / "more", text, merge_adapters=True, dtype=now))
    found = Run.read_model(SimpleNamespace(config=config), is_empty=False)
    start = load_model(base, dtype=before)
    coarsely(start)
    expected = load_adapters(path, start.to(getattr(torch, now))).merge_and_unload()
    assert are_equal(found.state_dict(), expected.state_dict())
    other = load_model(base, dtype=now)
    coarsely(other)
    assert not are_equal(load_adapters(path, other).merge_and_unload().state_dict(), found.state_dict())
