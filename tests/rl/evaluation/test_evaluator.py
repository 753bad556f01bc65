from dataclasses import replace

import pytest
import torch
from kit.batches import rollout_of
from kit.rank_processes import on_ranks
from kit.sft_runs import lines
from kit.tiny_runs import build_loop

from vectorlm.data.prompts import read_prompts
from vectorlm.errors import DatasetError, RewardError
from vectorlm.ranks.topology import Topology
from vectorlm.rl.evaluation.evaluator import Evaluator, seeded
from vectorlm.rl.rewards.function import RewardFunction, score_answers
from vectorlm.sampling.inline_engines import HFEngine
from vectorlm.train.handover import DeviceTurn
from vectorlm.train.load import load_model
from vectorlm.types import PromptRecord, RewardResult

FOUR_TOKENS = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, "skip_special_tokens": False}


def turn_of(folder, model, topology=None, engine=None):
    topology = topology or Topology()
    engine = engine or HFEngine(folder, topology=topology, sampling_params=FOUR_TOKENS)
    return DeviceTurn(engine, model=model, topology=topology)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "evaluation.prompts"),
        ("", "eval.jsonl"),
        ('{"prompt": "a"}\n{"question": "b"}\n', "eval.jsonl:2"),
        ("[1]\n", "eval.jsonl:1"),
        ("nonsense\n", "eval.jsonl:1"),
        ('{"prompt": []}\n', "eval.jsonl:1"),
        ('{"prompt": [{"role": "user", "content": null}]}\n', "eval.jsonl:1"),
    ],
)
def test_a_questions_file_that_cannot_be_read_is_named_with_line_and_rule(tmp_path, text, message):
    path = tmp_path / "eval.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DatasetError, match=message):
        read_prompts(str(path))


def test_a_file_in_a_list_of_prompts_is_refused(tmp_path):
    path = tmp_path / "eval.jsonl"
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(DatasetError, match=r"rl\.prompts.*eval\.jsonl"):
        read_prompts([str(path), "b"], "rl.prompts")


def reward(text, *, first_letter):
    return 1.0 if text.startswith(first_letter) else 0.1


def test_an_evaluation_samples_with_the_models_weights_scores_first_answers_and_records_all(folder, tmp_path):
    model = load_model(folder)
    with torch.no_grad():
        # With equal logits, greedy decoding takes token 0, the end token.
        model.lm_head.weight.zero_()
    said = []
    path = tmp_path / "deep" / "samples.jsonl"
    turn, reports = turn_of(folder, model), []
    engine = turn.engine
    update = engine.update
    engine.update = lambda *args, **how: reports.append(update(*args, **how)) or reports[-1]
    prompt_records = [PromptRecord("abc", {"first_letter": " <"}), PromptRecord("xyz", {"first_letter": "q"})]
    evaluator = Evaluator(
        turn, prompt_records, samples_path=path, of_source={"": RewardFunction(reward)}, say=said.append
    )
    metrics = evaluator.evaluate(40)
    assert (metrics["eval/accuracy"], metrics["eval/reward"]) == (0.5, pytest.approx(0.55))
    (report,) = reports
    assert report.version == 40
    times = [metrics[f"weights/{what}_s"] for what in ("publish", "load", "update")]
    assert times == [report.publish_s, report.load_s, report.total_s]
    assert metrics["sampler/tokens_per_s"] * metrics["sampler/generate_s"] == pytest.approx(8)
    answer = " </s>" * 4
    assert said == [
        f"step 40: 1/2 right, mean reward 0.55\n  right: 'abc' → {answer!r}\n  reward 0.1: 'xyz' → {answer!r}"
    ]
    assert lines(path) == [
        {
            "train_step": 40,
            "prompt": prompt,
            "options": [answer],
            "finish_reasons": ["length"],
            "time_taken": metrics["sampler/generate_s"],
            "rewards": [mark],
        }
        for prompt, mark in (("abc", 1.0), ("xyz", 0.1))
    ]


def test_answers_that_the_context_cuts_off_before_max_tokens_are_counted(folder, tmp_path):
    model = load_model(folder)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    said, path = [], tmp_path / "samples.jsonl"
    turn = turn_of(folder, model)
    for max_tokens in (4, 5):
        evaluator = Evaluator(
            turn, [PromptRecord("abc")], samples_path=path, max_tokens=max_tokens, say=said.append
        )
        evaluator.evaluate(1)
        assert [line["finish_reasons"] for line in lines(path)] == [["length"]]
    assert ["1 answers reached the engine's max_model_len" in text for text in said] == [False, True]


def test_seeded_answers_do_not_depend_on_what_the_engine_sampled_before(folder, tmp_path):
    params = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True}
    records, found = [PromptRecord(prompt) for prompt in ("abc", "abc", "xyz")], []
    for num_before in (0, 1):
        engine = HFEngine(folder, topology=Topology(), sampling_params=params)
        turn = turn_of(folder, load_model(folder), engine=engine)
        path = tmp_path / f"{num_before}.jsonl"
        evaluator = Evaluator(turn, records, samples_path=path, sampling_params=seeded(params, 7, 3))
        for step in range(num_before + 1):
            evaluator.evaluate(step)
        found.append([line["options"] for line in lines(path)])
    assert found[1] == 2 * found[0]
    assert found[0][0] != found[0][1], "prompts share a seed"
    assert seeded({"temperature": 0}, 7, 3) is seeded({"seed": 1}, 7, 3) is None


def test_a_threshold_decides_what_is_right_and_weights_what_the_reward_is(folder, tmp_path):
    given, said = {"a": 0.7, "b": 0.69, "c": 1.0, "d": 0.9}, []
    acc = {"d": 0}

    def judge(prompt, completion, log):
        if prompt in acc:
            log("acc", acc[prompt])
        return given[prompt]

    evaluator = Evaluator(
        turn_of(folder, load_model(folder)),
        [PromptRecord(prompt) for prompt in "abcd"],
        samples_path=tmp_path / "samples.jsonl",
        of_source={"": RewardFunction(judge, right_from=0.7)},
        weights={"judge": 2.0, "size": 1.0},
        further={"size": RewardFunction(lambda text, prompt: None if prompt == "d" else 0.25)},
        say=said.append,
    )
    metrics = evaluator.evaluate(1)
    # A logged `acc` alone decides which answers are right.
    assert metrics["eval/accuracy"] == 0.5
    # The sum ignores a reward of None.
    assert metrics["eval/reward"] == pytest.approx(2 * sum(given.values()) / 4 + 0.25 * 3 / 4)
    assert (metrics["eval/accuracy/size"], metrics["eval/reward/size"]) == (0.0, 0.25)
    assert said[0].startswith("step 1: 2/4 right")
    assert [line["rewards"] for line in lines(tmp_path / "samples.jsonl")] == [
        [value] for value in given.values()
    ]


def test_further_rewards_and_what_most_answers_say_are_logged(folder, tmp_path):
    given, letters = iter([1.0, 0.0, 0.0, 1.0]), iter("abba")

    def voting(text, log):
        log("answer", next(letters))
        return next(given)

    engine = HFEngine(folder, sampling_params={"n": 4, "max_tokens": 2})
    evaluator = Evaluator(
        turn_of(folder, load_model(folder), engine=engine),
        [PromptRecord("abc")],
        samples_path=tmp_path / "samples.jsonl",
        of_source={"": RewardFunction(voting)},
        further={"size": RewardFunction(lambda text: 0.25)},
        at_k=(1, 3),
    )
    metrics = evaluator.evaluate(1)
    # Among any three of the four answers, two equal answers win the vote.
    assert {name: value for name, value in metrics.items() if name.startswith("eval/")} == {
        "eval/accuracy": 0.5,
        "eval/reward": 0.5,
        "eval/accuracy/size": 0.0,
        "eval/reward/size": 0.25,
        "eval/pass_at_1": 0.5,
        "eval/pass_at_3": 1.0,
        "eval/maj_at_1": 0.5,
        "eval/maj_at_3": 0.5,
    }
    assert lines(tmp_path / "samples.jsonl")[0]["further_rewards"] == {"size": [0.25] * 4}


def test_sources_are_counted_apart_and_a_graded_answer_is_neither_right_nor_wrong(folder, tmp_path):
    said = []
    evaluator = Evaluator(
        turn_of(folder, load_model(folder)),
        [PromptRecord("abc", source="sums"), PromptRecord("xyz", source="lines")],
        samples_path=tmp_path / "samples.jsonl",
        of_source={"sums": RewardFunction(lambda text: 1.0), "lines": RewardFunction(lambda text: 0.25)},
        say=said.append,
    )
    assert evaluator.evaluate(1)["eval/reward"] == 0.625
    head, first, second = said[0].split("\n")[:3]
    assert head == "step 1: lines: 0/1 right, mean reward 0.25; sums: 1/1 right"
    assert first.startswith("  right: 'abc'")
    assert second.startswith("  reward 0.25: 'xyz'")


def test_a_reward_is_shown_the_chat_of_an_evaluation():
    chat = [{"role": "user", "content": "2 + 2?"}]
    reward = RewardFunction(
        lambda text, messages: float(messages == [*chat, {"role": "assistant", "content": text}])
    )
    assert score_answers(reward, [[rollout_of(chat, "4")]], "evaluation.rewards") == [[RewardResult(1.0)]]


def test_an_environment_says_by_its_metric_acc_or_by_a_sum_of_one_what_is_right():
    def played(*rewards, **measured):
        return rollout_of("q", turn_rewards=rewards, measured=measured)

    answers = [played(*[0.1] * 10), played(0.5), played(0.5, acc=1.0), played(1.0, acc=0.0), played(1.25)]
    (results,) = score_answers(None, [answers], "")
    assert [result.is_right for result in results] == [True, False, True, False, False]
    assert [result.reward for result in results] == [1.0, 0.5, 0.5, 1.0, 1.25]


def evaluate_on_rank(topology, folder, error=None):
    """Evaluate with a reward that scores nothing, or fails, on rank 1; return its calls and the metrics."""
    calls = []

    def scores_on_rank_0(text, prompt):
        calls.append(prompt)
        if topology.rank and error is not None:
            raise error
        return None if topology.rank else 1.0

    answers = HFEngine(folder, topology=topology, sampling_params={**FOUR_TOKENS, "temperature": 1, "n": 2})
    evaluator = Evaluator(
        turn_of(folder, load_model(folder), topology, answers),
        [PromptRecord(prompt) for prompt in "abc"],
        samples_path=None,
        of_source={"": RewardFunction(scores_on_rank_0, stops_at_error=True)},
        topology=topology,
    )
    try:
        metrics = evaluator.evaluate(1)
    except RewardError as found:
        return str(found)
    return calls, {name: value for name, value in metrics.items() if name.startswith("eval/")}


@pytest.mark.slow
def test_ranks_share_the_calls_of_rewards_and_have_the_same_metrics(folder):
    (calls, metrics), (others, same) = on_ranks(2, evaluate_on_rank, folder)
    assert (calls, others) == (["a"] * 2, ["b"] * 2 + ["c"] * 2)
    # A rank without the followed metric would not join the others, which broadcast it.
    assert metrics == same
    assert metrics["eval/pass_at_2"] == 1
    errors = on_ranks(2, evaluate_on_rank, folder, ValueError("no such answer"))
    assert errors[0] == errors[1]
    assert "held-out reward failed" in errors[0]


def test_a_swap_that_was_skipped_reports_no_times_and_without_a_reward_nothing_is_scored(folder, tmp_path):
    model, said = load_model(folder), []
    evaluator = Evaluator(
        turn_of(folder, model),
        [PromptRecord("abc")],
        samples_path=tmp_path / "samples.jsonl",
        say=said.append,
    )
    evaluator.evaluate(1)
    assert set(evaluator.evaluate(1)) == {"sampler/generate_s", "sampler/tokens_per_s"}
    assert said[0].startswith("step 1: 1 prompts sampled\n  'abc' → '")
    assert "rewards" not in lines(tmp_path / "samples.jsonl")[0]


def test_a_resumed_evaluation_keeps_the_lines_up_to_its_step_and_a_new_one_starts_an_empty_file(
    folder, tmp_path
):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"train_step": 2}\n{"train_step": 4}\n{"train_step": 6}\n{"train_st')
    turn = turn_of(folder, load_model(folder))
    Evaluator(turn, [PromptRecord("abc")], samples_path=path, resume_step=4)
    assert lines(path) == [{"train_step": 2}, {"train_step": 4}]
    Evaluator(turn, [PromptRecord("abc")], samples_path=path)
    assert lines(path) == []


def train_with_evaluations(topology, folder, path):
    training = build_loop(topology, folder, logging_steps=100, strategy="SHARD_GRAD_OP")
    evaluation = Evaluator(
        turn_of(folder, training.optimizer_step.model, topology),
        [PromptRecord("abc", {"first_letter": "d"})],
        samples_path=path if topology.is_main else None,
        of_source={"": RewardFunction(reward)},
        say=lambda text: None,
    )
    training.recorder = replace(training.recorder, evaluation=evaluation, evaluate_every=4)
    training.run()
    return [line["step"] for line in training.recorder.sink if "eval/accuracy" in line]


def test_the_loop_evaluates_before_training_every_n_steps_and_at_the_end(folder, tmp_path):
    path = tmp_path / "samples.jsonl"
    assert on_ranks(2, train_with_evaluations, folder, path) == [[0, 4, 6], [0, 4, 6]]
    assert [line["train_step"] for line in lines(path)] == [0, 4, 6]


def test_a_reward_that_fails_is_named_with_its_prompt(folder):
    def reward(text, **columns):
        raise KeyError("gone")

    turn = turn_of(folder, load_model(folder))
    fails = RewardFunction(reward, stops_at_error=True)
    evaluator = Evaluator(turn, [PromptRecord("a b")], samples_path=None, of_source={"": fails})
    with pytest.raises(RewardError, match=r"held-out reward.*'gone'.*'a b'"):
        evaluator.evaluate(1)


def test_an_answer_whose_reward_fails_is_left_out_if_the_settings_skip_errors(folder, tmp_path):
    def reward(text, prompt):
        return 0.5 if prompt == "xyz" else 1 / 0

    said = []
    evaluator = Evaluator(
        turn_of(folder, load_model(folder)),
        [PromptRecord("abc"), PromptRecord("xyz")],
        samples_path=tmp_path / "samples.jsonl",
        of_source={"": RewardFunction(lambda text: 1.0)},
        weights={"one": 1.0, "some": 1.0},
        further={"some": RewardFunction(reward)},
        say=said.append,
    )
    metrics = evaluator.evaluate(1)
    # As in training, a completion with a failed reward has no sum.
    assert (metrics["eval/reward"], metrics["eval/reward/some"], metrics["eval/errors"]) == (1.5, 0.5, 1)
    assert "  failed calls of reward functions: 1; the first: ZeroDivisionError" in said[1]
