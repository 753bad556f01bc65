"""Backends with one realistic mistake each."""

from dataclasses import replace

from vectorlm.sampling.backends.scripted import Scripted
from vectorlm.sampling.backends.transformers import Transformers


class _ChangesAnswers(Transformers):
    """A backend that changes each completion by `change`."""

    def poll(self):
        return [
            replace(output, completions=[self.change(completion) for completion in output.completions])
            for output in super().poll()
        ]


class OneCompletionTooFew(Transformers):
    def poll(self):
        return [
            replace(output, completions=output.completions[: max(1, len(output.completions) - 1)])
            for output in super().poll()
        ]


class VersionsOfTheFuture(_ChangesAnswers):
    def change(self, completion):
        return replace(completion, versions=tuple(version + 7 for version in completion.versions))


class VersionsOfTheCheckpoint(_ChangesAnswers):
    def change(self, completion):
        return replace(completion, versions=(-1,) * len(completion.versions))


class StopAndLengthSwapped(_ChangesAnswers):
    def change(self, completion):
        return replace(
            completion, finish_reason={"stop": "length", "length": "stop"}[completion.finish_reason]
        )


class LastTokenDropped(_ChangesAnswers):
    def change(self, completion):
        kept = slice(None, -1 if len(completion.token_ids) > 1 else None)
        return replace(
            completion,
            token_ids=completion.token_ids[kept],
            sampler_logprobs=completion.sampler_logprobs[kept],
            versions=completion.versions[kept],
        )


class ProbabilityInsteadOfLogprob(_ChangesAnswers):
    def change(self, completion):
        return replace(completion, sampler_logprobs=(0.5,) * len(completion.sampler_logprobs))


class LogprobsUnasked(_ChangesAnswers):
    def change(self, completion):
        return replace(
            completion, sampler_logprobs=completion.sampler_logprobs or (-1.0,) * len(completion.token_ids)
        )


class LoadCopiesNothing(Transformers):
    def load(self, version, checksums, weight_sets, recompute):
        self.version = version
        return 0.0


class LoadComputesOnce(Transformers):
    """A backend that computes on a weight when it reads the checkpoint, but not after an update."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.model.model.norm.register_forward_hook(
            lambda module, args, output: output * (1 + 1e-4 * (self.version >= 0))
        )


class LoadProvesNothing(Transformers):
    def load(self, version, checksums, weight_sets, recompute):
        return super().load(version, None, weight_sets, recompute)


class CacheKeptThroughRecompute(Transformers):
    def load(self, version, checksums, weight_sets, recompute):
        return super().load(version, checksums, weight_sets, recompute=False)


class PromptsKeptOverAnUpdate(_ChangesAnswers):
    """A backend that reuses the log-probability of the next token after its weights have changed."""

    def change(self, completion):
        if not completion.sampler_logprobs:
            return completion
        found = vars(self).setdefault("cache", {})
        first = found.setdefault(
            (completion.prompt_token_ids, completion.token_ids[0]), completion.sampler_logprobs[0]
        )
        return replace(completion, sampler_logprobs=(first, *completion.sampler_logprobs[1:]))


class CancelDoesNothing(Transformers):
    def cancel(self, names):
        pass


class CancelForgetsTheNames(Scripted):
    """A backend that answers no cancelled request, but computes all of them."""

    def cancel(self, names):
        vars(self).setdefault("cancelled", set()).update(names)

    def poll(self):
        return [output for output in super().poll() if output.name not in vars(self).get("cancelled", ())]


class CancelEndsEverything(Transformers):
    def cancel(self, names):
        super().cancel(list(self._requests))


class RawLogprobs(Transformers):
    def __init__(self, model, **more):
        super().__init__(model, **more, logprobs_mode="raw_logprobs")


class AnswersTwice(Transformers):
    def poll(self):
        outputs = super().poll()
        return outputs + outputs[-1:]


class SeedIgnored(Transformers):
    def submit(self, name, prompt, sampling_params):
        given = {**sampling_params, "seed": None} if "seed" in sampling_params else sampling_params
        super().submit(name, prompt, given)


class LimitIsNotReached(Transformers):
    def submit(self, name, prompt, sampling_params):
        few = min(sampling_params.get("max_tokens", 16), 8)
        super().submit(name, prompt, {**sampling_params, "max_tokens": few})
