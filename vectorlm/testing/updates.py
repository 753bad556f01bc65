"""What an engine owes to `update`."""

from __future__ import annotations

from vectorlm.errors import EngineError, RankMismatch, WeightMismatch
from vectorlm.testing.subject import GREEDY, PROMPTS, Subject, raises


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


def requests_under_way_meet_an_update(subject: Subject) -> None:
    """An engine may refuse the update, or go on with the new weights; then each token says which sampled it."""
    trained, _ = subject.models(6)
    subject.engine.update(trained, step := subject.next_step)
    handle = subject.engine.submit(PROMPTS, {**GREEDY, "max_tokens": 40})
    handle.done()
    try:
        subject.engine.update(subject.models(7)[0], step + 1)
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
