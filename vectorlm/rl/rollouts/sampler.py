"""Sample the group of rollouts of one prompt."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any, Protocol

import numpy as np

from vectorlm.data.encoding import (
    asked,
    encode,
    encode_behind,
    encode_reply,
    is_messages,
    split_unfinished,
)
from vectorlm.data.images import (
    ImageTokens,
    Picture,
    PicturedIds,
    image_tokens_of,
    images_of,
    picture_of,
    with_images,
)
from vectorlm.errors import EngineError, RolloutError
from vectorlm.ranks.workers.pool import together
from vectorlm.rl.environments.remote import RemoteEnvironment
from vectorlm.rl.rollout import Rollout, RolloutGroup
from vectorlm.rl.rollouts.replay import read_routes, written_routes
from vectorlm.rl.settings import CollectSettings
from vectorlm.sampling.handle import Hear
from vectorlm.types import Completion, Prompt, PromptRecord, RewardResult


class Ask(Protocol):
    """Requests completions of a prompt from the engine; `hear` receives tokens of a single completion as they come."""

    def __call__(
        self, prompt: Prompt, params: dict[str, Any], hear: Hear | None = None, /
    ) -> Coroutine[Any, Any, Sequence[Completion]]:
        """Return the completions."""


Agent = Callable[[PromptRecord, Ask, Callable[[int], int]], Coroutine[Any, Any, Rollout]]
"""Makes a rollout of a prompt record; the last argument returns the seed of the n-th request."""
Results = Mapping[str, Sequence[RewardResult]]
"""Results of reward functions by their names, one per rollout."""


@dataclass(frozen=True)
class Task:
    """A group to sample."""

    position: int
    """Position of the prompt in the order of all prompts of the run."""
    prompt_record: PromptRecord
    stored: Sequence[Rollout] | None = None
    """Rollouts of a stored group; then `position` counts stored groups, and at most a greedy completion is sampled."""


@dataclass(frozen=True)
class SampledGroup:
    """The rollouts of one prompt."""

    rollouts: Sequence[Rollout]
    greedy: Rollout | None = None
    """A greedy completion, if the algorithm needs one."""
    results: Results = field(default_factory=dict)
    """Results of the reward functions that score one completion at a time, with the greedy completion last."""


@dataclass(frozen=True, kw_only=True)
class GroupSampler:
    """Samples a group of rollouts: single completions, conversations with environments, or runs of agents."""

    settings: CollectSettings
    seed: int
    """Seed of the run. With the position of the prompt and the turn, it determines the seed of every request."""
    max_model_len: int
    """Longest prompt and completion together, in tokens."""
    tokenizer: Any = None
    """Tokenizer for the replies of environments."""
    open_environment: Callable[[PromptRecord], RemoteEnvironment | None] | None = None
    """Opens the environment of a rollout. If it is None, or returns None for a prompt, rollouts have one turn."""
    open_access: Callable[[Callable[[int], int]], AbstractContextManager[Mapping[str, Any]]] | None = None
    """Gives an environment access to the engine's adapters for a block: takes the seeds of its requests, and returns
    columns. None gives no access."""
    agents: Mapping[str, Agent] = field(default_factory=dict)
    """Agents by the source of the prompts; an agent replaces the environment."""
    needs_greedy: bool = False
    """Whether to sample a greedy completion of each prompt too."""
    score: Callable[[Sequence[Rollout]], Awaitable[Results]] | None = None
    """Scores a finished group while other groups are sampled and the ranks train."""

    async def sample(self, task: Task, ask: Ask) -> SampledGroup:
        """Return the sampled group, scored if `score` is set.

        Raises:
            RolloutError: An environment failed.
            VectorLMError: `score` raised it.
        """
        if self.needs_greedy:
            params = {**self._params, "n": 1, "temperature": 0.0}
            alone = ask(asked(task.prompt_record), params)
            rollouts, (completion,) = await asyncio.gather(self._group(task, ask), alone)
            pictures = tuple(images_of(task.prompt_record.prompt))
            group = SampledGroup(rollouts, Rollout.from_completion(task.prompt_record, completion, pictures))
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
        if self.open_environment is not None:
            with contextlib.ExitStack() as stack:
                records = [stack.enter_context(self._with_access(task, index)) for index in range(size)]
                opened = list(map(self.open_environment, records))
                if environments := [environment for environment in opened if environment is not None]:
                    return await together(
                        self._interact(task, index, environment, ask)
                        for index, environment in enumerate(environments)
                    )
        if (agent := self.agents.get(record.source)) is not None:
            return await together(
                agent(record, ask, functools.partial(self._seed_of_turn, task.position, index))
                for index in range(size)
            )
        params = {**self._params, "n": size, "seed": self._draw_seed(task.position)}
        completions, pictures = await ask(asked(record), params), tuple(images_of(record.prompt))
        return [Rollout.from_completion(record, completion, pictures) for completion in completions]

    async def _interact(self, task: Task, index: int, environment: RemoteEnvironment, ask: Ask) -> Rollout:
        """Return one rollout with an environment, and close the environment even if it fails."""
        try:
            rollout = await self._turns(task, index, environment, ask)
        except BaseException:
            # Raise the first error, even if closing fails too.
            with contextlib.suppress(Exception):
                await environment.close()
            raise
        return rollout.rewarded(await environment.close())

    @contextlib.contextmanager
    def _with_access(self, task: Task, index: int) -> Iterator[PromptRecord]:
        """Give an environment access to the engine's adapters, by additional columns."""
        record = task.prompt_record
        if self.open_access is None:
            yield record
            return
        # These seeds differ from the seeds of the policy's turns.
        with self.open_access(functools.partial(self._draw_seed, task.position, index, 0)) as access:
            yield replace(record, columns={**access, **record.columns})

    async def _turns(self, task: Task, index: int, environment: RemoteEnvironment, ask: Ask) -> Rollout:
        prompt = await environment.reset()
        seed = self._seed_of_turn(task.position, index, 0)
        try:
            (completion,) = await ask(prompt, {**self._params, "n": 1, "seed": seed})
        except Exception as error:
            with environment.naming("the chat template cannot render its first prompt"):
                first = encode(prompt, lambda: self.tokenizer)
            if not isinstance(error, EngineError) or len(first) < self.max_model_len:
                raise
            raise environment.failure(
                f"starts with {len(first)} tokens, but the engine's limit is {self.max_model_len}, so no turn fits",
                "Shorten the prompt and the messages of reset(), or raise train_parameters.max_seq_len",
            ) from error
        prompt, tools = (prompt["prompt"], prompt["tools"]) if isinstance(prompt, Mapping) else (prompt, None)
        is_chat = is_messages(prompt)
        rollout = Rollout.from_completion(task.prompt_record, completion, tuple(images_of(prompt)))
        # Messages before the policy's current message; and the beginning of this message: prefill and replies of text.
        chat, begun = split_unfinished(prompt) if is_chat else ([], "")
        own, contents = (
            begun,
            [],
        )  # The policy's own text of this message, and of earlier messages by their position.
        # A truncated turn is incomplete: no environment can answer it.
        while not rollout.is_truncated:
            message, reply = await environment.step(completion.text)
            rollout = rollout.rewarded(reply.reward)
            if reply.metrics:
                rollout = replace(rollout, measured={**rollout.measured, **reply.metrics})
            if reply.done or rollout.num_turns == self.settings.max_turns:
                break
            pictures = tuple(images_of(reply.messages))
            if isinstance(reply.messages, str):
                ids = encode_behind(self.tokenizer, completion.text, reply.messages)
                text = reply.messages
            elif is_chat:
                with environment.naming("the chat template cannot render its reply"):
                    ids = encode_reply(chat, reply.messages, completion.token_ids, self.tokenizer, tools)
                text = self.tokenizer.decode(ids)
            else:
                raise RolloutError(
                    f"the environment replied with messages to {str(prompt)[:80]!r}, but this prompt is plain text. "
                    "Use a prompt of messages, or reply with text."
                )
            whole = [*rollout.prompt_token_ids, *rollout.token_ids, *ids]
            shown = rollout.pictures + pictures
            fits = len(whole) < self.max_model_len
            if shown:
                with environment.naming("an image of its reply cannot be read"):
                    fits = self._can_show(rollout, image_tokens_of(self.tokenizer), whole, shown)
            if not fits:
                # The rollout counts as truncated, as an agent's does, because the policy might have continued.
                rollout = replace(rollout, finish_reason="length")
                break
            if isinstance(reply.messages, str):
                begun, own = begun + completion.text + text, f"{own}{completion.text}\n"
            else:
                contents.append((len(chat), own + message["content"]))
                chat += [{**message, "content": begun + message["content"]}, *reply.messages]
                begun = own = ""
            seed = self._seed_of_turn(task.position, index, rollout.num_turns)
            if shown:
                whole = PicturedIds.of(whole, shown)
            (completion,) = await ask(whole, {**self._params, "n": 1, "seed": seed})
            rollout = rollout.continued(tuple(ids), text, completion, pictures)
        last = {"role": "assistant", "content": begun + completion.text}
        if not is_chat:
            return rollout
        contents.append((len(chat), own + completion.text))
        return replace(rollout, messages=[*chat, last], policy_contents=contents)

    def _can_show(
        self, rollout: Rollout, tokens: ImageTokens, whole: Sequence[int], shown: Sequence[Picture]
    ) -> bool:
        """Return whether the engine can read another turn with these pictures."""
        # The engine would put a picture in the place of a placeholder that the policy sampled.
        return (
            tokens.reserved.isdisjoint(rollout.policy_token_ids)
            and tokens.length(whole, shown) < self.max_model_len
        )

    @property
    def _params(self) -> dict[str, Any]:
        """The sampling parameters of all requests, without `n` and `seed`."""
        # Off-policy correction needs the log-probabilities of the sampled tokens; they cost almost nothing.
        return {**self.settings.sampling, "logprobs": 0}

    def _seed_of_turn(self, position: int, index: int, turn: int) -> int:
        # vLLM uses seed + i for completion i of a request. First turns of conversations use the same seeds.
        return self._draw_seed(position, turn, index) if turn else self._draw_seed(position) + index

    def _draw_seed(self, *place: int) -> int:
        """Return the seed of a request. A restart keeps this seed, but would lose the engine's random state."""
        return int(np.random.default_rng((self.seed, *place)).integers(0, 2**62))


def _written(value: Any) -> Any:
    """Return a part of a sampled group as the plain values that a checkpoint may hold, without prompt records."""
    if isinstance(value, Rollout):
        names = {item.name for item in fields(value)} - {"prompt_record", "routes", *value.CODES}
        numbers = {name: tuple(value.numbers(name).tolist()) for name in value.CODES}
        routes = None if value.routes is None else written_routes(value.routes)
        return {name: _written(getattr(value, name)) for name in sorted(names)} | numbers | {"routes": routes}
    # Messages and metrics of environments may hold any type, also types that inherit from str or int.
    for kind, plain in _PLAIN.items():
        if isinstance(value, kind):
            return plain(value)
    return value if value is None else str(value)


_PLAIN: Mapping[Any, Callable[[Any], Any]] = {
    bool: bool,
    int: int,
    float: float,
    Picture: Picture.as_text,
    str: str.__str__,
    Mapping: lambda items: {_written(name): _written(item) for name, item in items.items()},
    tuple: lambda items: tuple(map(_written, items)),
    list: lambda items: list(map(_written, items)),
    (np.generic, np.ndarray): lambda numbers: _written(numbers.tolist()),
    (SampledGroup, RewardResult, PromptRecord): lambda record: _written(vars(record)),
}


def digest_of(record: PromptRecord) -> str:
    """Return a digest of a prompt and its columns that is the same in every process."""
    # The text of an object may contain its address.
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(_written(record)))
    return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=16).hexdigest()


@dataclass(eq=False)
class PendingGroup:
    """A submitted group, until a step trains on it or it is dropped."""

    position: int
    """Position of the prompt among all prompts of the run; for a stored group, its position among stored groups."""
    version: int
    """Version of the weights in the engine when the group was submitted."""
    sampled: SampledGroup | None = None
    scored: RolloutGroup | None = None
    is_gone: bool = False
    """Whether a step has trained on the group, or it was cancelled."""

    @property
    def is_dropped(self) -> bool:
        """Whether dynamic sampling has dropped the group; False before it is scored."""
        return self.scored is not None and self.scored.is_dropped

    def state(self) -> dict[str, Any]:
        """Return a finished group as plain values. The prompt is left out: `position` identifies it."""
        return {"position": self.position, "version": self.version, "sampled": _written(self.sampled)}

    @classmethod
    def restored(cls, state: Mapping[str, Any], record: PromptRecord) -> PendingGroup:
        """Return the group that `state` described."""

        def rollout(saved: Mapping[str, Any]) -> Rollout:
            branches = tuple(map(rollout, saved["branches"]))
            # Checkpoints of earlier versions have neither pictures nor routes.
            pictures = tuple(map(picture_of, saved.get("pictures", ())))
            routes = read_routes(saved.get("routes"))
            chat = saved["messages"]
            messages = None if chat is None else with_images(chat, ())
            read = {"branches": branches, "pictures": pictures, "routes": routes, "messages": messages}
            return Rollout(prompt_record=record, **{**saved, **read})

        saved = state["sampled"]
        greedy = None if saved["greedy"] is None else rollout(saved["greedy"])
        results = {
            name: [RewardResult(**result) for result in found] for name, found in saved["results"].items()
        }
        sampled = SampledGroup([rollout(row) for row in saved["rollouts"]], greedy, results)
        return cls(state["position"], state["version"], sampled)


@dataclass(eq=False)
class StepGroups:
    """The groups that a step submitted, and their replacements by dynamic sampling.

    Dynamic sampling is defined in rounds; a round has as many groups as are missing. A group is submitted as soon as
    a later round is certain to need it, while groups of earlier rounds are still in flight.
    """

    size: int
    """Number of groups of the first round."""
    max_rounds: int
    stored_share: float = 0.0
    """Share of stored groups in every round."""
    fresh: list[PendingGroup] = field(default_factory=list)
    stored: list[PendingGroup] = field(default_factory=list)

    @property
    def rounds(self) -> list[tuple[int, int]]:
        """Numbers of fresh and stored groups of each round that is certain to be needed."""
        dropped = [[group.is_dropped for group in kind] for kind in (self.fresh, self.stored)]
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
        """Numbers of fresh and stored groups that the rounds need. More may exist, because shares are rounded."""
        rounds = self.rounds
        return sum(fresh for fresh, _ in rounds), sum(stored for _, stored in rounds)

    def needed(self) -> Iterator[PendingGroup]:
        """Iterate over the submitted groups that the rounds need, in the order of the rounds."""
        kinds = iter(self.fresh), iter(self.stored)
        for counts in self.rounds:
            for kind, count in zip(kinds, counts, strict=True):
                yield from islice(kind, count)
