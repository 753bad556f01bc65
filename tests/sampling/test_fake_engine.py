import doctest

import pytest
import torch

from vectorlm.errors import EngineError
from vectorlm.sampling import fake_engine
from vectorlm.sampling.fake_engine import FakeEngine


def test_the_example_in_its_docstring_runs():
    assert doctest.testmod(fake_engine).failed == 0


def test_listed_answers_are_handed_out_in_turn_until_there_are_none():
    with FakeEngine(["one", "two", "three"]) as engine:
        assert engine.generate_text(["a", "b"]) == ["one", "two"]
        assert engine.generate_text("c") == ["three"]
        with pytest.raises(EngineError, match="the script has no answer left for 'd'"):
            engine.generate_text("d")


def test_answers_are_as_long_as_they_are_written_unless_a_limit_is_given():
    with FakeEngine(lambda prompt, version: "x" * 40) as engine:
        (whole,), (cut,) = engine.sample(["a", "b"], [{"logprobs": 0}, {"max_tokens": 3}])
    assert (len(whole.token_ids), whole.finish_reason, whole.sampler_logprobs) == (40, "stop", (-1.0,) * 40)
    assert (cut.text, cut.token_ids, cut.finish_reason) == ("xxx", (120,) * 3, "length")


def test_prompts_of_every_kind_reach_the_script():
    seen = []
    chat = [{"role": "user", "content": "ab"}]
    with FakeEngine(lambda prompt, version: seen.append(prompt) or "") as engine:
        answers = engine.sample(["ab", [97, 98], chat])
    assert seen == ["ab", [97, 98], chat]
    assert [each[0].prompt_token_ids for each in answers] == [(97, 98)] * 3


def test_it_remembers_its_updates_and_fails_when_told_to():
    model = torch.nn.Linear(2, 2)
    with FakeEngine(lambda prompt, version: str(version)) as engine:
        engine.update(model, 3)
        engine.update(model, 3)
        engine.fail_next("update", EngineError("no room"))
        with pytest.raises(EngineError, match="no room"):
            engine.update(model, 4)
        assert engine.version == 3
        engine.update(model, 5)
        engine.fail_next("sample", RuntimeError("gone"))
        with pytest.raises(EngineError, match="RuntimeError: gone"):
            engine.sample("a")
        assert engine.generate_text("a") == ["5"]
        assert engine.updates == [3, 5]
        with pytest.raises(ValueError, match="call='close' cannot be told to fail"):
            engine.fail_next("close", EngineError(""))
