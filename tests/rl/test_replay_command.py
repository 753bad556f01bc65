"""``vectorlm replay``: where two runs part; test_reinforce.py makes steps again."""

import json

import pytest

from vectorlm.cli import main


def save_run(folder, rows, norms):
    folder.mkdir()
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = [
        {"step": step, "policy/grad_norm": norm, "policy/loss": 0.5} for step, norm in enumerate(norms)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    return str(folder)


@pytest.mark.parametrize(
    ("change", "norm", "found"),
    [
        ({}, 0.3, None),
        ({"prompt": "b"}, 0.3, ["step 2: prompts differ in 1 of 1 rollouts, the first 0: 'a' and 'b'"]),
        (
            {"token_ids": [1, 3]},
            0.3,
            ["step 2: tokens differ in 1 of 1 rollouts, the first 0: '[1, 2]' and '[1, 3]'"],
        ),
        (
            {"reward": 0.5, "advantage": 0.1},
            0.4,
            ["step 2: rewards", "step 2: advantages", "step 2: the gradient norm differs: 0.3 and 0.4"],
        ),
        ({}, 0.4, ["step 2: the gradient norm differs: 0.3 and 0.4"]),
    ],
    ids=str,
)
def test_the_first_step_at_which_two_runs_differ_is_named_with_what_differs(
    tmp_path, capsys, change, norm, found
):
    row = {"prompt": "a", "completion": "x", "token_ids": [1, 2], "reward": 1.0, "advantage": 0.2}
    rows = [{"train_step": step, **row} for step in (1, 2, 3)]
    other = [rows[0], *({**each, **change} for each in rows[1:])]
    runs = (
        save_run(tmp_path / "a", rows, [0.0, 0.1, 0.3, 0.3]),
        save_run(tmp_path / "b", other, [0.0, 0.1, norm, 9.0]),
    )
    if found is None:
        runs = runs[0], save_run(tmp_path / "c", rows, [0.0, 0.1, 0.3, 0.3])
    assert main(["replay", runs[0], "--bisect", runs[1]]) == int(found is not None)
    printed = capsys.readouterr().out.splitlines()
    expected = found or ["no step differs"]
    assert len(printed) == len(expected)
    assert all(line.startswith(start) for line, start in zip(printed, expected, strict=True))


@pytest.mark.parametrize(
    ("arguments", "text"), [([], "--step N"), (["--bisect", "nowhere"], "rollouts.jsonl is not there")]
)
def test_what_is_missing_is_said_in_one_line(tmp_path, capsys, arguments, text):
    assert main(["replay", str(tmp_path), *arguments]) == 2
    assert text in capsys.readouterr().err
