"""``vectorlm evaluate``, as a user runs it at a terminal."""

import json
import math
from datetime import date

import pyarrow as pa
import pytest
from datasets import Dataset
from kit.rank_processes import forked
from kit.rl_runs import config_of, save_files
from pyarrow import parquet

import vectorlm.cli.evaluate as command
from vectorlm.cli import main
from vectorlm.cli.evaluate import _pair_of
from vectorlm.errors import ConfigError
from vectorlm.rl.settings import VERIFIERS
from vectorlm.runs.reinforcement import reinforce
from vectorlm.sampling.inline_engines import HFEngine
from vectorlm.types import PromptRecord

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}
test_split: test
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
"""
CHOICE = """
output_type: multiple_choice
doc_to_choice: "{{options}}"
doc_to_target: "{{gold}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
GENERATE = """
output_type: generate_until
doc_to_target: "{{options[0]}}"
generation_kwargs: {until: ["t"], max_gen_toks: 8}
metric_list: [{metric: exact_match, ignore_punctuation: true}]
"""
ROLLING = """
output_type: loglikelihood_rolling
doc_to_target: "{{question}}{{options[0]}}"
metric_list: [{metric: bits_per_byte}]
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a folder with a model, questions, rewards, and a harness task of each kind with its data."""
    folder = save_files(tmp_path_factory.mktemp("evaluate"))
    # The model and its tokenizer share the end token; otherwise transformers would continue after it.
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / "model" / name).read_text())
        (folder / "model" / name).write_text(json.dumps(settings | {"eos_token_id": 0}))
    words = ("abcdefgh", "bcdefgh", "hijklmn", "nopqrst", "tuvwxyz", "qwertyu", "asdfghj", "mnbvcxz")
    rows = [
        {"question": word[:3], "options": [word[3:], word[:2:-1], "zzz"], "gold": place % 3}
        for place, word in enumerate(words)
    ]
    (folder / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, kind in (("choice", CHOICE), ("generate", GENERATE), ("rolling", ROLLING)):
        head = TASK.format(name=name, data=folder / "docs.jsonl", cache=folder / "cache")
        (folder / f"{name}.yaml").write_text(head + kind)
    return folder


def evaluate(files, *arguments, engine="hf"):
    return main(["evaluate", "--model", str(files / "model"), "--engine", engine, *map(str, arguments)])


def questions(files):
    return ["--prompts", files / "questions.jsonl", "--reward", f"{files / 'rewards.py'}:letters"]


def test_questions_and_a_reward_give_a_mean_with_its_error_and_a_file_with_every_answer(
    files, tmp_path, capsys
):
    output = tmp_path / "found.json"
    arguments = ["--n", 2, "--seed", 3, "--max_tokens", 6, "--output", output]
    assert evaluate(files, *questions(files), *arguments) == 0
    found = json.loads(output.read_text())
    with HFEngine(files / "model") as engine:
        params = {"n": 2, "seed": 3, "max_tokens": 6}
        answers = engine.sample([letter * 3 for letter in "abcdefgh"], params)
    texts = [[completion["text"] for completion in row["completions"]] for row in found["answers"]]
    assert texts == [[completion.text for completion in options] for options in answers]
    rewards = [
        [text.count(letter) / 8 for text in options]
        for letter, options in zip("abcdefgh", texts, strict=True)
    ]
    by_row = [
        [completion["rewards"]["letters"] for completion in row["completions"]] for row in found["answers"]
    ]
    assert by_row == rewards
    mean = sum(map(sum, rewards)) / 16
    assert found["rewards"]["letters"]["mean"] == pytest.approx(mean)
    assert (found["num_questions"], found["num_answers"]) == (8, 16)
    assert [row["columns"]["wanted"] for row in found["answers"]] == list("abcdefgh")
    line, counted, seconds = capsys.readouterr().out.splitlines()
    error = found["rewards"]["letters"]["mean_error"]
    assert f"mean reward {mean:.4f} ± {error:.4f}" in line
    assert counted == "8 questions, 16 answers"
    assert seconds.endswith(" s")


def test_the_vote_of_several_answers_is_printed(files, tmp_path, capsys):
    (tmp_path / "voting.py").write_text("def voting(text, log):\n    log('answer', 'same')\n    return 1.0\n")
    reward = ["--reward", f"{tmp_path / 'voting.py'}:voting", "--max_tokens", 2]
    assert evaluate(files, *questions(files)[:2], *reward, "--n", 3, "--at_k", "1,3") == 0
    assert ", pass@1 100.0%, pass@3 100.0%, maj@1 100.0%, maj@3 100.0%" in capsys.readouterr().out


GAME = """
from vectorlm.rl.environments.environment import Reply

class Vowels:
    async def step(self, message):
        number = sum(message["content"].count(letter) for letter in "aeiou")
        return Reply("abc", reward=number / 4)
"""


def test_with_an_environment_the_questions_are_played(files, tmp_path, capsys):
    config_of(files, "played")
    (tmp_path / "game.py").write_text(GAME)
    settings = [
        f"rl.environment={tmp_path}/game.py:Vowels",
        "rl.max_turns=2",
        "evaluation.rewards=null",
    ]
    settings.append("evaluation.sampling_params.seed=-1")
    sets = [part for setting in settings for part in ("--set", setting)]
    output = tmp_path / "found.json"
    reward = ["--reward", f"{files / 'rewards.py'}:vowels", "--param", "stop=[e, o]"]
    assert evaluate(files, files / "played.yaml", *sets, *reward, "--n", 2, "--output", output) == 0
    found = json.loads(output.read_text())
    completions = [completion for row in found["answers"] for completion in row["completions"]]
    assert len(completions) == 16
    for completion in completions:
        # The environment gets no further turn after a turn that was cut off, and its reply is in the text.
        vowels = sum(completion["text"].count(letter) for letter in "aeiou") - completion["text"].count("abc")
        assert completion["rewards"]["vowels"] == pytest.approx(vowels / 8)
        assert completion["rewards"]["environment"] <= vowels / 4
        both = completion["rewards"]["vowels"] + completion["rewards"]["environment"]
        assert completion["rewards"]["sum"] == pytest.approx(both), "as training adds them"
    assert any("abc" in completion["text"] for completion in completions)
    assert found["rewards"]["environment"]["mean"] > 0
    assert "environment" in capsys.readouterr().out
    assert evaluate(files, files / "played.yaml", *sets, *reward, "--n", 2, "--pairs", output) == 2
    assert "--pairs" in capsys.readouterr().err


def test_one_question_has_no_error(files, capsys):
    assert evaluate(files, *questions(files), "--limit", 1, "--max_tokens", 2) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert "mean reward" in line
    assert "±" not in line


def test_the_file_is_json_whatever_the_columns_hold(files, tmp_path):
    rows = [{"prompt": "ab", "wanted": "a", "when": date(2026, 1, 2), "share": math.nan}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "half.jsonl").write_text(
        '{"prompt": "ab", "wanted": "a", "share": NaN, "half": "é\\ud83d"}\n'
    )
    Dataset.from_list(rows).save_to_disk(tmp_path / "rows")
    for name, columns in (
        ("rows", {"when": "2026-01-02", "share": None}),
        ("rows.parquet", {"when": "2026-01-02", "share": None}),
        ("half.jsonl", {"share": None, "half": "é\ud83d"}),
    ):
        asked = ["--prompts", tmp_path / name, "--reward", f"{files / 'rewards.py'}:letters"]
        assert evaluate(files, *asked, "--max_tokens", 2, "--output", tmp_path / "found.json") == 0
        text = (tmp_path / "found.json").read_text(encoding="utf-8")
        (answer,) = json.loads(text, parse_constant=pytest.fail)["answers"]
        assert answer["columns"] == {"wanted": "a", **columns}


def test_a_run_s_config_brings_questions_rewards_and_sampling_parameters(files, tmp_path, capsys):
    config_of(files, tmp_path / "run")
    output = tmp_path / "found.json"
    assert evaluate(files, files / "run.yaml", "--limit", 3, "--temperature", 0, "--output", output) == 0
    found = json.loads(output.read_text())
    # The command line overrides the config.
    assert found["sampling_params"] == {"temperature": 0.0, "max_tokens": 8, "seed": 7}
    assert list(found["rewards"]) == ["letters"]
    assert found["num_questions"] == 3
    assert not (tmp_path / "run").exists()
    capsys.readouterr()
    # Without evaluation.rewards, the command uses rl.rewards with their weights.
    rewards = f"{files / 'rewards.py'}"
    override = [
        "evaluation.rewards=null",
        f"rl.rewards={{'{rewards}:vowels': 2, '{rewards}:letters': 1}}",
    ]
    sets = [part for setting in override for part in ("--set", setting)]
    assert evaluate(files, files / "run.yaml", *sets, "--output", output) == 0
    found = json.loads(output.read_text())["rewards"]
    assert list(found) == ["vowels", "letters", "sum"]
    assert found["sum"]["mean"] == pytest.approx(2 * found["vowels"]["mean"] + found["letters"]["mean"])
    # --reward replaces reward models too, which this command does not load.
    override = ["evaluation.rewards=null", "rl.rewards={}", f"rl.reward_models={{'{files / 'model'}': 1}}"]
    sets = [part for setting in override for part in ("--set", setting)]
    capsys.readouterr()
    assert evaluate(files, files / "run.yaml", *sets) == 2
    assert "rl.reward_models" in capsys.readouterr().err
    assert (
        evaluate(files, files / "run.yaml", *sets, "--reward", f"{rewards}:vowels", "--output", output) == 0
    )
    assert list(json.loads(output.read_text())["rewards"]) == ["vowels"]


@pytest.mark.parametrize(
    ("overrides", "fewest", "most"),
    [
        ({"train_parameters.max_seq_len": "12", "engine.max_model_len": "null"}, 1, 9),
        ({"engine": "{inference: transformers, max_model_len: 10}"}, 1, 7),
        ({"train_parameters.max_seq_len": "-1", "engine.max_model_len": "null"}, 10, 30),
    ],
)  # fmt: skip
def test_answers_are_as_long_as_in_the_run(files, tmp_path, overrides, fewest, most):
    config_of(files, tmp_path / "long")
    output = tmp_path / "found.json"
    sets = [part for key, value in overrides.items() for part in ("--set", f"{key}={value}")]
    more = ["--max_tokens", 30, "--param", "ignore_eos=true"]
    assert evaluate(files, files / "long.yaml", *sets, *more, "--output", output) == 0
    texts = [answer["completions"][0]["text"] for answer in json.loads(output.read_text())["answers"]]
    # Some tokens of the model have an empty text.
    assert fewest <= max(len(text.split()) for text in texts) <= most


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--prompts"),
        (["--prompts", "{files}/questions.jsonl"], "--reward"),
        (["--prompts", "nowhere.jsonl", "--reward", "countdown"], "--prompts nowhere.jsonl"),
        (["--prompts", "{files}/questions.jsonl", "--reward", "cuontdown"], "'countdown'"),
        (["--tasks", "x", "--n", "2"], "--n"),
        (["--tasks", "x", "--chat_template_kwarg", "enable_thinking=false"], "--chat_template_kwarg"),
        (["--tasks", "nowhere.yaml"], "--tasks nowhere.yaml"),
        (["--set", "a=1", "--prompts", "p"], "--set"),
        (["--prompts", "{files}/questions.jsonl", "--engine_arg", "max_model_len=8"], "--engine_arg"),
        (["--prompts", "{files}/questions.jsonl", "--output", "nowhere/o.json"], "--output nowhere/o.json"),
        (["--prompts", "{files}/questions.jsonl", "--reward", "countdown", "--at_k", "1,4"], "Use --n 4"),
        (
            [
                *["--prompts", "{files}/questions.jsonl", "--reward", "countdown", "--chat_template"],
                "nowhere.jinja",
            ],
            "chat_template='nowhere.jinja' cannot be read",
        ),
    ],
)
def test_a_wrong_argument_ends_with_one_line_and_code_2(files, capsys, arguments, message):
    assert evaluate(files, *(argument.format(files=files) for argument in arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert message in printed.err


def test_rewards_of_one_name_are_told_apart_by_their_files(files, tmp_path):
    (tmp_path / "other.py").write_text("def letters(text):\n    return 1.0\n")
    output, other = tmp_path / "found.json", f"{tmp_path / 'other.py'}:letters"
    assert evaluate(files, *questions(files), "--reward", other, "--limit", 2, "--output", output) == 0
    found = json.loads(output.read_text())["rewards"]
    assert list(found) == [f"{files / 'rewards.py'}:letters", other, "sum"]
    assert found[other]["accuracy"] == 1.0


def test_a_reward_that_is_none_is_left_out_of_the_sum(files, tmp_path):
    (tmp_path / "two.py").write_text("def one(text):\n    return 1.0\n\ndef none(text):\n    return None\n")
    rewards = [part for name in ("one", "none") for part in ("--reward", f"{tmp_path / 'two.py'}:{name}")]
    output = tmp_path / "found.json"
    assert evaluate(files, *questions(files)[:2], *rewards, "--limit", 2, "--output", output) == 0
    found = json.loads(output.read_text())["rewards"]
    assert (found["sum"]["mean"], found["sum"]["num_unscored"]) == (1.0, 0)
    assert (found["none"]["num_questions"], found["none"]["num_unscored"]) == (0, 2)


def test_a_reward_that_fails_ends_the_evaluation_by_its_name(files, capsys):
    rewards = f"{files / 'rewards.py'}:fails"
    assert evaluate(files, "--prompts", files / "questions.jsonl", "--reward", rewards, "--limit", 1) == 1
    assert "rewards.py:fails' failed: KeyError: 'no such answer'" in capsys.readouterr().err


def test_held_out_rewards_have_the_time_limit_of_rewards(files, tmp_path):
    config_of(files, "slow")
    (tmp_path / "slow.py").write_text(
        "import time\n\ndef slow(completion):\n    time.sleep(0.5)\n    return 1.0\n"
    )
    sets = ["--set", f"evaluation.rewards={{'{tmp_path}/slow.py:slow': 1}}", "--set", "engine.timeout_s=0.1"]
    assert evaluate(files, files / "slow.yaml", "--limit", 1, *sets) == 0
    sets += ["--set", "rl.reward_timeout_s=0.1"]
    assert evaluate(files, files / "slow.yaml", "--limit", 1, *sets) == 1


def test_a_reward_whose_column_the_questions_lack_is_refused_before_the_model_is_loaded(
    files, capsys, monkeypatch
):
    monkeypatch.setattr("vectorlm.cli.evaluate._answers", lambda *_: pytest.fail("the model was asked"))
    assert evaluate(files, "--prompts", files / "questions.jsonl", "--reward", "countdown", "--limit", 1) == 2
    assert "the reward 'countdown' needs 'numbers', which the prompts do not have" in capsys.readouterr().err


def test_verifiers_plays_its_tasks_and_nothing_else(files, capsys, monkeypatch):
    config_of(files, "tasks")
    task, asked = PromptRecord("abc", {"wanted": "a", "taskset": "words", "config": {}, "task": {}}), []
    read = command.read_prompts
    monkeypatch.setattr(
        command, "read_prompts", lambda source, *how: [task] if "verifiers" in source else read(source, *how)
    )

    def answers(args, exam):
        asked.append(exam.environment)
        raise ConfigError("no model")

    monkeypatch.setattr(command, "_answers", answers)

    def ask(*arguments):
        assert evaluate(files, files / "tasks.yaml", *arguments) == 2
        return capsys.readouterr().err

    learned, held_out = (("--set", f"{name}.prompts=verifiers:words") for name in ("rl", "evaluation"))
    for given, rule in ((learned, "must be tasks of verifiers"), (held_out, "needs a source")):
        error = ask(*given)
        assert "evaluation.prompts=" in error
        assert rule in error
    assert asked == []
    ask(*learned, *held_out)
    ask(*learned, *questions(files))
    assert asked == [VERIFIERS, None]


@pytest.mark.parametrize(
    ("reward", "rule"),
    [("judge(model='self')", "needs a run of reinforcement learning"), ("judge(model='m')", "the url")],
)
def test_a_judge_that_the_command_cannot_ask_is_refused_before_the_model_is_loaded(
    files, capsys, monkeypatch, reward, rule
):
    monkeypatch.setattr("vectorlm.cli.evaluate._answers", lambda *_: pytest.fail("the model was asked"))
    assert evaluate(files, "--prompts", files / "questions.jsonl", "--reward", reward, "--limit", 1) == 2
    assert rule in capsys.readouterr().err


def test_without_the_harness_its_tasks_are_refused_by_the_package_s_name(files, capsys, monkeypatch):
    monkeypatch.setattr("vectorlm.cli.evaluate.is_installed", lambda name: False)
    assert evaluate(files, "--tasks", "choice") == 2
    assert "--tasks needs the package lm_eval, which is not installed." in capsys.readouterr().err


@pytest.mark.slow
def test_tasks_between_steps_have_the_numbers_of_the_exported_model(files, tmp_path):
    pytest.importorskip("lm_eval")
    names = [str(files / f"{name}.yaml") for name in ("choice", "generate", "rolling")]
    overrides = [f"evaluation.tasks=[{', '.join(names)}]", "rl.max_steps=2"]
    overrides.append("evaluation.prompts=null")
    overrides.append("evaluation.rewards=null")
    forked(reinforce, config_of(files, tmp_path / "run", overrides=overrides))
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    before, after = steps[0], steps[-1]
    output = tmp_path / "found.json"
    arguments = ["--model", str(tmp_path / "run" / "final-model"), "--tasks", ",".join(names)]
    for argument in ("dtype=float32", "kv_cache_memory_bytes=16777216", "max_model_len=64"):
        arguments += ["--engine_arg", argument]
    assert main(["evaluate", *arguments, "--output", str(output)]) == 0
    results = json.loads(output.read_text())["results"]
    for name, key in (
        ("choice", "acc"),
        ("choice", "acc_norm"),
        ("generate", "exact_match"),
        ("rolling", "bits_per_byte"),
    ):
        assert after[f"eval/{name}/{key}"] == pytest.approx(results[name][f"{key},none"], rel=1e-5)
    assert after["eval/rolling/bits_per_byte"] != pytest.approx(
        before["eval/rolling/bits_per_byte"], rel=1e-4
    )


@pytest.mark.slow
def test_every_evaluation_has_the_same_examples(files):
    pytest.importorskip("lm_eval")
    from lm_eval.api.model import LM

    from vectorlm.rl.evaluation import harness

    class Recorder(LM):
        def loglikelihood(self, requests):
            asked.append([request.args for request in requests])
            return [(0.0, False)] * len(requests)

        loglikelihood_rolling = generate_until = loglikelihood

    asked = []
    text = (files / "choice.yaml").read_text() + "num_fewshot: 2\nfewshot_split: test\n"
    (files / "examples.yaml").write_text(text)
    tasks = harness.load_tasks([str(files / "examples.yaml")], "tasks")
    for _ in range(2):
        harness.run_tasks(Recorder(), tasks)
    assert asked[0] == asked[1]


@pytest.mark.slow
def test_the_engine_and_transformers_give_the_harness_the_same_numbers(files, tmp_path, capsys):
    pytest.importorskip("lm_eval")
    names = ",".join(str(files / f"{name}.yaml") for name in ("choice", "generate", "rolling"))
    results = {}
    for engine in ("hf", "vllm"):
        output = tmp_path / f"{engine}.json"
        # Use the model's own precision: vLLM would load float32 weights as bfloat16.
        more = ["--engine_arg", "dtype=float32", "--engine_arg", "kv_cache_memory_bytes=16777216"]
        arguments = ["--tasks", names, "--output", output, *(more if engine == "vllm" else [])]
        assert evaluate(files, *arguments, engine=engine) == 0
        results[engine] = json.loads(output.read_text())
    ours, theirs = results["vllm"], results["hf"]
    assert ours["results"]["choice"]["acc,none"] == theirs["results"]["choice"]["acc,none"]
    assert 0 < ours["results"]["choice"]["acc,none"] < 1
    for task, count in (("choice", 24), ("rolling", 8)):
        pairs = [
            (numbers(mine), numbers(other))
            for sample, reference in zip(ours["samples"][task], theirs["samples"][task], strict=True)
            for mine, other in zip(sample["resps"], reference["resps"], strict=True)
        ]
        assert len(pairs) == count
        for mine, other in pairs:
            # The values are sums of up to eight float32 log-probabilities.
            assert mine == pytest.approx(other, abs=1e-3)
    words = [
        [sample["resps"][0][0].split() for sample in result["samples"]["generate"]]
        for result in (ours, theirs)
    ]
    assert words[0] == words[1]
    assert any(words[0])
    assert "choice  acc 0." in capsys.readouterr().out


def numbers(response):
    (answer,) = response
    return list(answer) if isinstance(answer, list) else [answer]


def test_a_source_of_a_run_is_evaluated_by_its_own_questions_and_rewards(files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    config_of(files, "sources")
    for name in ("easy", "hard"):
        (files / f"{name}.jsonl").write_text(json.dumps({"prompt": "abc"}) + "\n")
        (files / f"{name}.py").write_text(
            f"def {name}(text, **columns):\n    return {float(name == 'easy')}\n"
        )
    sources = ", ".join(
        f"{name}: {{prompts: questions.jsonl, held_out: {name}.jsonl, rewards: {{'{name}.py:{name}': 1}}}}"
        for name in ("easy", "hard")
    )
    sets = ("--set", f"rl.sources={{{sources}}}", "--set", "rl.prompts=null", "--set", "rl.rewards={}")
    for name, share in (("easy", "100.0% right"), ("hard", "  0.0% right")):
        assert evaluate(files, "sources.yaml", *sets, "--source", name) == 0
        printed = capsys.readouterr().out
        assert f"{name}  {share}" in printed
        assert "1 questions" in printed
    assert evaluate(files, "sources.yaml", *sets, "--source", "medium") == 2
    assert "It has easy, hard." in capsys.readouterr().err


def test_the_best_and_the_worst_answer_to_each_question_are_a_pair(files, tmp_path, capsys):
    output, pairs = tmp_path / "found.json", tmp_path / "pairs.jsonl"
    how = ["--n", 6, "--seed", 3, "--max_tokens", 24]
    assert evaluate(files, *questions(files), *how, "--output", output, "--pairs", pairs) == 0
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    expected = []
    for row in json.loads(output.read_text())["answers"]:
        scores = [(completion["rewards"]["letters"], completion["text"]) for completion in row["completions"]]
        ended = [completion["finish_reason"] != "length" for completion in row["completions"]]
        best = max((score for (score, _), whole in zip(scores, ended, strict=True) if whole), default=-1)
        worst = min(score for score, _ in scores)
        if best > worst:
            chosen = next(
                text for (score, text), whole in zip(scores, ended, strict=True) if whole and score == best
            )
            texts = [chosen, next(text for score, text in scores if score == worst)]
            expected.append({"prompt": row["prompt"], "chosen": texts[0], "rejected": texts[1]})
            expected[-1] |= {"score_chosen": best, "score_rejected": worst}
    assert rows == expected != []
    assert f"{len(rows)} pairs; {8 - len(rows)} questions" in capsys.readouterr().out
    assert evaluate(files, *questions(files), "--pairs", pairs) == 2
    assert "--pairs needs several answers" in capsys.readouterr().err


def test_a_pair_of_messages_goes_on_with_what_the_assistant_had_begun():
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    answers = [
        {"text": text, "rewards": {"r": score}, "finish_reason": "stop"}
        for text, score in (("c", 0.0), ("d", None), ("e", 1.0))
    ]
    found = _pair_of({"prompt": chat, "columns": {}, "completions": answers})
    assert found["prompt"] == chat[:1]
    assert [found[name][0]["content"] for name in ("chosen", "rejected")] == ["be", "bc"]
    assert _pair_of({"prompt": "a", "columns": {}, "completions": answers[:2]}) is None


def test_an_answer_that_was_cut_off_is_not_chosen_and_tools_stay_beside_the_pair():
    answers = [
        {"text": text, "rewards": {"r": score}, "finish_reason": reason}
        for text, score, reason in (("a", 0.0, "length"), ("b", 0.5, "stop"), ("c", 1.0, "length"))
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    row = {"prompt": [{"role": "user", "content": "?"}], "columns": {"tools": tools, "target": 3}}
    found = _pair_of({**row, "completions": answers})
    assert [found[name][0]["content"] for name in ("chosen", "rejected")] == ["b", "a"]
    assert (found["tools"], found["score_chosen"]) == (tools, 0.5)
    assert "target" not in found
    assert _pair_of({**row, "completions": answers[::2]}) is None
