"""Rollouts: single ones, scored groups of them, and the tensors of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, ClassVar

import numpy as np
import torch

from vectorlm.algorithms.batch import RolloutBatch, place_rewards
from vectorlm.algorithms.groups import is_constant
from vectorlm.algorithms.spec import AlgorithmSpec, ComparedRewards
from vectorlm.data.images import ImageTokens, Picture, PlacedPicture
from vectorlm.types import Completion, Numbers, PromptRecord


@dataclass(frozen=True)
class Rollout(Numbers):
    """A completion of a prompt. With an environment or agent, it has several turns in one row of tokens."""

    CODES: ClassVar[Mapping[str, str]] = {
        **{"prompt_token_ids": "q", "token_ids": "q", "policy_mask": "b"},
        **{"sampler_logprobs": "d", "versions": "q"},
    }

    prompt_record: PromptRecord
    """The prompt, with the columns that rewards read."""
    prompt_token_ids: tuple[int, ...]
    """The prompt as the engine saw it."""
    token_ids: tuple[int, ...]
    """All tokens after the prompt."""
    policy_mask: tuple[bool, ...]
    """Whether the policy chose each of `token_ids`; the environment wrote the others."""
    sampler_logprobs: tuple[float, ...]
    """The engine's log-probability of each of `token_ids`; 0 for tokens of the environment."""
    versions: tuple[int, ...]
    """The weight version that sampled each of `token_ids`; -1 for tokens of the environment."""
    text: str
    """The text of `token_ids`."""
    finish_reason: str | None
    """Finish reason of the last turn: ``stop``, ``abort``, or ``length`` (also if another turn did not fit)."""
    num_turns: int = 1
    """Number of turns of the policy."""
    turn_ends: tuple[int, ...] = ()
    """Index in `token_ids` after the last token of every turn."""
    turn_rewards: tuple[float, ...] = ()
    """The environment's reward for each turn; missing rewards at the end are 0."""
    branches: tuple[Rollout, ...] = ()
    """Other rows, if an agent rewrote or forked its conversation; every token is trained on in only one row."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """The whole chat of a rollout with an environment; None if the prompt is not a chat."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """The last value of each of the environment's metrics, by name."""
    turn_texts: Sequence[str] = ()
    """The policy's text of each turn; empty if the policy wrote all of `text`."""
    policy_contents: Sequence[tuple[int, str]] = ()
    """Index in `messages` of every message of the policy, and its content without the environment's text."""
    is_replayed: bool = False
    """Whether the rollout comes from a file; its `versions` count the steps of the run that wrote the file."""
    pictures: tuple[Picture, ...] = ()
    """The pictures in the row; each has one placeholder token, which the policy did not choose."""
    routes: np.ndarray | None = field(default=None, compare=False, repr=False)
    """The experts of the tokens that the engine read, as in `Completion.routes`; None if it returned none."""

    @property
    def rows(self) -> tuple[Rollout, ...]:
        """The rollout's main row, which is the rollout itself, and its branches."""
        return (self, *self.branches)

    @property
    def is_truncated(self) -> bool:
        """Whether the last turn reached its token limit, or another turn did not fit."""
        return self.finish_reason == "length"

    @property
    def num_policy_tokens(self) -> int:
        """Number of tokens that the policy chose, in all rows."""
        return sum(int(np.count_nonzero(row.numbers("policy_mask"))) for row in self.rows)

    @property
    def sampled_versions(self) -> np.ndarray:
        """The weight version of every token that the policy chose, in all rows, int64 [N]."""
        versions = np.concatenate([row.numbers("versions")[row.numbers("policy_mask")] for row in self.rows])
        return versions[versions >= 0]

    @property
    def policy_text(self) -> str:
        """The policy's text, every turn on a new line."""
        return "\n".join(self.turn_texts) or self.text

    @property
    def policy_token_ids(self) -> tuple[int, ...]:
        """The tokens that the policy chose."""
        return tuple(compress(self.token_ids, self.policy_mask))

    @property
    def turn_places(self) -> list[tuple[int, int]]:
        """Start and end of the policy's tokens in each turn that is trained on in this row."""
        places, start = [], 0
        chosen = np.flatnonzero(self.numbers("policy_mask"))
        for end in self.turn_ends or (len(self.numbers("token_ids")),):
            index = int(np.searchsorted(chosen, start))
            if index < len(chosen) and chosen[index] < end:
                places.append((int(chosen[index]), end))
            start = end
        return places

    @classmethod
    def from_completion(
        cls, prompt_record: PromptRecord, completion: Completion, pictures: tuple[Picture, ...] = ()
    ) -> Rollout:
        """Return the rollout after its first turn, whose prompt has `pictures`."""
        count = len(completion.numbers("token_ids"))
        fields = ("prompt_token_ids", "token_ids", "sampler_logprobs", "versions")
        data = {name: completion.data_of(name) for name in fields}
        data["sampler_logprobs"] = data["sampler_logprobs"] or bytes(8 * count)
        rollout: Rollout = cls.from_bytes(
            {**data, "policy_mask": b"\1" * count},
            prompt_record=prompt_record,
            text=completion.text,
            finish_reason=completion.finish_reason,
            turn_ends=(count,),
            turn_texts=(completion.text,),
            measured={},
            pictures=pictures,
            routes=completion.routes,
        )
        return rollout

    def continued(
        self,
        reply_ids: tuple[int, ...],
        reply: str,
        completion: Completion,
        pictures: tuple[Picture, ...] = (),
    ) -> Rollout:
        """Return the rollout with the environment's reply, the reply's `pictures`, and another turn."""
        num_reply, num_sampled = len(reply_ids), len(completion.token_ids)
        sampler_logprobs = completion.sampler_logprobs or (0.0,) * num_sampled
        routes = completion.routes
        if routes is not None and self.routes is not None:
            # Earlier tokens keep the routes with which they were sampled.
            routes = np.concatenate([self.routes, routes[len(self.routes) :]])
        return replace(
            self,
            token_ids=self.token_ids + reply_ids + completion.token_ids,
            policy_mask=self.policy_mask + (False,) * num_reply + (True,) * num_sampled,
            sampler_logprobs=self.sampler_logprobs + (0.0,) * num_reply + sampler_logprobs,
            versions=self.versions + (-1,) * num_reply + completion.versions,
            text=self.text + reply + completion.text,
            finish_reason=completion.finish_reason,
            num_turns=self.num_turns + 1,
            turn_ends=(*self.turn_ends, len(self.token_ids) + num_reply + num_sampled),
            turn_texts=(*self.turn_texts, completion.text),
            pictures=self.pictures + pictures,
            routes=None if self.routes is None else routes,
        )

    def with_expanded(self, tokens: ImageTokens, spare: int) -> tuple[Rollout, list[PlacedPicture]]:
        """Return the row with its pictures' tokens instead of their placeholders, and the pictures with their places.

        A reserved token that the policy chose, or that a text holds, would be mistaken for a picture. It becomes
        `spare`; this token and all later ones are not trained on, because the engine read another token here.
        """
        whole = np.concatenate([self.numbers("prompt_token_ids"), self.numbers("token_ids")])
        if not np.isin(whole, [*tokens.reserved]).any():
            return self, []
        prompt = list(self.prompt_token_ids)
        chosen = [False] * len(prompt) + list(self.policy_mask)
        policy = list(chosen)
        left, placed = list(self.pictures), list[PlacedPicture]()
        found: list[int] = []
        sources: list[int] = []
        starts = [0]
        for index, (token, is_chosen) in enumerate(zip([*prompt, *self.token_ids], chosen, strict=True)):
            new = [token]
            if token == tokens.placeholder and not is_chosen and left:
                new = tokens.expansion(picture := left.pop(0))
                placed.append(PlacedPicture(picture, len(found) + new.index(tokens.image_token)))
            elif token in tokens.reserved:
                new, policy[index:] = [spare], [False] * (len(policy) - index)
            found += new
            sources += [index - len(prompt)] * len(new)
            starts.append(len(found))
        first = starts[len(prompt)]
        sources = sources[first:]
        return replace(
            self,
            prompt_token_ids=tuple(found[:first]),
            token_ids=tuple(found[first:]),
            policy_mask=tuple(policy[len(prompt) + source] for source in sources),
            sampler_logprobs=tuple(self.sampler_logprobs[source] for source in sources),
            versions=tuple(self.versions[source] for source in sources),
            turn_ends=tuple(starts[len(prompt) + end] - first for end in self.turn_ends),
        ), placed

    def rewarded(self, reward: float | None) -> Rollout:
        """Return the rollout with a reward added to its last turn."""
        if not reward:
            return self
        *before, last = [*self.turn_rewards, *[0.0] * (self.num_turns - len(self.turn_rewards))]
        return replace(self, turn_rewards=(*before, last + reward))


@dataclass(frozen=True, eq=False)
class RolloutGroup:
    """The G rollouts of one prompt with their rewards."""

    rollouts: Sequence[Rollout]
    rewards: torch.Tensor
    """float32 [G], minus length penalties; NaN if a rollout could not be scored."""
    rewards_by_name: Mapping[str, torch.Tensor]
    """Each reward before weighting, float32 [G], by its name."""
    greedy_reward: torch.Tensor | None = None
    """float32 [], the reward of a greedy completion, for algorithms that need one."""
    errors: tuple[str, ...] = ()
    """Errors of the calls of reward functions that raised or timed out."""
    is_dropped: bool = False
    """Whether dynamic sampling dropped the group; metrics count it, and nothing trains on it."""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """The weight of each reward in the sum."""
    logged: Sequence[Mapping[str, Any]] = ()
    """Metrics of each rollout, from its environment and from reward functions that logged them."""

    @property
    def source(self) -> str:
        """The name of the prompt's source; empty with a single source."""
        return self.rollouts[0].prompt_record.source

    def is_constant(self, compared: ComparedRewards = "returns") -> bool:
        """Return whether all rollouts have equal rewards: the group teaches the policy nothing."""
        has_reward = ~self.rewards.isnan()
        if not is_constant(self.rewards[None], has_reward[None]):
            return False
        by_turn = [rollout.turn_rewards for rollout in self.rollouts]
        if compared == "sums" or not any(map(any, by_turn)):
            return True
        if compared == "turns":
            return len(set(by_turn)) == 1
        # The sums are equal. Returns of a turn therefore differ exactly if the rewards before this turn differ.
        shape = (max(rollout.num_turns for rollout in self.rollouts), len(by_turn))
        before, has_turn = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.bool)
        for column, (rollout, rewards) in enumerate(zip(self.rollouts, by_turn, strict=True)):
            has_turn[: rollout.num_turns, column] = has_reward[column]
            for turn in range(rollout.num_turns):
                before[turn, column] = math.fsum(rewards[:turn])
        return bool(is_constant(before, has_turn).all())


def logged_means(logged: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean of the numbers under each name, over the completions with a number."""
    numbers: dict[str, list[float]] = {}
    for values in logged:
        for name, value in values.items():
            if isinstance(value, bool | float):
                numbers.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in sorted(numbers.items())}


def kept_groups(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Return the groups that dynamic sampling has not dropped."""
    return [group for group in groups if not group.is_dropped]


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """Rollouts with all inputs of the losses; the same on all ranks, and on the CPU."""

    rows: RolloutBatch
    advantages: torch.Tensor
    """float32 [B, T]."""
    old_logprobs: torch.Tensor | None
    """float32 [B, T]; None if a batch has one optimizer step, which computes them itself."""
    reference_logprobs: torch.Tensor | None
    """float32 [B, T]; None without a reference."""
    returns: torch.Tensor | None
    """float32 [B, T], the targets of the critic; None without a critic."""
    marked: torch.Tensor | None = None
    """bool [B, T], the tokens that the algorithm's `mark` chose."""
    learns: torch.Tensor | None = None
    """bool [B, T], the tokens whose policy loss counts; other tokens count only in the denominator. None: all count."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the mismatch and its correction."""
    mismatch: Mapping[str, Any] | None = None
    """Counts of the log-ratios of trainer and engine; see `count_log_ratios`."""
    teacher_logprobs: torch.Tensor | None = None
    """float32 [B, T], if a teacher scores the sampled tokens."""
    teacher_top: tuple[torch.Tensor, torch.Tensor] | None = None
    """A teacher's k most probable tokens at the places of the M tokens in the mask, int64 [M, k], row by row; and their
    log-probabilities, float32 [M, k]."""


def make_batch(
    groups: Sequence[RolloutGroup],
    spec: AlgorithmSpec,
    *,
    pad_token_id: int = 0,
    drop_truncated: bool = False,
    oldest_version: int | None = None,
    image_tokens: ImageTokens | None = None,
    teacher_prompt: Callable[[PromptRecord], Sequence[int]] | None = None,
) -> RolloutBatch | None:
    """Lay out the rollouts that the algorithm trains on; return None if there is nothing to learn.

    Rows that are not valid have an empty mask. With `drop_truncated`, truncated completions also have an empty mask,
    but stay in the baselines. Tokens of versions before `oldest_version` count as never sampled. With `image_tokens`,
    rows have the tokens of their pictures. `teacher_prompt` returns the token ids of the prompt that the teacher reads.
    """
    if not (groups := kept_groups(groups)):
        return None
    rewards = torch.stack([group.rewards for group in groups])
    # A completion that is not in the loss must not be chosen, and must not be half of a pair.
    must_end = drop_truncated and spec.chooses
    eligible = [[not (must_end and rollout.is_truncated) for rollout in group.rollouts] for group in groups]
    columns, valid = spec.select(rewards, torch.tensor(eligible))
    rewards = rewards.gather(1, columns)
    chosen = [
        [group.rollouts[column] for column in row]
        for group, row in zip(groups, columns.tolist(), strict=True)
    ]
    rollouts = [rollout for group in chosen for rollout in group]
    owners, is_trained = None, valid
    # A loss of pairs compares whole rollouts, and a critic values tokens of one row.
    if spec.level != "group" and not spec.needs_critic and any(rollout.branches for rollout in rollouts):
        found = _with_branches(chosen, columns, rewards, valid)
        rollouts, owners, columns, rewards, is_trained, valid = found
    images = None
    if image_tokens is not None:
        expanded = [rollout.with_expanded(image_tokens, pad_token_id) for rollout in rollouts]
        rollouts, images = [rollout for rollout, _ in expanded], [placed for _, placed in expanded]
    reward_parts, part_weights = _reward_parts(groups, columns) if spec.needs_parts else (None, None)
    laid_out = _lay_out(rollouts, is_trained.flatten().tolist(), pad_token_id, oldest_version)
    input_ids, attention_mask, mask, is_stale, sampler_logprobs, turn_starts = laid_out
    cut_off = torch.tensor([[drop_truncated and rollout.is_truncated] for rollout in rollouts])
    is_left_out = cut_off if owners is None else cut_off[owners]
    compared = mask if owners is None else mask & valid.view(-1, 1)
    turns = turn_rewards = None
    # A loss of completions has one advantage for all turns.
    if spec.level == "token" and any(any(rollout.turn_rewards) for rollout in rollouts):
        turns, turn_rewards = _lay_out_turns(rollouts, input_ids.shape, owners)
    greedy = [group.greedy_reward for group in groups if group.greedy_reward is not None]
    batch = RolloutBatch(
        input_ids,
        attention_mask,
        mask & ~is_left_out,
        sampler_logprobs,
        rewards,
        valid,
        columns,
        place_rewards(compared, rewards, turn_rewards),
        greedy_rewards=torch.stack(greedy) if greedy else None,
        reward_parts=reward_parts,
        part_weights=part_weights,
        baseline_mask=compared if is_left_out.any() or owners is not None else None,
        turns=turns,
        turn_rewards=turn_rewards,
        owners=owners,
        turn_starts=turn_starts,
        images=images,
        routes=[rollout.routes for rollout in rollouts]
        if any(x.routes is not None for x in rollouts)
        else None,
        prompts=[group.rollouts[0].prompt_record.prompt for group in groups],
        **_for_teacher(groups, rollouts, teacher_prompt),
    )
    # A rollout's main row may have no token to train on although its branches have some.
    if is_stale.any() or owners is not None:
        batch = batch.without(is_stale)
    if spec.level == "group" and spec.chooses:
        batch = _without_half_pairs(batch)
    return batch if batch.mask.any() else None


def _without_half_pairs(batch: RolloutBatch) -> RolloutBatch:
    """Remove groups with a row without tokens: all were stale, or the main row of an agent's rollout has none."""
    is_empty = ~batch.mask.any(dim=1).view_as(batch.valid)
    is_half = is_empty.any(dim=1, keepdim=True).expand_as(is_empty)
    left = batch.without(is_half.reshape(-1, 1) & batch.mask)
    return replace(left, valid=left.valid & ~is_half)


def _for_teacher(
    groups: Sequence[RolloutGroup],
    rollouts: Sequence[Rollout],
    teacher_prompt: Callable[[PromptRecord], Sequence[int]] | None,
) -> dict[str, Any]:
    """Return the fields of `RolloutBatch` for a teacher that reads other prompts."""
    if teacher_prompt is None:
        return {}
    return {
        "teacher_prompts": [teacher_prompt(group.rollouts[0].prompt_record) for group in groups],
        "prompt_lengths": [len(rollout.numbers("prompt_token_ids")) for rollout in rollouts],
    }


def _lay_out(
    rollouts: Sequence[Rollout], is_trained: Sequence[bool], pad_token_id: int, oldest_version: int | None
) -> tuple[torch.Tensor, ...]:
    """Return, each [B, T]: token ids, attention mask, trained and stale tokens, the engine's logprobs, turn starts."""
    lengths = [
        len(rollout.numbers("prompt_token_ids")) + len(rollout.numbers("token_ids")) for rollout in rollouts
    ]
    shape = (len(rollouts), max(lengths))
    input_ids = torch.full(shape, pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    mask, is_stale = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    sampler_logprobs, turn_starts = torch.zeros(shape), torch.full(shape, -1)
    tensors = (input_ids, attention_mask, mask, is_stale, sampler_logprobs, turn_starts)
    # Copy through numpy: torch takes five times as long for a sequence of Python numbers.
    ids, used, trained, stale, logprobs, starts = (x.numpy() for x in tensors)
    for row, (rollout, length) in enumerate(zip(rollouts, lengths, strict=True)):
        start = len(rollout.numbers("prompt_token_ids"))
        ids[row, :start] = rollout.numbers("prompt_token_ids")
        ids[row, start:length] = rollout.numbers("token_ids")
        used[row, :length] = 1
        logprobs[row, start:length] = rollout.numbers("sampler_logprobs")
        if oldest_version is not None:
            stale[row, start:length] = rollout.numbers("versions") < oldest_version
        if is_trained[row]:
            trained[row, start:length] = rollout.numbers("policy_mask")
        for first, end in rollout.turn_places:
            starts[row, start + first : start + end] = start + first
    return tensors


def _reward_parts(groups: Sequence[RolloutGroup], columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each reward before weighting, float32 [N, P, K], and the weights of the rewards."""
    weights = groups[0].reward_weights
    by_name = [torch.stack([group.rewards_by_name[name] for group in groups]) for name in weights]
    return torch.stack([part.gather(1, columns) for part in by_name]), torch.tensor(list(weights.values()))


def _with_branches(
    groups: Sequence[Sequence[Rollout]], columns: torch.Tensor, rewards: torch.Tensor, valid: torch.Tensor
) -> tuple[list[Rollout], torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Append every group's branches to its rollouts, and fill all groups up to the same number of rows.

    Returns:
        The rows; and for each row the index of its rollout's main row, its column, its reward, whether it is trained
        on, and whether baselines compare it.
    """
    num_rows = max(sum(len(rollout.rows) for rollout in group) for group in groups)
    rows: list[Rollout] = []
    owners, is_filler = [], []
    for group in groups:
        branches = [(column, row) for column, rollout in enumerate(group) for row in rollout.branches]
        num_fillers = num_rows - len(group) - len(branches)
        filler = Rollout(group[0].prompt_record, group[0].prompt_token_ids[:1], (), (), (), (), "", None)
        rows += [*group, *(row for _, row in branches), *[filler] * num_fillers]
        owners.append([*range(len(group)), *(column for column, _ in branches), *[0] * num_fillers])
        is_filler.append([False] * (num_rows - num_fillers) + [True] * num_fillers)
    places = torch.tensor(owners)
    columns, rewards, is_trained = (x.gather(1, places) for x in (columns, rewards, valid))
    is_trained = is_trained & ~torch.tensor(is_filler)
    # Baselines compare whole rollouts, not their branches.
    compared = is_trained & (torch.arange(num_rows) < len(groups[0]))
    places = (places + torch.arange(len(places))[:, None] * num_rows).flatten()
    return rows, places, columns, rewards, is_trained, compared


def _lay_out_turns(
    rollouts: Sequence[Rollout], shape: Sequence[int], owners: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the turn of each token, int64 [B, T], and the reward of each turn at its last token, float32 [B, T]."""
    turns, rewards = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    for row, rollout in enumerate(rollouts):
        first = start = len(rollout.numbers("prompt_token_ids"))
        for turn, end in enumerate(rollout.turn_ends):
            turns[row, start : first + end] = turn
            start = first + end
            if turn < len(rollout.turn_rewards) and start:
                # A turn may be empty: its reward is then at the last token before it.
                rewards[row, start - 1] += rollout.turn_rewards[turn]
    if owners is not None:
        # The tokens of branches have the advantage of the whole rollout.
        turns[owners != torch.arange(len(owners))] = 0
    return turns, rewards
