"""The package's rewards, a prompt whose columns serve all of them, and texts that policies may write."""

import inspect
import json
import random
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from vectorlm.rl.rewards import registry

COLUMNS = {
    "answer": "7",
    "numbers": [3, 4],
    "target": 7,
    "schema": {
        "$defs": {
            "tree": {
                "type": ["array", "number", "object"],
                "multipleOf": 0.5,
                "items": {"$ref": "#/$defs/tree"},
            }
        },
        "$ref": "#/$defs/tree",
    },
    "tests": ["assert f(3) == 7"],
    # This task's scorer evaluates its input as Python.
    "item": {
        "question": "?",
        "answer": "3 + 4",
        "metadata": {"source_dataset": "spiral_matrix", "solution": [7, 8], "matrix": [[7, 8]]},
    },
    "instruction_id_list": [
        "detectable_format:json_format",
        "language:response_language",
        "startend:quotation",
        "keywords:existence",
    ],
    "kwargs": [{}, {"language": "en"}, {}, {"keywords": ["boxed"]}],
}
ARGUMENTS = {"target_tokens": 10, "tags": ["answer"], "model": "j", "timeout_s": 2.0}
"""Values, by name, of parameters that are not columns."""


def spelled(name, **arguments):
    """Return a reward's name as in a config, with the arguments that it takes, from the caller and `ARGUMENTS`."""
    taken = inspect.signature(registry.get_reward(name)).parameters
    found = {key: value for key, value in (ARGUMENTS | arguments).items() if key in taken}
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in found.items())})" if found else name


class _Judge(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(asked["messages"][0]["content"])
        text = self.server.answers.pop(0) if self.server.answers else "7"
        body = json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "j", "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        ]}).encode()  # fmt: skip
        self.send_response(text if isinstance(text, int) else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@contextmanager
def judge_server():
    """Yield the server of a judge, with its `url` and the received questions in `asked`.

    It replies with the `answers` in order, then with 7; a number among the answers is an HTTP status.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Judge)
    server.asked, server.answers, server.url = [], [], f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


CALL = '<tool_call>{"name": "add", "arguments": %s}</tool_call>'
HOSTILE = [
    "",
    " \n\t",
    "\0",
    "half \ud800 a character, \udfff",
    "[" * 1100,
    "[" * 400 + "]" * 400,
    "{" * 3000,
    '{"a":' * 2000,
    "(" * 2000 + "7" + ")" * 2000,
    "1e999",
    "-1e999",
    "NaN",
    "7" * 4301,
    "0." + "7" * 5000,
    "```json\n" + "[" * 1100 + "\n```",
    "```json\n1e999\n```",
    "```" * 501,
    "```python\n" * 200,
    "\u0667",
    "\\boxed{\u0667}",
    "²",
    r"\boxed{" * 300,
    r"\boxed{" + "7" * 5000 + "}",
    r"\boxed{9^{9^{9}}}",
    r"\boxed{1000000!}",
    r"\boxed{" + r"\frac{1}{" * 60 + "2" + "}" * 61,
    r"\boxed{\frac{1}{0}}",
    r"$\int_0^1 e^{x^2\sin x}dx$",
    r"\left(\left[\right.\begin{matrix} 1 & \\end",
    "<answer>" * 500,
    "<answer>" + "(" * 300 + "</answer>",
    "<answer>" + "7" * 5000 + "</answer>",
    "<answer>7/0</answer>",
    "<answer>9**9**9**9</answer>",
    "<answer>exit()</answer>",
    "<answer>[[[[[[[</answer>",
    "<answer>[x for x in ().__class__.__bases__]</answer>",
    "<think>" * 300,
    CALL % "null",
    CALL % ("[" * 1100),
    CALL % ('{"a": ' + "1" * 4301 + "}"),
    CALL % '"\\ud800"',
    "a " * 20000,
]
FRAGMENTS = [
    *"[]{}()<>$\\^_\"'`:,;.-+*/=!0123456789 \n\t\0",
    "\ud83d",
    "é",
    "\u0663",
    "½",
    "∞",
    "x",
    "the ",
    "word ",
    "```",
    "```json\n",
    "```python\n",
    "<answer>",
    "</answer>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    r"\boxed{",
    r"\frac{",
    r"\sqrt[",
    r"\sum_{i=1}^{",
    r"\text{",
    r"\left(",
    r"\begin{pmatrix}",
    "1e999",
    "NaN",
    "null",
    "true",
    '{"a": ',
    '"\\u',
    "def f(x):\n    return ",
]


def written(seed, count):
    """Return `count` texts that a policy may write: first `HOSTILE`, then random ones."""
    dice = random.Random(seed)
    texts = ["".join(dice.choices(FRAGMENTS, k=dice.choice((1, 4, 12, 40)))) for _ in range(count)]
    return [*HOSTILE, *texts][:count]
