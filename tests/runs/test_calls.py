"""Whole runs from Python, with functions, lists and settings as keywords."""

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import cloudpickle
import pandas
import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict, load_from_disk
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoTokenizer

import vectorlm
from vectorlm.cli import main
from vectorlm.data import preprocess
from vectorlm.data.prompts import read_prompts
from vectorlm.errors import ConfigError, DatasetError
from vectorlm.runs.calls import _prompts, _rewards
from vectorlm.runs.config.load import config_from_keywords, load_config
from vectorlm.train.checkpoint.folder import locked

ENGINE = {"max_model_len": 64, "kv_cache_memory_bytes": 16 << 20}
# Batching of requests and the prefix cache may change the last bit of a log-probability.
ENGINE |= {"max_num_seqs": 1, "enable_prefix_caching": False}
FEW = {
    "max_seq_len": 64,
    "max_steps": 2,
    "prompts_per_step": 2,
    "group_size": 4,
    "sampling_params": {"max_tokens": 8},
}


TINY_LLAMA = {"hidden_size": 64}


@pytest.mark.slow
def test_functions_and_lists_are_trained_on_and_a_function_between_steps_only_ends_the_run(
    folder, tmp_path, monkeypatch, forks_ranks
):
    monkeypatch.chdir(tmp_path)
    bonus = 0.25

    def vowels(completion, wanted):
        return bonus + completion.count(wanted) / 8

    prompts = [{"prompt": letter * 3, "wanted": letter} for letter in "aeiou"]
    given = {"world_size": 2, "lr": 1e-3, "lr_scheduler_type": "constant", **FEW, "engine": ENGINE}
    run = vectorlm.reinforce(folder, prompts, [vowels, lambda text: 0.0], **given)
    means = [line["reward/vowels/mean"] for line in _lines(run.metrics) if line["step"]]
    assert len(means) == 2
    assert min(means) >= bonus
    assert {line["prompt"][0] for line in _lines(run.rollouts)} <= set("aeiou")
    config = load_config(run.output_dir / "config.yaml")
    assert config.train_parameters.optimizer.lr == 1e-3
    assert sorted(name.rpartition(":")[2] for name in config.rl.reward.rewards) == ["reward_1", "vowels"]
    with vectorlm.HFEngine(str(run.model), dtype="float32") as engine:
        assert len(engine.sample(["aaa"], {"max_tokens": 2})) == 1

    class Meddler:
        def _note(self, *values):
            torch.rand(9)
            with open(tmp_path / "seen.jsonl", "a") as file:
                file.write(json.dumps(values) + "\n")

        def on_rollouts(self, run, step, rollouts):
            self._note("rollouts", step, len(rollouts), rollouts[0]["prompt"])
            for row in rollouts:
                row.clear()
            rollouts.clear()
            run.log({"own/seen": step})

        def on_evaluation(self, run, step, metrics):
            self._note("evaluation", step)

        def on_step(self, run, step, metrics):
            self._note("step", step, metrics["reward/mean"], run.learning_rate)
            metrics["reward/mean"] = 7.0
            if step == 2:
                run.stop()

    more = {"max_steps": 9, "output_dir": tmp_path / "ended", "callbacks": [Meddler()]}
    ended = vectorlm.reinforce(folder, prompts, [vowels, lambda text: 0.0], **given | more)
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    rows = _lines(ended.metrics)
    assert [row["step"] for row in rows] == [0, 1, 2]
    kept = [row for row in _lines(ended.rollouts) if row["train_step"] == 2]
    assert ["rollouts", 2, 8, kept[0]["prompt"]] in seen
    assert ["step", 2, rows[2]["reward/mean"], 1e-3] in seen
    assert [row.get("own/seen") for row in rows[1:]] == [1, 2]
    alone, weights = (load_file(finished.model / "model.safetensors") for finished in (run, ended))
    assert all(torch.equal(alone[name], tensor) for name, tensor in weights.items())
    start = load_file(folder / "model.safetensors")
    assert any(not torch.equal(start[name], tensor) for name, tensor in weights.items()), (
        "nothing was trained"
    )


def test_the_short_call_takes_sampling_parameters_and_fills_in_lengths_and_steps(
    folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    found = []
    monkeypatch.setattr("vectorlm.runs.calls.start", lambda config, *_: found.append(config))
    prompts = ["abc", "abcdefgh"] * 5
    vectorlm.reinforce(folder, prompts, len, max_tokens=20, temperature=0.8, top_p=0.9, seed=5)
    rl, train = found[0].rl, found[0].train_parameters
    assert rl.collect.sampling_params == {"max_tokens": 20, "temperature": 0.8, "top_p": 0.9}
    assert (rl.max_steps, rl.num_epochs_over_prompts, rl.collect.group_size) == (None, 1, 8)
    assert (train.max_seq_len, train.seed) == (28, 5)
    limit = 64
    vectorlm.reinforce(folder, prompts, len, max_tokens=200, max_steps=9)
    assert (found[1].rl.max_steps, found[1].train_parameters.max_seq_len) == (9, limit)
    vectorlm.finetune(folder, [{"text": "abc"}, {"text": "abcdefgh"}])
    assert 8 <= found[2].train_parameters.max_seq_len <= 10
    with pytest.raises(ConfigError, match="max_seq_len"):
        vectorlm.reinforce(folder, prompts, len, max_tokens=9, environment="e.py:E")


def test_a_whole_section_stands_beside_what_the_call_fills_in(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = []
    monkeypatch.setattr("vectorlm.runs.calls.start", lambda config, *_: found.append(config))
    section = {"kl_coef": 0.5, "rollout": {"save_tokens": True}, "algorithm": {"clip_high": 0.4}}
    vectorlm.reinforce(folder, ["a"], "countdown", **FEW, rl=section)
    assert (found[0].rl.kl.kl_coef, found[0].rl.rollout.save_tokens, found[0].rl.max_steps) == (0.5, True, 2)
    assert found[0].rl.algorithm.name == "grpo"
    assert found[0].rl.algorithm.settings.clip_high == 0.4
    how = {"data_field": "text", "packing_type": "full"}
    vectorlm.finetune(folder, [{"text": "abc" * 9}] * 20, max_seq_len=8, dataset_preprocess=how)
    assert found[1].dataset_preprocess.packing_type == "full"
    assert len(load_from_disk(found[1].dataset.train_ds)[0]["input_ids"]) == 8


@pytest.mark.parametrize("make", [list, Dataset.from_list, pandas.DataFrame])
def test_held_out_prompts_may_be_in_memory(folder, tmp_path, monkeypatch, make):
    found = []
    monkeypatch.setattr("vectorlm.runs.calls.start", lambda config, *_: found.append(config))
    rows = make([{"prompt": "abcdefgh", "answer": "b"}, {"prompt": "cd", "answer": "d"}])
    held_out = {"prompts": rows, "every": 1}
    given = {"max_tokens": 4, "output_dir": tmp_path}
    vectorlm.reinforce(folder, ["a"], "countdown", evaluation=held_out, **given)
    records = read_prompts(found[0].evaluation.prompts)
    assert [(record.prompt, record.columns["answer"]) for record in records] == [
        ("abcdefgh", "b"),
        ("cd", "d"),
    ]
    assert [record.prompt for record in read_prompts(found[0].rl.collect.prompts)] == ["a"]
    assert held_out["prompts"] is rows
    with pytest.raises(DatasetError, match=r"evaluation\.prompts\[0\].*answer"):
        vectorlm.reinforce(
            folder, ["a"], "countdown", evaluation={"prompts": make([{"answer": "b"}])}, **given
        )


@pytest.mark.parametrize(("steps", "note"), [([1, 2], "step 2"), ([], "starts over")])
def test_ctrl_c_names_the_step_from_which_the_call_resumes(
    folder, tmp_path, monkeypatch, capsys, steps, note
):
    def interrupted(*args, **kwargs):
        for step in steps:
            path = tmp_path / "checkpoints" / f"step-{step:08d}"
            path.mkdir(parents=True)
            (path / "state.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr("vectorlm.runs.calls.launch", interrupted)
    train = {"output_dir": str(tmp_path), "max_seq_len": 64, "optimizer": {"lr": 1e-3}}
    train["checkpointing_enabled"] = True
    rl = {"algorithm": "grpo", "prompts": ["a"], "rewards": {"format(pattern='a')": 1.0}}
    rl |= {name: value for name, value in FEW.items() if name != "max_seq_len"}
    settings = {"model": str(folder), "train_parameters": train, "engine": ENGINE, "rl": rl}
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(settings))
    assert main(["run", str(config)]) == 130
    first, second = capsys.readouterr().err.splitlines()[-2:]
    assert first == "interrupted"
    assert note in second


def _lines(table):
    return table if isinstance(table, list) else table.to_dict("records")


@pytest.mark.slow
def test_texts_in_memory_are_learned_until_the_step_of_a_callback(folder, tmp_path, forks_ranks):
    class StopAtEight:
        def on_step(self, run, step, metrics):
            if "eval/loss" not in metrics and step == 8:
                run.stop()

    rows = [{"text": letter * 20} for letter in "abcdefghijklmnopqrst"]
    run = vectorlm.finetune(
        folder,
        rows,
        max_seq_len=32,
        epochs=9,
        train_bs=2,
        lr=1e-3,
        lr_scheduler_type="constant",
        logging_steps=100,
        world_size=2,
        output_dir=tmp_path / "run",
        callbacks=[StopAtEight()],
    )
    lines = _lines(run.metrics)
    assert [line["step"] for line in lines] == list(range(9))
    assert lines[-1]["train/loss"] < lines[1]["train/loss"]
    # The stopping step is evaluated as a last step, and its model is exported.
    assert "eval/loss" in lines[-1]
    assert (run.model / "model.safetensors").is_file()


def test_keywords_are_the_settings_of_a_config():
    config = config_from_keywords(
        {"model": "m", "prompts": ["a"], "rewards": {"countdown": 1}, "algorithm": "grpo", "seed": 3, "lr": 0.5,
         "max_steps": 4, "prompts_per_step": 2,
         "max_seq_len": 32, "output_dir": "o", "clip_high": 0.4, "train_parameters": {"epochs": 2},
         "sampling_params": {"max_tokens": 3}, "engine": {"max_model_len": 9}},
        "rl",
    )  # fmt: skip
    train, rl = config.train_parameters, config.rl
    assert (train.seed, train.optimizer.lr, train.loop.epochs, train.max_seq_len) == (3, 0.5, 2, 32)
    assert (rl.max_steps, rl.collect.prompts, rl.collect.sampling_params) == (4, ("a",), {"max_tokens": 3})
    assert rl.algorithm.settings.clip_high == 0.4
    assert config.engine.engine_args == {"max_model_len": 9}


def test_the_dictionaries_of_a_call_stay_as_they_are():
    train, engine = {"seed": 3}, {"dtype": "float32"}
    keywords = {"model": "m", "output_dir": "o", "train_parameters": train, "engine": engine, "max_steps": 1}
    keywords |= {"prompts": ["a"], "prompts_per_step": 2, "rewards": {"countdown": 1}, "algorithm": "grpo"}
    config = config_from_keywords({**keywords, "max_seq_len": 64, "receiver": "packed", "lr": 1e-3}, "rl")
    assert (config.train_parameters.max_seq_len, config.engine.receiver) == (64, "packed")
    assert (train, engine) == ({"seed": 3}, {"dtype": "float32"})


def test_functions_without_a_name_get_names_that_no_other_function_has(tmp_path):
    def reward_1(completion):
        return 1.0

    def reward_3(completion):
        return 3.0

    given = [reward_1, partial(reward_1), lambda text: 0.0, reward_3, lambda text: 0.0]
    assert len(_rewards(given, tmp_path)) == len(given)
    functions = cloudpickle.loads((tmp_path / "functions.pkl").read_bytes())
    assert [functions[name]("") for name in ("reward_1", "reward_3")] == [1.0, 3.0]
    assert len(functions) == len(given)


def test_a_name_is_that_of_the_section_that_trains():
    given = {"model": "m", "output_dir": "o", "max_seq_len": 8, "lr": 1e-5, "beta": 0.2}
    of_rl = {
        "algorithm": "online_dpo",
        "preference": "ipo",
        "max_steps": 1,
        "prompts_per_step": 2,
        "prompts": ["a"],
    }
    config = config_from_keywords({**given, **of_rl}, "rl")
    assert config.preference is None
    assert (config.rl.algorithm.settings.beta, config.rl.algorithm.settings.preference) == (0.2, "ipo")
    data = {"dataset": {"train_ds": "t", "eval_ds": "e", "train_bs": 1, "eval_bs": 1}}
    config = config_from_keywords({**given, **data, "preference": {"loss": "dpo"}}, "train_parameters")
    assert (config.preference.loss, config.preference.beta) == ("dpo", 0.2)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"num_generations": 4}, "rl.group_size"),
        ({"group_sise": 4}, "rl.group_size"),
        ({"max_steps": "ten"}, "rl.max_steps"),
        ({"enforce_eager": True}, r"pass engine=\{'enforce_eager'"),
    ],
)
def test_what_is_wrong_is_said_as_of_a_file(folder, tmp_path, monkeypatch, wrong, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        vectorlm.reinforce(folder, ["a"], len, **{**FEW, **wrong})
    with pytest.raises(ConfigError, match="LoraConfig as a dictionary"):
        vectorlm.reinforce(folder, ["a"], len, **FEW, lora_peft_config=LoraConfig())
    with pytest.raises(ConfigError, match="rewards"):
        vectorlm.reinforce(folder, ["a"], [3], **FEW)
    for name in ("packing_type", "assistant_only_loss", "packing"):
        with pytest.raises(ConfigError, match=name):
            vectorlm.finetune(folder, [{"text": "abc"}], max_seq_len=8, dataset_preprocess={name: "ful"})


@pytest.fixture
def prepared(folder, tmp_path, monkeypatch):
    """Return a function that calls `finetune` without training, and returns the prepared rows as texts."""
    monkeypatch.setattr("vectorlm.runs.calls.start", lambda *_: None)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def call(dataset, eval_dataset=None, **settings):
        settings = {"max_seq_len": 64, "output_dir": tmp_path / "run", **settings}
        vectorlm.finetune(folder, dataset, eval_dataset, **settings)
        rows = load_from_disk(tmp_path / "run" / "data" / "train")
        return [tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "") for ids in rows["input_ids"]]

    return call


def test_a_second_call_trains_on_its_own_rows(prepared, tmp_path):
    first, second = [{"text": "abab"}] * 4, [{"text": "cdcd"}] * 4
    held_out = [{"text": "efef"}]
    assert prepared(first, held_out) == ["abab"] * 4
    made = load_from_disk(tmp_path / "run/data/train")._fingerprint
    assert prepared(first, held_out) == ["abab"] * 4
    assert load_from_disk(tmp_path / "run/data/train")._fingerprint == made, (
        "the same rows are not made again"
    )
    assert prepared(second, held_out) == ["cdcd"] * 4
    assert prepared(second, held_out, dataset_preprocess={"pre_pend": "g"}) == ["gcdcd"] * 4
    file = tmp_path / "rows.jsonl"
    for text in ("hh", "ii"):
        file.write_text(json.dumps({"text": text}) + "\n")
        assert prepared(file) == [text]


def test_a_call_that_is_killed_after_it_wrote_its_rows_leaves_no_old_note(prepared, monkeypatch):
    first, second = [{"text": "abab"}] * 2, [{"text": "cdcd"}] * 2
    prepared(first, first)

    def written_and_killed(*arguments, make=preprocess.preprocess):
        make(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr(preprocess, "preprocess", written_and_killed)
        with pytest.raises(KeyboardInterrupt):
            prepared(second, second)
    assert prepared(first, first) == ["abab"] * 2


def test_a_call_into_the_folder_of_a_live_run_changes_nothing(prepared, tmp_path):
    prepared([{"text": "abab"}] * 2)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    with locked(tmp_path / "run"), pytest.raises(ConfigError, match=r"output_dir.*in use"):
        prepared([{"text": "cdcd"}] * 2)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}


@pytest.mark.parametrize(
    ("file", "ends"),
    [
        ("tokenizer_config.json", {"eos_token": "a"}),
        ("generation_config.json", {"eos_token_id": 7}),
        ("preprocessor_config.json", {"max_pixels": 9}),
    ],
)
def test_a_second_call_makes_the_rows_again_if_the_tokenizer_was_corrected(
    folder, tmp_path, monkeypatch, file, ends
):
    monkeypatch.setattr("vectorlm.runs.calls.start", lambda *_: None)
    model = tmp_path / "model"
    shutil.copytree(folder, model)

    def made():
        vectorlm.finetune(model, [{"text": "abab"}] * 2, max_seq_len=64, output_dir=tmp_path / "run")
        return load_from_disk(tmp_path / "run" / "data" / "train")

    before = made()
    assert made()._fingerprint == before._fingerprint
    path = model / file
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **ends}))
    after = made()
    assert after._fingerprint != before._fingerprint
    assert after[0]["input_ids"][-1] == AutoTokenizer.from_pretrained(model).eos_token_id


@pytest.mark.parametrize(
    "make",
    [
        lambda texts: [{"text": text} for text in texts],
        lambda texts: texts,
        lambda texts: iter(texts),
        lambda texts: {"text": texts},
        lambda texts: pandas.DataFrame({"text": texts, "seen": pandas.Timestamp("2026-01-01")}),
        lambda texts: Dataset.from_dict({"text": texts}),
    ],
    ids=["rows", "texts", "iterator", "columns", "frame", "dataset"],
)
@pytest.mark.parametrize("num", [1, 20])
def test_rows_in_memory_may_have_any_form_and_the_same_ones_are_held_out(prepared, make, num):
    texts = [letter * 4 for letter in "abcdefghijklmnopqrst"[:num]]
    kept = prepared(make(texts))
    halves = Dataset.from_dict({"text": texts}).train_test_split(0.05, seed=0) if num > 1 else {}
    expected = list(halves["train"]["text"]) if num > 1 else texts
    assert kept == expected


def test_keys_that_the_first_row_lacks_are_kept(prepared, tmp_path):
    rows = [
        {"text": "ab"},
        {"text": "cd", "extra": {"a": 1}},
        {"text": "ef", "extra": {"a": "b", "c": [None, 2.5]}},
    ]
    assert prepared(rows, rows[:1]) == ["ab", "cd", "ef"]
    written = [json.loads(line) for line in (tmp_path / "run/data/train-rows.jsonl").read_text().splitlines()]
    assert written == rows


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([], r"dataset|prompts"),
        ([b"abc"], r"\[0\].*bytes"),
        ([{"text": "ab"}, 3], r"\[1\].*int"),
        (b"abc", "bytes"),
        (7, "int"),
        ([{"prompt": "a", "completion": "b", "picture": b"x"}], "bytes"),
        (DatasetDict(train=Dataset.from_dict({"text": ["a"]})), "train"),
    ],
)
def test_what_is_no_list_of_rows_is_refused(folder, tmp_path, given, named):
    with pytest.raises(DatasetError, match=named):
        vectorlm.finetune(folder, given, max_seq_len=8, output_dir=tmp_path)
    if not isinstance(given, Mapping):
        with pytest.raises(DatasetError, match=named):
            vectorlm.reinforce(folder, given, len, max_steps=1, max_seq_len=8, output_dir=tmp_path)


@pytest.mark.parametrize("make", [list, Dataset.from_list, pandas.DataFrame])
def test_rows_without_a_prompt_are_named_by_their_place_and_columns(tmp_path, make):
    with pytest.raises(DatasetError, match=r"prompts\[0\].*question, answer"):
        _prompts(make([{"question": "2+2=", "answer": "4"}]), tmp_path, "prompts")


def test_prompts_of_a_data_frame_are_its_rows(tmp_path):
    frame = pandas.DataFrame(
        {"prompt": ["2+2=", "3+3="], "answer": [4, None], "day": pandas.Timestamp("2026-01-01")}
    )
    for given in (frame, Dataset.from_pandas(frame)):
        records = read_prompts(_prompts(given, tmp_path, "prompts"))
        assert [record.prompt for record in records] == ["2+2=", "3+3="]
        assert records[0].columns["answer"] == 4


def test_a_home_folder_is_found_and_a_variable_is_refused(folder, tmp_path, monkeypatch, prepared):
    monkeypatch.setenv("HOME", str(tmp_path))
    prepared([{"text": "ab"}], output_dir="~/run")
    assert not Path("~").exists()
    with pytest.raises(ConfigError, match="output_dir"):
        prepared([{"text": "ab"}], output_dir="$HOME/run")
    assert not Path("$HOME").exists()
