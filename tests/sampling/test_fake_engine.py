import doctest
import warnings
from types import SimpleNamespace

import pytest
import torch
from kit.rank_processes import on_ranks

from vectorlm.errors import EngineError, EngineTimeout
from vectorlm.sampling import inline_channel, inline_engines
from vectorlm.sampling.inline_engines import FakeEngine
from vectorlm.sampling.weights.arena import Arena
from vectorlm.sampling.weights.inspection import checksum
from vectorlm.sampling.weights.plan import TensorSpec


def test_the_example_in_its_docstring_runs():
    failed, attempted = doctest.testmod(inline_engines)
    assert failed == 0 < attempted


def test_listed_answers_are_handed_out_in_turn_until_there_are_none():
    with FakeEngine(["one", "two", "three"]) as engine:
        assert engine.generate_text(["a", "b"]) == ["one", "two"]
        assert engine.generate_text("c") == ["three"]
        with pytest.raises(EngineError, match="'d'"):
            engine.generate_text("d")


def test_answers_are_as_long_as_they_are_written_unless_a_limit_is_given():
    with FakeEngine(lambda prompt, version: "x" * 40) as engine:
        (whole,), (cut,) = engine.sample(["a", "b"], [{"logprobs": 0}, {"max_tokens": 3}])
    assert (len(whole.token_ids), whole.finish_reason, whole.sampler_logprobs) == (40, "stop", (-1.0,) * 40)
    assert (cut.text, cut.token_ids, cut.finish_reason) == ("xxx", (120,) * 3, "length")


def test_prompts_of_every_kind_reach_the_script_as_text():
    seen = []
    chat = [{"role": "user", "content": "ab"}]
    with FakeEngine(lambda prompt, version: seen.append(prompt) or "") as engine:
        answers = engine.sample(["ab", [97, 98], chat])
    assert seen == ["ab"] * 3
    assert [completions[0].prompt_token_ids for completions in answers] == [(97, 98)] * 3


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


def test_only_the_time_inside_calls_is_the_silence_of_an_engine_without_a_process(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(inline_channel, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with FakeEngine(lambda prompt, version: "a", num_steps=4, timeout_s=2.0) as engine:
        handle = engine.submit("a")
        for look in (engine.poll, handle.done, handle.result):
            now[0] += 3.0
            look()

        scheduler = engine._channel._scheduler

        def sample_nothing():
            now[0] += 1.5
            return []

        handle = engine.submit("a")
        step, scheduler.step = scheduler.step, sample_nothing
        with pytest.raises(EngineTimeout, match="nothing for 2 s"):
            handle.result()
        # The engine is slow, but not dead: a second call lets it continue.
        scheduler.step = step
        assert handle.result()


class FailsOnce:
    """A trainer of one tensor that fails to publish version 2."""

    version = 1

    def manifest(self):
        return (TensorSpec("weight", (2,)),)

    def publish(self, layout, with_checksums):
        if self.version == 2:
            raise RuntimeError("the disk is gone")
        arena = Arena.open(layout.path, layout.num_bytes)
        arena.view(layout.slots[0]).fill_(self.version)
        return [checksum(arena.view(layout.slots[0]), 0, layout.slots[0].word_bytes)] * with_checksums


def test_requests_wait_for_the_update_after_one_that_failed_and_then_go_on():
    trainer = FailsOnce()
    with FakeEngine(lambda prompt, version: f"{prompt}{version}", num_steps=3) as engine:
        engine.update(trainer, 1)
        handle = engine.submit(["a"])
        trainer.version = 2
        with pytest.raises(EngineError, match="the disk is gone"):
            engine.update(trainer, 2, in_flight="keep")
        assert handle.done()
        with pytest.raises(EngineTimeout, match="did not finish"):
            handle.result()
        trainer.version = 3
        engine.update(trainer, 3, in_flight="keep")
        assert handle.result()[0][0].text == "a3"
        waiting = engine.submit(["b"])
    assert waiting.done()


def update_again(topology):
    """Update twice under one step, after passes without changes and after an optimizer step; return the warnings."""
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    for module in (*model, model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters())
    seen = []
    with FakeEngine(lambda prompt, version: "a", topology=topology) as engine:
        for changes in (False, True):
            engine.update(model, 0)
            model(torch.ones(2, 4)).sum().backward()
            with torch.no_grad():
                model(torch.ones(2, 4))
            if changes:
                optimizer.step()
            optimizer.zero_grad()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                engine.update(model, 0)
            seen.append([str(warning.message) for warning in caught])
    return seen


def test_changed_weights_under_a_step_that_was_sent_are_warned_of():
    for unchanged, changed in on_ranks(2, update_again):
        assert unchanged == []
        assert len(changed) == 1
        assert "train_step=0" in changed[0]
