"""Sampling with a bar gives what sampling without one gives."""

import pytest

from vectorlm import SamplingEngine
from vectorlm.ranks import wait
from vectorlm.report.step_lines import sample_with_progress
from vectorlm.sampling.inline_engines import FakeEngine

PROMPTS = [f"prompt {number}" for number in range(100)]


def answer(prompt, version):
    return f"{prompt}!"


@pytest.mark.parametrize("number", [1, 8, 9, 100])
def test_completions_come_in_the_order_of_the_prompts(number):
    with FakeEngine(answer) as engine:
        found = sample_with_progress(engine, PROMPTS[:number], {"max_tokens": 100})
        assert [each.text for (each,) in found] == [f"{prompt}!" for prompt in PROMPTS[:number]]
        assert found == engine.sample(PROMPTS[:number], {"max_tokens": 100})


def test_it_says_how_many_prompts_are_answered(monkeypatch, capsys):
    monkeypatch.setattr(wait, "AFTER_S", 0.05)
    monkeypatch.setattr(wait, "EVERY_S", 0.05)
    slow = {
        "inference": "vectorlm.sampling.backends.scripted:Scripted",
        "channel": "inline",
        "answers": answer,
    }
    # Eight at a time take a step of 0.05 s.
    with SamplingEngine("scripted", **slow, max_num_seqs=8, step_s=0.05) as engine:
        sample_with_progress(engine, PROMPTS, {"max_tokens": 100}, what="held-out")
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("held-out, prompts: done after")
    counts = [int(line.split()[2]) for line in lines[:-1]]
    assert counts == sorted(counts)
    assert any(0 < count < 100 for count in counts)


def test_what_cannot_be_finished_is_taken_back():
    with FakeEngine(answer, num_steps=3) as engine:
        engine.fail_next("sample", RuntimeError("no room"))
        with pytest.raises(Exception, match="no room"):
            sample_with_progress(engine, PROMPTS, {"max_tokens": 100})
        # Nothing is in flight any more, or this would refuse.
        engine.sleep()
