"""Sample the group of rollouts of one prompt."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

import numpy as np

from vectorlm.data.encoding import asked, encode, encode_reply, is_messages, split_unfinished
from vectorlm.errors import EngineError, RolloutError
from vectorlm.ranks.workers.pool import together
from vectorlm.rl.environments.remote import RemoteEnvironment
from vectorlm.rl.rollout import Rollout, RolloutGroup
from vectorlm.rl.settings import CollectSettings
from vectorlm.sampling.handle import Hear
from vectorlm.types import Completion, Prompt, PromptRecord, RewardResult


class Ask(Protocol):
    """Asks the engine for the completions of a prompt; of one, `hear` gets what is sampled as it is sampled."""

    def __call__(
        self, prompt: Prompt, params: dict[str, Any], hear: Hear | None = None, /
    ) -> Coroutine[Any, Any, Sequence[Completion]]:
        """Return them."""


Agent = Callable[[PromptRecord, Ask, Callable[[int], int]], Coroutine[Any, Any, Rollout]]
"""Makes a rollout of a prompt by requests of its own, whose seeds it draws by their number."""
Results = Mapping[str, Sequence[RewardResult]]
"""What reward functions, by name, returned for some rollouts."""


@dataclass(frozen=True)
class Task:
    """A group to be sampled."""

    position: int
    """The position of its prompt among all prompts of the run."""
    prompt_record: PromptRecord
    stored: Sequence[Rollout] | None = None
    """The rollouts of a stored group, whose position is among these; only its greedy completion is sampled."""


@dataclass(frozen=True)
class SampledGroup:
    """The rollouts of one prompt."""

    rollouts: Sequence[Rollout]
    greedy: Rollout | None = None
    """A greedy completion, where the algorithm needs one."""
    results: Results = field(default_factory=dict)
    """What the reward functions that see one completion at a time returned for the rollouts, the greedy one last."""


@dataclass(frozen=True, kw_only=True)
class GroupSampler:
    """Samples groups as the settings say."""

    settings: CollectSettings
    seed: int
    """With the position of a prompt and the turn, this decides what is sampled, whatever is sampled beside it."""
    max_model_len: int
    """Longest prompt and completion together, in tokens."""
    tokenizer: Any = None
    """What turns an environment's replies into tokens."""
    open_environment: Callable[[PromptRecord], RemoteEnvironment | None] | None = None
    """Opens the environment of each rollout; None, or what it returns for a prompt, for single turns."""
    agents: Mapping[str, Agent] = field(default_factory=dict)
    """What makes the rollouts of prompts of some sources, instead of an environment."""
    needs_greedy: bool = False
    """Sample a greedy completion of each prompt too."""
    score: Callable[[Sequence[Rollout]], Awaitable[Results]] | None = None
    """Scores a group as soon as it has ended, while others are sampled and the ranks train."""

    async def sample(self, task: Task, ask: Ask) -> SampledGroup:
        """Return the group.

        Raises:
            RolloutError: An environment failed.
            VectorLMError: What `score` raised.
        """
        if self.needs_greedy:
            params = {**self._params, "n": 1, "temperature": 0.0}
            alone = ask(asked(task.prompt_record), params)
            rollouts, (completion,) = await asyncio.gather(self._group(task, ask), alone)
            group = SampledGroup(rollouts, Rollout.from_completion(task.prompt_record, completion))
        else:
            group = SampledGroup(await self._group(task, ask))
        if self.score is None:
            return group
        greedy_too = [] if group.greedy is None else [group.greedy]
        return replace(group, results=await self.score([*group.rollouts, *greedy_too]))

    async def _group(self, task: Task, ask: Ask) -> Sequence[Rollout]:
        if task.stored is not None:
            return task.stored
        size, record = self.settings.group_size, task.prompt_record
        opened = [self.open_environment(record) for _ in range(size)] if self.open_environment else []
        if playing := [each for each in opened if each is not None]:
            return await together(
                self._play(task, index, environment, ask) for index, environment in enumerate(playing)
            )
        if (agent := self.agents.get(record.source)) is not None:
            return await together(
                agent(record, ask, functools.partial(self._seed_of_turn, task.position, index))
                for index in range(size)
            )
        params = {**self._params, "n": size, "seed": self._draw_seed(task.position)}
        return [Rollout.from_completion(record, each) for each in await ask(asked(record), params)]

    async def _play(self, task: Task, index: int, environment: RemoteEnvironment, ask: Ask) -> Rollout:
        """Return one rollout with an environment, which is closed in any case."""
        try:
            rollout = await self._turns(task, index, environment, ask)
        except BaseException:
            # What went wrong first is what is told.
            with contextlib.suppress(Exception):
                await environment.close()
            raise
        return rollout.rewarded(await environment.close())

    async def _turns(self, task: Task, index: int, environment: RemoteEnvironment, ask: Ask) -> Rollout:
        prompt = await environment.reset()
        seed = self._seed_of_turn(task.position, index, 0)
        try:
            (completion,) = await ask(prompt, {**self._params, "n": 1, "seed": seed})
        except Exception as error:
            with environment.naming("what it begins with cannot be rendered"):
                first = encode(prompt, lambda: self.tokenizer)
            if not isinstance(error, EngineError) or len(first) < self.max_model_len:
                raise
            raise environment.failure(
                f"begins with {len(first)} tokens, and the model's length of {self.max_model_len} leaves no room for a "
                "turn",
                "Shorten the prompt and what reset() adds, or raise train_parameters.max_seq_len",
            ) from error
        rollout = Rollout.from_completion(task.prompt_record, completion)
        prompt, tools = (prompt["prompt"], prompt["tools"]) if isinstance(prompt, Mapping) else (prompt, None)
        is_chat = is_messages(prompt)
        # What precedes the policy's message, and what it holds so far: what the prompt has begun, replies of text.
        chat, begun = split_unfinished(prompt) if is_chat else ([], "")
        own, contents = begun, []  # The same without replies of text, and the policy's messages so.
        # A truncated turn has not finished what it began to write.
        while not rollout.is_truncated:
            message, reply = await environment.step(completion.text)
            rollout = rollout.rewarded(reply.reward)
            if reply.metrics:
                rollout = replace(rollout, measured={**rollout.measured, **reply.metrics})
            if reply.done or rollout.num_turns == self.settings.max_turns:
                break
            if isinstance(reply.messages, str):
                ids, text = self.tokenizer.encode(reply.messages, add_special_tokens=False), reply.messages
            elif is_chat:
                with environment.naming("what it replied cannot be rendered"):
                    ids = encode_reply(chat, reply.messages, completion.token_ids, self.tokenizer, tools)
                text = self.tokenizer.decode(ids)
            else:
                raise RolloutError(
                    f"the environment replied with messages to {str(prompt)[:80]!r}, which is no chat: give it a "
                    "prompt of messages, or reply with a text."
                )
            whole = [*rollout.prompt_token_ids, *rollout.token_ids, *ids]
            if len(whole) >= self.max_model_len:
                # As an agent's: what it would have done next is not known.
                rollout = replace(rollout, finish_reason="length")
                break
            if isinstance(reply.messages, str):
                begun, own = begun + completion.text + text, f"{own}{completion.text}\n"
            else:
                contents.append((len(chat), own + message["content"]))
                chat += [{**message, "content": begun + message["content"]}, *reply.messages]
                begun = own = ""
            seed = self._seed_of_turn(task.position, index, rollout.num_turns)
            (completion,) = await ask(whole, {**self._params, "n": 1, "seed": seed})
            rollout = rollout.continued(tuple(ids), text, completion)
        last = {"role": "assistant", "content": begun + completion.text}
        if not is_chat:
            return rollout
        contents.append((len(chat), own + completion.text))
        return replace(rollout, messages=[*chat, last], policy_contents=contents)

    @property
    def _params(self) -> dict[str, Any]:
        """The sampling parameters of every rollout; `n` and `seed` are added for each."""
        # The sampled tokens' own log-probabilities cost next to nothing, and corrections read them whatever was asked.
        return {**self.settings.sampling, "logprobs": 0}

    def _seed_of_turn(self, position: int, index: int, turn: int) -> int:
        # Those of first turns are the seeds that vLLM gives the completions of one request.
        return self._draw_seed(position, turn, index) if turn else self._draw_seed(position) + index

    def _draw_seed(self, *place: int) -> int:
        """Draw the seed of a request: the engine's own random state would not survive a restart."""
        return int(np.random.default_rng((self.seed, *place)).integers(0, 2**62))


@dataclass(eq=False)
class PendingGroup:
    """A group from its beginning until a step has trained on it."""

    position: int
    """The position of its prompt among all prompts of the run, or of a stored group among these."""
    version: int
    """The version that the engine held when it was begun."""
    sampled: SampledGroup | None = None
    scored: RolloutGroup | None = None
    is_gone: bool = False
    """Whether a step has taken it, or it was dropped for its age."""

    @property
    def is_dropped(self) -> bool:
        """Whether dynamic sampling has dropped it; False while that is not known."""
        return self.scored is not None and self.scored.is_dropped

    def state(self) -> dict[str, Any]:
        """Return a finished group as plain values, without its prompt, which the position tells."""
        assert self.sampled is not None
        sampled = asdict(
            self.sampled,
            dict_factory=lambda items: {name: each for name, each in items if name != "prompt_record"},
        )
        return {"position": self.position, "version": self.version, "sampled": sampled}

    @classmethod
    def restored(cls, state: Mapping[str, Any], record: PromptRecord) -> PendingGroup:
        """Return the group of a `state`."""

        def rollout(saved: Mapping[str, Any]) -> Rollout:
            branches = tuple(map(rollout, saved["branches"]))
            return Rollout(prompt_record=record, **{**saved, "branches": branches})

        saved = state["sampled"]
        greedy = None if saved["greedy"] is None else rollout(saved["greedy"])
        results = {name: [RewardResult(**each) for each in found] for name, found in saved["results"].items()}
        sampled = SampledGroup([rollout(each) for each in saved["rollouts"]], greedy, results)
        return cls(state["position"], state["version"], sampled)


@dataclass(eq=False)
class StepGroups:
    """The groups that a step submitted, and their replacements by dynamic sampling.

    Dynamic sampling is defined in rounds; a round has as many groups as are missing. A group is submitted as soon as
    a later round is certain to need it, while groups of earlier rounds are still in flight.
    """

    size: int
    """Groups of the first round."""
    max_rounds: int
    stored_share: float = 0.0
    """Share of stored groups in every round."""
    fresh: list[PendingGroup] = field(default_factory=list)
    stored: list[PendingGroup] = field(default_factory=list)

    @property
    def rounds(self) -> list[tuple[int, int]]:
        """The fresh and the stored groups of each round, as far as it is certain: the others may all be kept."""
        dropped = [[each.is_dropped for each in kind] for kind in (self.fresh, self.stored)]
        rounds: list[tuple[int, int]] = []
        num_missing = self.size
        places = [0, 0]
        while num_missing and len(rounds) < self.max_rounds:
            num_stored = round(num_missing * self.stored_share)
            rounds.append((num_missing - num_stored, num_stored))
            num_missing = 0
            for kind, count in enumerate(rounds[-1]):
                num_missing += sum(dropped[kind][places[kind] : places[kind] + count])
                places[kind] += count
        return rounds

    @property
    def num_needed(self) -> tuple[int, int]:
        """The fresh and the stored groups that the rounds take; more may have been begun, as shares are rounded."""
        rounds = self.rounds
        return sum(fresh for fresh, _ in rounds), sum(stored for _, stored in rounds)

    def needed(self) -> Iterator[PendingGroup]:
        """Walk through the groups that the rounds take and that are begun, in the order of the rounds."""
        kinds = iter(self.fresh), iter(self.stored)
        for counts in self.rounds:
            for kind, count in zip(kinds, counts, strict=True):
                yield from islice(kind, count)
