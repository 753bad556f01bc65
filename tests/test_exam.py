import json

import pytest
import torch
from rank_processes import on_ranks, save_tiny_llama
from tiny_runs import build_trainer
from transformers import AutoTokenizer

from vectorlm.data.questions import Question, check_lengths, read_questions
from vectorlm.errors import DatasetError, RewardError
from vectorlm.exam import Exam
from vectorlm.model.load import load_model
from vectorlm.ranks.topology import Topology
from vectorlm.sampling.hf_engine import HFEngine


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


FOUR_TOKENS = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, "skip_special_tokens": False}


def answering_engine(model_dir, topology=None):
    return HFEngine(model_dir, topology=topology or Topology(), sampling_params=FOUR_TOKENS)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_questions_are_listed_prompts_or_lines_with_other_columns_for_the_reward(tmp_path):
    assert read_questions(["a", "b"]) == [Question("a"), Question("b")]
    path = tmp_path / "eval.jsonl"
    path.write_text('{"prompt": "a", "target": 3}\n{"prompt": "b", "target": 4}\n')
    assert read_questions(str(path)) == [Question("a", {"target": 3}), Question("b", {"target": 4})]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"sampler.prompts='.*eval.jsonl' is not a file"),
        ("", r"eval.jsonl' is empty: it must hold at least one prompt"),
        (
            '{"prompt": "a"}\n{"question": "b"}\n',
            r"eval.jsonl:2 is '\{\"question\": \"b\"\}', but every line must be",
        ),
        ("[1]\n", r"eval.jsonl:1 is '\[1\]', but every line must be"),
        ("nonsense\n", r"eval.jsonl:1 is 'nonsense', but every line must be"),
    ],
)
def test_a_questions_file_that_cannot_be_read_is_named_with_line_and_rule(tmp_path, text, message):
    path = tmp_path / "eval.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DatasetError, match=message):
        read_questions(str(path))


def reward(text, *, first_letter):
    return 1.0 if text.startswith(first_letter) else 0.1


def test_an_exam_asks_with_the_models_weights_marks_first_answers_and_records_all(model_dir, tmp_path):
    model = load_model(model_dir)
    with torch.no_grad():
        # All logits are equal, so that greedy decoding takes token 0, the end token.
        model.lm_head.weight.zero_()
    said = []
    path = tmp_path / "deep" / "samples.jsonl"
    engine, reports = answering_engine(model_dir), []
    update = engine.update
    engine.update = lambda *args, **how: reports.append(update(*args, **how)) or reports[-1]
    questions = [Question("abc", {"first_letter": " <"}), Question("xyz", {"first_letter": "q"})]
    exam = Exam(engine, questions, samples_path=path, reward=reward, say=said.append)
    metrics = exam.hold(model, 40)
    assert metrics["eval/accuracy"] == 0.5
    (report,) = reports
    assert report.version == 40
    times = [metrics[f"weights/{what}_s"] for what in ("publish", "load", "update")]
    assert times == [report.publish_s, report.load_s, report.total_s]
    assert metrics["sampler/tokens_per_s"] * metrics["sampler/generate_s"] == pytest.approx(8)
    answer = " </s>" * 4
    assert said == [f"step 40: 1/2 right\n  right: abc{answer}\n  wrong: xyz{answer}"]
    assert lines(path) == [
        {
            "train_step": 40,
            "prompt": prompt,
            "options": [answer],
            "time_taken": metrics["sampler/generate_s"],
            "rewards": [mark],
        }
        for prompt, mark in (("abc", 1.0), ("xyz", 0.1))
    ]


def test_a_swap_that_was_skipped_reports_no_times_and_without_a_reward_nothing_is_marked(model_dir, tmp_path):
    model, said = load_model(model_dir), []
    exam = Exam(
        answering_engine(model_dir),
        [Question("abc")],
        samples_path=tmp_path / "samples.jsonl",
        say=said.append,
    )
    exam.hold(model, 1)
    assert set(exam.hold(model, 1)) == {"sampler/generate_s", "sampler/tokens_per_s"}
    assert said[0].startswith("step 1: 1 prompts sampled\n  abc")
    assert "rewards" not in lines(tmp_path / "samples.jsonl")[0]


def test_a_resumed_exam_keeps_the_lines_up_to_its_step_and_a_new_one_starts_the_file_anew(
    model_dir, tmp_path
):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"train_step": 2}\n{"train_step": 4}\n{"train_step": 6}\n{"train_st')
    Exam(answering_engine(model_dir), [Question("abc")], samples_path=path, resume_step=4)
    assert lines(path) == [{"train_step": 2}, {"train_step": 4}]
    Exam(answering_engine(model_dir), [Question("abc")], samples_path=path)
    assert lines(path) == []


def train_with_exams(topology, model_dir, path):
    exam = Exam(
        answering_engine(model_dir, topology),
        [Question("abc", {"first_letter": "d"})],
        samples_path=path if topology.is_main else None,
        reward=reward,
        say=lambda text: None,
    )
    trainer = build_trainer(
        topology, model_dir, exam=exam, exam_every=4, eval_every=100, strategy="SHARD_GRAD_OP"
    )
    trainer.run()
    return [line["step"] for line in trainer.sink if "eval/accuracy" in line]


def test_the_trainer_holds_exams_before_training_every_so_often_and_at_the_end(model_dir, tmp_path):
    path = tmp_path / "samples.jsonl"
    assert on_ranks(2, train_with_exams, model_dir, path) == [[0, 4, 6], [0, 4, 6]]
    assert [line["train_step"] for line in lines(path)] == [0, 4, 6]


@pytest.mark.parametrize(
    "reward",
    [
        "def reward(completion): return 1.0",
        "def reward(completions): return [1.0] * len(completions)",
        "async def reward(completion, wanted): return 1.0",
    ],
)
def test_rewards_of_all_forms_mark_answers(model_dir, tmp_path, reward):
    space = {}
    exec(reward, space)
    questions = [Question("a b", {"wanted": "c"}), Question("b", {"wanted": "d"})]
    exam = Exam(answering_engine(model_dir), questions, samples_path=None, reward=space["reward"])
    assert exam.hold(load_model(model_dir), 1)["eval/accuracy"] == 1.0


def test_a_reward_that_fails_is_named_with_its_prompt(model_dir):
    def reward(text, **columns):
        raise KeyError("gone")

    exam = Exam(answering_engine(model_dir), [Question("a b")], samples_path=None, reward=reward)
    with pytest.raises(RewardError, match=r"sampler.reward failed: KeyError: 'gone' \(prompt 'a b'"):
        exam.hold(load_model(model_dir), 1)


def test_blank_lines_and_separators_inside_a_text_are_no_lines(tmp_path):
    path = tmp_path / "questions.jsonl"
    texts = ["a\u2028b", "c\u0085d"]
    path.write_text("\n".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in texts))
    assert [question.prompt for question in read_questions(path)] == texts


def test_a_prompt_that_leaves_no_room_is_refused_whatever_its_form(model_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    fitting = [Question("a b"), Question([5, 6]), Question([{"role": "user", "content": "a b"}])]
    check_lengths(fitting, tokenizer, 20, "rl.prompts")
    for prompt in ("a b " * 12, [5] * 21, [{"role": "user", "content": "a b " * 12}]):
        with pytest.raises(
            DatasetError, match=r"prompt 3 of rl.prompts has \d+ tokens, more than the 20 that leave"
        ):
            check_lengths([*fitting, Question(prompt)], tokenizer, 20, "rl.prompts")
