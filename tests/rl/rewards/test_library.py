"""The built-in rewards, compared with the library that they use or with values worked by hand."""

import asyncio
import json
import pickle
import textwrap
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import openai
import pytest
from kit.every_reward import judge_server

from vectorlm.errors import ConfigError
from vectorlm.rl.rewards import code, judge, mathematics, registry, shape


@pytest.mark.parametrize(
    ("name", "short", "reward"),
    [
        ("format(tags=['a'])", "format", 1.0),
        ("format(pattern='<a>.*</a>')", "format", 1.0),
        ("format(pattern='b:c/d')", "format", 0.0),
        ("{file}:near(scale=2)", "near", 0.5),
        ("{file}:near", "near", 1.0),
    ],
)
def test_arguments_may_follow_a_name(tmp_path, name, short, reward):
    file = tmp_path / "mine (1).py"
    file.write_text("def near(completion, scale=1):\n    return 1 / scale\n")
    name = name.replace("{file}", str(file))
    assert registry.short_name(name) == short
    assert registry.get_reward(name)("<a>x</a>") == reward


WRONG = ["(tag=['a'])", "(['a'])", "(tags=a)", "(tags=", "(**{})"]


@pytest.mark.parametrize("name", [*(f"format{arguments}" for arguments in WRONG), "fromat(tags=['a'])"])
def test_arguments_that_a_reward_does_not_take_are_refused(name):
    with pytest.raises(ConfigError):
        registry.get_reward(name)


@pytest.mark.parametrize("name", registry.reward_names())
def test_every_reward_can_be_imported_and_sent_to_a_worker(name):
    assert pickle.loads(pickle.dumps(registry.get_reward(name))) is registry.get_reward(name)


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        (72, "so it is 72", 1.0),
        ("1,000", "1000", 1.0),
        (r"\frac{1}{2}", r"The answer is \boxed{0.5}.", 1.0),
        ("$x+1$", "$1 + x$", 1.0),
        ("x+1", "$1 + x$", 1.0),
        ("(1, 2)", "$(1,2)$", 1.0),
        (3, "3 apples or 4", 0.0),
        (3, "", 0.0),
        ("", "3", None),
        # Numbers and nulls of Parquet columns.
        (0.00001, r"\boxed{10^{-5}}", 1.0),
        (1e20, r"\boxed{10^{20}}", 1.0),
        (5.0, "5", 1.0),
        (None, r"\boxed{None}", None),
        (float("nan"), "nan", None),
    ],
)
def test_mathematics_compares_formulas_and_cannot_score_without_one(answer, completion, reward):
    if completion == "3 apples or 4":
        from math_verify import parse, verify

        # math-verify decides this case.
        reward = float(verify(parse("$3$"), parse(completion)))
    assert mathematics.math(completion, answer) == reward


def test_mathematics_leaves_no_alarm_behind():
    import signal

    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    mathematics.math("2", "2")
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)) == before


@pytest.mark.parametrize(
    "completion", [r"\boxed{9^{9^{9}}}", r"\boxed{(x+1)^{5000}}", "[" * 1100, "9" * 5000]
)
def test_a_formula_that_takes_for_ever_is_wrong_and_the_next_is_compared_all_the_same(
    monkeypatch, completion
):
    monkeypatch.setattr(code, "CPU_S", 1.0)
    assert mathematics.math(completion, "4") == 0.0
    assert mathematics.math("4", "4") == 1.0


def test_what_ends_closes_or_prints_in_a_process_with_limits_changes_no_other_answer():
    def ask(expression):
        return code.limited("json", "builtins:eval", expression)

    assert ask("3 + 4") == 7
    for ends in (
        "__import__('os')._exit(0)",
        "__import__('os').kill(__import__('os').getpid(), 9)",
        "bytes(1 << 34)",
    ):
        with pytest.raises((code.OverLimit, RuntimeError)):
            ask(ends)
        assert ask("3 + 4") == 7
    with pytest.raises(RuntimeError, match="SystemExit"):
        ask("exit()")
    assert ask("print(5) or 6") == 6
    with pytest.raises(RuntimeError, match="ModuleNotFoundError"):
        code.limited("nothing_such", "builtins:eval", "7")


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (r"\boxed{\frac{1}{2}}", 1.0),
        (r"\boxed{1} no, \boxed{ \frac{1}{2} }", 1.0),
        (r"\boxed{\frac{1}{2}", 0.0),
        (r"\boxed{1}", 0.0),
        (r"\frac{1}{2}", 0.0),
    ],
)
def test_a_box_is_read_to_its_own_brace(completion, reward):
    assert mathematics.boxed(completion, r"\frac{1}{2}") == reward


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        (5.0, r"\boxed{5}", 1.0),
        (5.0, r"\boxed{5.0}", 1.0),
        (0.00001, r"\boxed{0.00001}", 1.0),
        (None, r"\boxed{None}", None),
    ],
)
def test_a_box_may_hold_a_number_of_a_column(answer, completion, reward):
    assert mathematics.boxed(completion, answer) == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>a\nb</think> <answer>1</answer>", 1.0),
        ("<answer>1</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>1</answer><answer>2</answer>", 0.0),
        ("<think>a<answer>1</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_tags_stand_once_and_in_order(completion, reward):
    assert shape.format(completion, tags=["think", "answer"]) == reward


def test_a_pattern_is_for_the_whole_text():
    assert shape.format(" a\nb ", pattern="a.b") == 1.0
    assert shape.format("xa\nb", pattern="a.b") == 0.0
    with pytest.raises(ValueError, match="pattern or tags"):
        shape.format("a")


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ('{"age": 3}', 1.0),
        ('Here:\n```json\n{"age": 3}\n```', 1.0),
        ('By ```python\nmake()\n``` it is\n```JSON\n{"age": 3}\n```', 1.0),
        ('{"age": "3"}', 0.0),
        ("{}", 0.0),
        ("age: 3", 0.0),
        ("[" * 1100, 0.0),
        ('{"age": ' + "1" * 4301 + "}", 0.0),
    ],
)
def test_json_fits_its_schema(completion, reward):
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    assert shape.json_schema(completion, schema) == reward
    assert shape.json_schema(completion, json.dumps(schema)) == reward


def test_json_that_python_cannot_compare_does_not_fit_and_a_schema_at_fault_is_an_error():
    tree = {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}
    assert shape.json_schema("[[]]", tree) == 1.0
    assert shape.json_schema("[" * 400 + "]" * 400, tree) == 0.0
    assert shape.json_schema("1e999", {"multipleOf": 0.1}) == 0.0
    for schema in ({"$ref": "#/$defs/b"}, {"type": "strin"}, {"pattern": "("}):
        with pytest.raises(Exception, match=r"\$defs|strin|unterminated"):
            shape.json_schema('"a"', schema)


def test_length_falls_off_beside_the_target():
    lengths = [0, 5, 8, 10, 12, 15, 30]
    found = [shape.length([1] * length, target_tokens=10, tolerance_tokens=2) for length in lengths]
    assert found == pytest.approx([0.2, 0.7, 1.0, 1.0, 1.0, 0.7, 0.0])


def test_repetition_is_the_share_of_repeated_n_grams():
    assert shape.repetition("a b c d") == 0.0
    assert shape.repetition("a b") == 0.0
    # The n-grams are abc bca cab abc: one of four is a repetition.
    assert shape.repetition("a b c a b c", penalty=2.0) == pytest.approx(-0.5)


CODE = "Sure:\n```python\ndef double(x):\n    return 2 * x\n```"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (CODE, 1.0),
        ("def double(x):\n    return 2 * x", 1.0),
        ("def double(x):\n    return 4", 0.5),
        ("def double(x:", 0.0),
        ("import os\nos._exit(0)", 0.0),
        ("import os\nos._exit(97)", 0.0),
        ("import sys\nsys.exit(0)", 0.0),
        ("double = lambda x: exit(0)", 0.0),
        ("import sys\ndef double(x):\n    return 2 * x\nsys.exit(0)", 1.0),
        ("import os\nos._exit(1)", 0.0),
        ("while True: pass", 0.0),
        ("x = 'a' * 10**10", 0.0),
        ("open('big', 'wb').write(b'x' * (1 << 22))", 0.0),
        ("import socket\nsocket.create_connection(('127.0.0.1', 9), 1)", 0.0),
        ("import signal\nsignal.alarm(1)\nraise SystemExit(3)", 0.0),
    ],
)
def test_code_runs_within_its_limits(completion, reward):
    tests = ["assert double(2) == 4", "assert double(3) == 6"]
    assert code.code(completion, tests, timeout_s=1.0) == reward


def test_a_loop_without_end_costs_the_time_of_one_test(monkeypatch):
    started, of_library = [], code.subprocess.Popen
    monkeypatch.setattr(
        code.subprocess, "Popen", lambda *a, **how: started.append(a) or of_library(*a, **how)
    )
    assert code.code("while True: pass", ["1"] * 40, timeout_s=0.5) == 0.0
    assert len(started) == 1


def test_slow_tests_fail_before_the_limit_of_the_reward():
    logged = {}
    tests = ["import time; time.sleep(0.5)"] * 8
    reward = code.code("", tests, total_timeout_s=1.4, log=logged.__setitem__)
    assert 0.0 < reward < 1.0
    assert "of all tests" in logged["failure"]


def is_running(pid):
    """Return whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("end", ["", "raise ValueError", "import os\nos._exit(0)", "while True: pass"])
def test_processes_that_the_code_started_end_with_it(tmp_path, end):
    started = tmp_path / "pids"
    source = (
        f"import os, subprocess\nfirst = subprocess.Popen(['sleep', '99999']).pid\n"
        f"second = os.fork()\nif not second:\n    import time\n    time.sleep(99999)\n"
        f"open({str(started)!r}, 'w').write(f'{{first}} {{second}}')\n{end}"
    )
    assert code.code(source, ["1"], timeout_s=3.0) == float(not end)
    pids = list(map(int, started.read_text().split()))
    assert len(pids) == 2
    deadline_s = time.monotonic() + 5
    while any(map(is_running, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not any(map(is_running, pids))


RIGHT, SHELL, DATA = (
    CODE.removeprefix("Sure:\n"),
    "```bash\npip install it\n```\n",
    '```json\n{"double": 4}\n```\n',
)


def test_code_may_reserve_memory_that_it_does_not_use_and_says_why_it_fails():
    """NumPy, SciPy and torch reserve address space, and memory for every thread."""
    logged = {}
    reserves = "import mmap, os\nx = mmap.mmap(-1, 1 << 34, mmap.MAP_PRIVATE, mmap.PROT_READ)\n"
    one_thread = 'assert os.environ["OMP_NUM_THREADS"] == "1"'
    assert code.code(reserves, [one_thread], memory_mib=128, log=logged.__setitem__) == 1.0
    assert logged == {}
    for source, why in (
        ("x = bytearray(1 << 28)", "MemoryError"),
        ("def f(", "SyntaxError"),
        ("import nothing_such", "ModuleNotFoundError: No module named 'nothing_such'"),
        ("while True: pass", "no end within 1 s"),
        ("import os\nos._exit(0)", "exit code 0"),
        ("import os\nos.kill(os.getpid(), 9)", "SIGKILL"),
    ):
        assert code.code(source, ["1"], memory_mib=128, timeout_s=1.0, log=logged.__setitem__) == 0.0
        assert why in logged["failure"]


@pytest.mark.parametrize(
    "completion",
    [
        f"First:\n{SHELL}then\n{RIGHT}",
        f"{RIGHT}\nRun it:\n{SHELL}It gives:\n{DATA}",
        f"{RIGHT}\nIt prints:\n```\n4\n6\n```",
        f"```python\nwrong\n```\nNo:\n{RIGHT}",
        f"With ```double``` as asked:\n{RIGHT}",
        f"1. Here:\n\n{textwrap.indent(RIGHT, '   ')}",
        *(
            RIGHT.replace("python", tag)
            for tag in ("", "py", "python3", "Python", "PYTHON", "python title='a.py'")
        ),
    ],
)
def test_the_code_is_the_last_fence_of_python(completion):
    assert code.code(completion, ["assert double(2) == 4"]) == 1.0


@pytest.mark.parametrize(
    ("tests", "reward"),
    [
        ("assert double(2) == 4\nassert double(3) == 6", 1.0),
        ("assert double(2) == 4\nassert double(3) == 5", 0.0),
        ('["assert double(2) == 4", "assert double(3) == 5"]', 0.5),
        ("", None),
        ("[]", None),
        ([], None),
        (None, None),
    ],
)
def test_a_text_is_one_test_and_without_tests_code_cannot_be_scored(tests, reward):
    assert code.code(CODE, tests) == reward


@pytest.mark.parametrize(
    "tests", [[{"input": "2", "output": "5"}], '[{"input": "2", "output": "5"}]', ["", 1]]
)
def test_what_is_no_test_of_python_is_refused(tests):
    """Evaluated as an expression, it would always pass."""
    with pytest.raises(TypeError):
        code.code(CODE, tests)


def test_code_reaches_no_server_unless_it_may():
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    try:
        reach = f"import socket\nsocket.create_connection(('127.0.0.1', {server.server_port}), 2)"
        assert code.code(reach, [""], allow_network=True) == 1.0
        assert code.code(reach, [""]) == 0.0
    finally:
        server.server_close()


def test_instructions_are_checked_as_the_harness_checks_them():
    ids = ["punctuation:no_comma", "length_constraints:number_words"]
    arguments = [{}, {"num_words": 3, "relation": "at least", "other": None}]
    assert shape.ifeval("hello there you", ids, arguments) == 1.0
    assert shape.ifeval("hello, you there", ids, arguments) == 0.5
    assert shape.ifeval("", ids, arguments) == 0.0
    repeat = [{"prompt_to_repeat": "Say hi"}]
    assert shape.ifeval("Say hi: hi", ["combination:repeat_prompt"], repeat) == 1.0
    assert shape.ifeval("hello", [], []) is None
    assert shape.ifeval("[" * 1100, ["detectable_format:json_format"], [{}]) == 0.0
    with pytest.raises(KeyError):
        shape.ifeval("hello", ["no_such:instruction"], [{}])


@pytest.fixture
def ask():
    """Yield a function that asks a judge with given answers or statuses; `ask.server.asked` has the questions."""
    with judge_server() as server:

        def ask(*answers, retries=1, prompt="{completion}?", port=server.server_port, **more):
            server.answers[:] = answers
            url = f"http://127.0.0.1:{port}/v1"
            return asyncio.run(judge.judge("{answer}", prompt, url=url, model="j", retries=retries, **more))

        ask.server = server
        yield ask


def test_a_judge_is_asked_again_after_an_error_and_gives_none_where_it_gives_no_number(ask):
    assert ask("Score: 7.5") == pytest.approx(0.75)
    assert ask.server.asked[0].endswith("Question:\n{completion}?\n\nAnswer:\n{answer}")
    assert ask(500, "10") == 1.0
    assert ask("very good") is None


def test_the_run_s_own_judge_is_reached_without_a_proxy(ask, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    ask.server.answers[:] = ["Score: 5"]
    own = judge.OwnJudge({"retries": 0}, "base", f"http://127.0.0.1:{ask.server.server_port}/v1", "key", True)
    assert asyncio.run(own("{answer}", "?")) == 0.5


def test_a_judge_that_is_busy_or_not_reached_gives_none(ask):
    assert [ask(status, retries=0) for status in (429, 500, 503)] == [None] * 3
    assert ask(retries=0, port=9) is None


def test_a_request_that_a_judge_will_never_answer_fails(ask):
    for status in (400, 401, 403, 404, 422):
        with pytest.raises(openai.APIStatusError):
            ask(status, status)


def test_a_completion_that_alone_is_refused_cannot_be_scored(ask):
    """The completion may be too long for the judge, or break its rules."""
    assert ask(400, "5") is None
    assert len(ask.server.asked) == 2
    assert "{answer}" in ask.server.asked[0]
    assert "{answer}" not in ask.server.asked[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("7", 0.7),
        ("0", 0.0),
        ("10/10", 1.0),
        ("I give it 8 out of 10.", 0.8),
        ("It has 3 mistakes, so 8", 0.8),
        ("The answer has 3 mistakes. Score: 8", 0.8),
        ("**Score:** 8/10. It has 3 mistakes.", 0.8),
        ('{"score": 8, "mistakes": 3}', 0.8),
        ("<score>8</score> 3 mistakes", 0.8),
        ("The score is 8, for 3 mistakes", 0.8),
        ("Score (0-10): 8", 0.8),
        ("Score: 2? No. Score: 8", 0.8),
        ("<think>Point 1: fine. Score: 3</think>\n9", 0.9),
        ("Point 1: fine.</think>9", 0.9),
        ("<think>Point 1: fine. It is 9", None),
        ("85", None),
        ("1000000", None),
        ("-3", None),
        ("Score: -3", None),
        ("1" * 5000, None),
        ("", None),
    ],
)
def test_a_judges_score_is_its_last_one_outside_its_thoughts_and_on_the_scale(ask, answer, reward):
    assert ask(answer) == (None if reward is None else pytest.approx(reward))


def test_a_pattern_finds_the_score_and_a_word_is_none(ask):
    assert ask("[[4]] of 5, 2 mistakes", pattern=r"\[\[(.*?)\]\]", scale=5) == pytest.approx(0.8)
    assert ask("[[good]]", pattern=r"\[\[(.*?)\]\]") is None


ASKED = {"role": "user", "content": "2 + 2?"}


@pytest.mark.parametrize(
    ("prompt", "asked", "answer"),
    [
        ([ASKED], "2 + 2?", "{answer}"),
        ([ASKED, {"role": "assistant", "content": "<think>\n"}], "2 + 2?", "<think>\n{answer}"),
        (
            [{"role": "system", "content": "Be brief."}, ASKED, {"role": "assistant", "content": "4"}, ASKED],
            "system: Be brief.\nuser: 2 + 2?\nassistant: 4\nuser: 2 + 2?",
            "{answer}",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}], "2 + 2?", "{answer}"),
    ],
)
def test_a_judge_is_shown_the_whole_question(ask, prompt, asked, answer):
    ask("1", prompt=prompt)
    assert ask.server.asked[0].endswith(f"Question:\n{asked}\n\nAnswer:\n{answer}")


def test_a_judge_cannot_be_shown_token_ids(ask):
    with pytest.raises(TypeError):
        ask("1", prompt=[1, 2, 3])
