"""Files and messages with random bytes: each is read as it is or refused with a named error."""

import asyncio
import contextlib
import json
from pathlib import Path

import msgspec
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from kit.rank_processes import on_ranks
from kit.tiny_runs import rows

from vectorlm.data.loader import load_dataset
from vectorlm.data.prompts import read_prompts
from vectorlm.errors import CheckpointError, ConfigError, DatasetError, EngineError
from vectorlm.rl.rollouts.replay import read_rollouts
from vectorlm.runs.config.load import load_config
from vectorlm.sampling.backends.server.serve import TOKEN_VARIABLE, Guard
from vectorlm.sampling.weights.wire import CALLS, arguments_from_wire, to_wire
from vectorlm.train.checkpoint.folder import newest
from vectorlm.train.checkpoint.state import CheckpointStore
from vectorlm.types import TrainedModel

# Other seeds find other faults. CI excludes this test, because CI shows whether a change broke something.
pytestmark = pytest.mark.long
EDITS = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 6), st.binary(max_size=6)), max_size=3
)
"""A position in a file, the number of bytes to remove there, and the bytes to insert."""
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
PROMPTS = b"""{"prompt": "abc", "wanted": [1, 2.5]}
{"prompt": [1, 2, 3]}
{"prompt": [{"role": "user", "content": "a"}]}
"""
ROLLOUT = {
    "prompt": "ab",
    "completion": "cd",
    "train_step": 1,
    "group": 0,
    "columns": {},
    "prompt_token_ids": [2, 3],
    "token_ids": [4, 5],
    "policy_mask": [1, 1],
    "sampler_logprobs": [-0.5, -0.25],
    "versions": [0, 0],
    "finish_reason": "stop",
    "num_turns": 1,
}


def edited(content, edits):
    for place, gone, instead in edits:
        first = int(place * (len(content) + 1))
        content = content[:first] + instead + content[first + gone :]
    return content


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("bytes")


def is_prompt(prompt):
    texts = isinstance(prompt, str)
    tokens = isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt)
    return (
        texts or tokens or (isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt))
    )


@given(edits=EDITS)
def test_prompts(scratch, edits):
    path = scratch / "prompts.jsonl"
    path.write_bytes(edited(PROMPTS, edits))
    with contextlib.suppress(DatasetError):
        assert all(is_prompt(record.prompt) for record in read_prompts(path))


@given(edits=EDITS)
def test_rollouts(scratch, edits):
    path = scratch / "rollouts.jsonl"
    path.write_bytes(edited(json.dumps(ROLLOUT).encode() + b"\n", edits))
    with contextlib.suppress(DatasetError):
        for group in read_rollouts(path):
            for rollout in group:
                assert len(rollout.token_ids) == len(rollout.sampler_logprobs) == len(rollout.policy_mask)


@given(edits=EDITS)
def test_configs(scratch, edits):
    path = scratch / "my.yaml"
    path.write_bytes(
        edited(Path(__file__).parents[2].joinpath("configs/countdown_grpo.yaml").read_bytes(), edits)
    )
    with contextlib.suppress(ConfigError):
        load_config(path)


@pytest.fixture(scope="module")
def dataset(scratch):
    Dataset.from_list(rows(9)).save_to_disk(scratch / "dataset")
    return {path.name: path.read_bytes() for path in (scratch / "dataset").iterdir()}


@given(data=st.data(), edits=EDITS)
def test_datasets(scratch, dataset, data, edits):
    name = data.draw(st.sampled_from(sorted(dataset)))
    for file_name, content in dataset.items():
        (scratch / "dataset" / file_name).write_bytes(
            edited(content, edits) if file_name == name else content
        )
    with contextlib.suppress(DatasetError):
        load_dataset(scratch / "dataset")


def save_checkpoint(topology, path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    CheckpointStore(path, {"settings": {}}).save(4, {"policy": TrainedModel(model, optimizer)}, {"epoch": 1})


def load_spoiled(topology, path):
    """Spoil one file after another; require that a checkpoint loads correctly or raises CheckpointError."""
    folder = path / "step-00000004"
    files = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    model = torch.nn.Linear(3, 2)
    models = {"policy": TrainedModel(model, torch.optim.AdamW(model.parameters()))}

    @given(name=st.sampled_from(sorted(files)), edits=EDITS)
    def load(name, edits):
        content = edited(files[name], edits)
        name.write_bytes(content)
        try:
            found = newest(path)
            assert CheckpointStore(path, {}).load(found.step, models) == {"epoch": 1}
            # In the notes, white space and the like may change.
            assert content == files[name] or name.suffix == ".json"
        except CheckpointError:
            assert content != files[name]
        finally:
            name.write_bytes(files[name])

    load()


def test_checkpoints(tmp_path):
    on_ranks(1, save_checkpoint, tmp_path)
    on_ranks(1, load_spoiled, tmp_path)


@given(method=st.sampled_from([*CALLS, "other"]), values=st.lists(JSON, max_size=4) | JSON)
def test_calls_of_the_weight_channel(method, values):
    with contextlib.suppress(EngineError):
        arguments = arguments_from_wire(method, values)
        assert arguments_from_wire(method, json.loads(msgspec.json.encode(to_wire(arguments)))) == arguments


@given(
    headers=st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=40)), max_size=3),
    path=st.text(max_size=9),
)
def test_the_door_of_the_server_opens_for_the_token_alone(headers, path):
    entered, answers = [], []

    async def app(scope, receive, send):
        entered.append(scope)

    async def send(message):
        answers.append(message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN_VARIABLE, "a token that nobody guesses")
        guard = Guard(app)
        names = [(b"authorization", value) for _, value in headers]
        for given_headers in (headers, names, [(name, b"Bearer") for name, _ in headers]):
            scope = {"type": "http", "method": "POST", "path": f"/{path}", "headers": given_headers}
            asyncio.run(guard(scope, None, send))
        assert not entered
        assert {answer["status"] for answer in answers if "status" in answer} == {401}
        right = [*headers, (b"Authorization", b"Bearer a token that nobody guesses")]
        scope = {"type": "http", "method": "POST", "path": f"/{path}", "headers": right}
        asyncio.run(guard(scope, None, send))
        assert entered == [scope] or any(name.lower() == b"authorization" for name, _ in headers)
