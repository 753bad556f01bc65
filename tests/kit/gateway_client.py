"""Client for a gateway with a scripted engine, for tests."""

import asyncio

from kit.letters import Letters
from vectorlm.rl.agents.session import Session
from vectorlm.types import Completion


class Scripted:
    """A scripted engine that answers prompts by a function of their text; it records requests and cancellations."""

    def __init__(self, answer, delay_s=0.0, version=3, may_go_on=None):
        """Build the engine; a streamed answer awaits `may_go_on` before each token."""
        self.answer, self.delay_s, self.version, self.may_go_on = answer, delay_s, version, may_go_on
        self.asked, self.params, self.given_up = [], [], []

    async def ask(self, prompt, params, hear=None):
        text = "".join(map(chr, prompt))
        self.asked.append(text)
        self.params.append(params)
        try:
            await asyncio.sleep(self.delay_s)
            if hear is not None:
                whole = self.completion(prompt, text, 0)
                for place, (token, logprob) in enumerate(
                    zip(whole.token_ids, whole.sampler_logprobs, strict=True)
                ):
                    if self.may_go_on is not None:
                        await self.may_go_on(place)
                    hear(Completion((), (token,), (logprob,), (self.version,), chr(token), None))
        except asyncio.CancelledError:
            self.given_up.append(text)
            raise
        return [self.completion(prompt, text, index) for index in range(params["n"])]

    def completion(self, prompt, text, index):
        said = self.answer(text, index)
        count = len(said)
        logprobs = tuple(-1.0 - place / 8 for place in range(count))
        return Completion(
            tuple(prompt), tuple(map(ord, said)), logprobs, (self.version,) * count, said, "stop"
        )


def session_of(gateway, engine, sampling=None, tokenizer=None, **more):
    session = Session(
        engine.ask,
        tokenizer or Letters(),
        sampling={"temperature": 1.0, "max_tokens": 50} if sampling is None else sampling,
        max_model_len=gateway.max_model_len,
        **more,
    )
    gateway.open(session)
    return session
