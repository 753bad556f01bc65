"""Wrong answers of a backend: an error names backend, prompt and value, and ends only its own batch."""

from dataclasses import replace

import pytest
from kit.rank_processes import save_tiny_llama

from vectorlm.errors import UnknownAdapter
from vectorlm.sampling import messages
from vectorlm.sampling.backends.scripted import Scripted
from vectorlm.sampling.contract import RequestOutput
from vectorlm.sampling.sampler.scheduler import Scheduler
from vectorlm.types import Completion

PARAMS = {"n": 2, "max_tokens": 4, "logprobs": 0}
KEEP = messages.BeginUpdate("keep")


class Odd(Scripted):
    """A backend that applies `change` to its list of outputs before it returns them."""

    vocab_size = 128

    def __init__(self, change, num_steps=1):
        super().__init__("m", answers="abcd {0}".format, num_steps=num_steps)
        self.change = change

    def load(self, version, *args):
        self.version = version
        return 0.0

    def poll(self):
        return self.change(super().poll())


def each(**fields):
    """Return a change that replaces fields of prompt 1's completions by functions of the completion."""

    def change(outputs):
        return [
            replace(
                output,
                completions=[
                    replace(one, **{name: value(one) for name, value in fields.items()})
                    for one in output.completions
                ],
            )
            if output.name.endswith("-1")
            else output
            for output in outputs
        ]

    return change


def of_second(change):
    return lambda outputs: [change(output) if output.name.endswith("-1") else output for output in outputs]


def sampled(engine, number=1, prompts=((5, 6), (7,)), params=PARAMS):
    """Submit and step once; return the answers by number, with errors as texts."""
    engine.carry_out(number, messages.Generate(list(prompts), params, as_request_outputs=False))
    return texts(engine.step())


def texts(answers):
    return {number: str(error or "") for number, (_, error) in answers}


WRONG = {
    "with 1 completions, but n=2": of_second(
        lambda output: replace(output, completions=output.completions[:1])
    ),
    "with prompt_token_ids=(8,), but the prompt is (7,)": each(prompt_token_ids=lambda one: (8,)),
    "with finish_reason='halt', but it must be one of": each(finish_reason=lambda one: "halt"),
    "with 5 tokens, but max_tokens=4": each(token_ids=lambda one: (97,) * 5),
    "with 3 versions for 4 tokens": each(versions=lambda one: one.versions[1:]),
    "with 3 sampler_logprobs for 4 tokens": each(sampler_logprobs=lambda one: one.sampler_logprobs[1:]),
    "with 0 sampler_logprobs for 4 tokens": each(sampler_logprobs=lambda one: ()),
    "with token -5, but token ids are from 0 to 127": each(token_ids=lambda one: (97, -5, 97, 97)),
    "with token 128, but token ids are from 0 to 127": each(token_ids=lambda one: (97, 97, 97, 128)),
    "with a log-probability of 0.5, which must be at most 0": each(
        sampler_logprobs=lambda one: (-1.0, -1.0, 0.5, -1.0)
    ),
    "with a log-probability of nan, which is not finite": each(
        sampler_logprobs=lambda one: (-1.0, -1.0, float("nan"), -1.0)
    ),
    "with a log-probability of -inf, which is not finite": each(
        sampler_logprobs=lambda one: (-float("inf"), -1.0, -1.0, -1.0)
    ),
    "with tokens of versions 6, but the weights were, in this order, [-1]": each(
        versions=lambda one: (6,) * 4
    ),
    "twice": lambda outputs: outputs + outputs[1:],
}


@pytest.mark.parametrize(("said", "change"), WRONG.items(), ids=WRONG)
def test_a_wrong_answer_ends_its_batch_and_no_other(said, change):
    backend = Odd(change)
    engine = Scheduler(backend)
    assert sampled(engine)[1].startswith(f"the backend Odd answered prompt 1 {said}")
    backend.change = lambda outputs: outputs
    assert sampled(engine, number=2) == {2: ""}


def test_a_name_that_was_never_submitted_ends_what_is_in_flight():
    for name in ("2-0", "1-2", "none"):
        engine = Scheduler(Odd(lambda outputs, name=name: [replace(output, name=name) for output in outputs]))
        assert f"the backend Odd answered a request '{name}', which was never submitted" in sampled(engine)[1]
        assert not engine.busy


def test_answers_to_cancelled_requests_are_dropped():
    class Deaf(Odd):
        def cancel(self, names):
            pass

    engine = Scheduler(Deaf(lambda outputs: outputs))
    engine.carry_out(1, messages.Generate([[5]], PARAMS, as_request_outputs=False))
    engine.carry_out(2, messages.Abort(1))
    assert sampled(engine, number=3) == {3: ""}


def test_a_prompt_outside_the_vocabulary_never_reaches_the_backend():
    engine = Scheduler(Odd(lambda outputs: outputs))
    ((_, (_, error)),) = engine.carry_out(
        1, messages.Generate([[5], [5, 128]], PARAMS, as_request_outputs=False)
    )
    assert str(error) == "prompt 1 has token 128: it must be from 0 to 127."
    assert not engine.busy


def test_the_parameters_of_each_prompt_count_in_any_form():
    class Parameters:
        n, max_tokens, logprobs = 2, 3, None

    engine = Scheduler(Odd(each(token_ids=lambda one: (97,) * 4, versions=lambda one: (-1,) * 4)))
    text = sampled(engine, params=[PARAMS, {"max_tokens": 3}])[1]
    assert text == "the backend Odd answered prompt 1 with 4 tokens, but max_tokens=3."
    backend = Odd(each(sampler_logprobs=lambda one: ()))
    backend.submit = lambda name, prompt, params: Scripted.submit(
        backend, name, prompt, {"n": 2, "max_tokens": 3}
    )
    assert sampled(Scheduler(backend), params=Parameters()) == {1: ""}


def test_versions_are_of_weights_that_were_held_in_their_order():
    """A version may be smaller than the one before it, but must be a version during the request."""
    right = [(4, 4, 2, 7), (4, 4, 4, 4), (7,) * 4, (2, 2, 7, 7)]
    wrong = [(4, 7, 2, 2), (-1, 4, 2, 7), (7, 7, 7, 8), (4, 2, 4, 7)]
    for versions in right + wrong:
        backend = Odd(each(versions=lambda one, versions=versions: versions), num_steps=2)
        engine = Scheduler(backend)
        load(engine, 4)
        assert sampled(engine) == {}
        for version in (2, 7):
            load(engine, version)
        text = texts(engine.step())[1]
        shown = ", ".join(
            str(token_version)
            for index, token_version in enumerate(versions)
            if token_version != versions[index - 1] or not index
        )
        expected = f"the backend Odd answered prompt 1 with tokens of versions {shown}, but"
        assert text.startswith(expected) if versions in wrong else text == ""
        load(engine, 4)


def load(engine, version, adapter="policy"):
    engine.carry_out(100, KEEP)
    ((_, (_, error)),) = engine.carry_out(101, messages.FinishUpdate(version, None, adapter=adapter))
    assert error is None


def test_an_update_ends_the_removal_of_an_adapter_that_was_interrupted():
    class Named(Odd):
        adapters = {"policy": 1, "judge": 1}  # noqa: RUF012

        def load(self, version, *args, adapter="policy"):
            return super().load(version, *args)

        def submit(self, *args, adapter="policy"):
            super().submit(*args)

    engine = Scheduler(Named(lambda outputs: outputs))
    asked = messages.Generate([[5]], PARAMS, as_request_outputs=False, adapter="judge")
    load(engine, 1, "judge")
    assert engine.carry_out(1, asked) == []
    assert engine.carry_out(2, messages.RemoveAdapter("judge")) == [(2, (False, None))]
    ((_, (_, error)),) = engine.carry_out(3, asked)
    assert isinstance(error, UnknownAdapter)
    load(engine, 2, "judge")
    assert engine.carry_out(4, asked) == []
    assert texts(engine.step()) == {1: "", 4: ""}


def test_a_backend_without_a_vocabulary_is_held_to_that_of_the_folder(tmp_path):
    path = save_tiny_llama(tmp_path / "model", vocab_size=48)

    class Plain:
        version = -1
        submit = cancel = lambda *args: None

        def poll(self):
            return [RequestOutput("1-0", [Completion((5,), (48,), (), (-1,), "", "stop")])]

        def sleep(self):
            pass

        wake_up = sleep

    text = sampled(Scheduler(Plain(), str(path)), prompts=[[5]], params=None)[1]
    assert text == "the backend Plain answered prompt 0 with token 48, but token ids are from 0 to 47."
    assert sampled(Scheduler(Plain(), "owner/name"), prompts=[[5]], params=None) == {1: ""}
