"""What an engine owes to `update`."""

from __future__ import annotations

from vectorlm.errors import EngineError, RankMismatch, WeightMismatch
from vectorlm.testing.subject import GREEDY, PROMPTS, Subject, raises

LONG = {**GREEDY, "max_tokens": 40}


def an_update_brings_its_version_and_other_answers(subject: Subject) -> None:
    """The report says what happened, and the answers show it."""
    for seed in (1, 2):
        before = [each[0].text for each in subject.engine.sample(PROMPTS, GREEDY)]
        trained, _ = subject.models(seed)
        report = subject.engine.update(trained, step := subject.next_step)
        assert (report.version, report.skipped) == (step, False)
        assert subject.engine.version == step
        answers = subject.engine.sample(PROMPTS, GREEDY)
        assert answers[0][0].versions[0] == step
        assert [each[0].text for each in answers] != before


def the_same_step_moves_nothing(subject: Subject) -> None:
    """A step is loaded once, whatever the model has become since."""
    subject.engine.update(subject.models(3)[0], step := subject.next_step)
    before = subject.engine.sample(PROMPTS, GREEDY)
    report = subject.engine.update(subject.models(4)[0], step)
    assert (report.skipped, report.num_bytes, report.version) == (True, 0, step)
    assert subject.engine.sample(PROMPTS, GREEDY) == before


def a_negative_step_is_refused(subject: Subject) -> None:
    """-1 is the checkpoint's own version."""
    trained, _ = subject.models()
    version = subject.engine.version
    with raises(ValueError, saying="-1"):
        subject.engine.update(trained, -1)
    assert subject.engine.version == version


def another_model_is_refused_and_the_engine_keeps_its_weights(subject: Subject) -> None:
    """The text names what does not fit; nothing has changed."""
    trained, _ = subject.models(5)
    subject.engine.update(trained, step := subject.next_step)
    before = subject.engine.sample(PROMPTS, GREEDY)
    trained.get_output_embeddings().register_parameter("bias", _like_nothing(trained))
    with raises(WeightMismatch, saying="bias"):
        subject.engine.update(trained, step + 1)
    assert subject.engine.version == step
    assert subject.engine.sample(PROMPTS, GREEDY) == before
    assert subject.engine.update(subject.models(5)[0], step).skipped, (
        "the engine must know that it holds this step"
    )


def an_update_is_refused_while_requests_are_under_way(subject: Subject) -> None:
    """Unless it is told what becomes of them; they end as if nobody had tried."""
    trained, _ = subject.models(6)
    subject.engine.update(trained, step := subject.next_step)
    expected, other = subject.engine.sample(PROMPTS, LONG), subject.models(7)[0]
    with subject.kept_busy():
        handle = subject.engine.submit(PROMPTS, LONG)
        with raises(EngineError, saying="under way"):
            subject.engine.update(other, step + 1)
        with raises(ValueError, saying="in_flight='later'"):
            subject.engine.update(other, step + 1, in_flight="later")  # type: ignore[arg-type]
    assert subject.engine.version == step
    assert handle.result() == expected
    subject.engine.poll()


def an_update_that_drains_waits_for_requests_under_way(subject: Subject) -> None:
    """All of their tokens are of the old weights."""
    trained, _ = subject.models(6)
    subject.engine.update(trained, step := subject.next_step)
    other = subject.models(7)[0]
    handle = subject.engine.submit(PROMPTS, LONG)
    subject.engine.update(other, step + 1, in_flight="drain")
    assert subject.engine.version == step + 1
    for (completion,) in handle.result():
        assert set(completion.versions) == {step}
    subject.engine.poll()


def requests_under_way_go_on_with_the_new_weights(subject: Subject) -> None:
    """Each token says which weights sampled it; an engine that cannot do this refuses, and has changed nothing."""
    for in_flight in ("keep", "recompute"):
        trained, _ = subject.models(6)
        subject.engine.update(trained, step := subject.next_step)
        other = subject.models(7)[0]
        handle = subject.engine.submit(PROMPTS, LONG)
        handle.done()
        try:
            subject.engine.update(other, step + 1, in_flight=in_flight)  # type: ignore[arg-type]
        except EngineError:
            assert subject.engine.version == step
        for (completion,) in handle.result():
            assert set(completion.versions) <= {step, subject.engine.version}
            assert list(completion.versions) == sorted(completion.versions)
        subject.engine.poll()


def ranks_must_agree_on_the_step(subject: Subject) -> None:
    """Told on every rank, and nothing has changed; one rank agrees with itself."""
    if subject.topology.world_size == 1:
        return
    version = subject.engine.version
    with raises(RankMismatch, saying="rank 1"):
        subject.engine.update(subject.models()[0], subject.next_step + subject.topology.rank)
    assert subject.engine.version == version


def _like_nothing(model: object) -> object:
    import torch

    return torch.nn.Parameter(torch.zeros(3))
