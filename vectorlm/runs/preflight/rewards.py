"""Whether reward functions can be called with the columns of the prompts; loads the functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vectorlm.algorithms.spec import AlgorithmSpec
from vectorlm.algorithms.support import Support
from vectorlm.errors import ConfigError
from vectorlm.rl.rewards.registry import EXTRAS, LOG, OF_TRL, RESERVED, RewardSignature, get_reward
from vectorlm.runs.config.schema import Config, RLSettings
from vectorlm.runs.config.setting import refuse
from vectorlm.runs.preflight.local_model import description_of, number_in, own_length
from vectorlm.settings import nearest
from vectorlm.train.load import load_tokenizer
from vectorlm.types import PromptRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def reward_problems(
    config: Config,
    prompts: Mapping[str, Sequence[PromptRecord]],
    held_out: Mapping[str, Sequence[PromptRecord]],
) -> Iterator[str]:
    """Yield each parameter of a reward function that nothing supplies.

    Raises:
        ConfigError: A function or its file does not exist.
    """
    # Costs more than a minute: the first call comes after models are loaded and completions sampled.
    for path, value, name, records, place in _uses(config, prompts, held_out):
        for rule, fix in signature_problems(get_reward(name), records, place):
            yield refuse(config, path, rule, fix, value)


def reward_notes(
    config: Config,
    prompts: Mapping[str, Sequence[PromptRecord]],
    held_out: Mapping[str, Sequence[PromptRecord]],
) -> Iterator[str]:
    """Say which parameters of a reward function both a column and the run could fill."""
    for _, _, name, records, place in _uses(config, prompts, held_out):
        kinds = RewardSignature.of(get_reward(name)).kinds
        # Silent: a dataset's own conversation would be scored instead of the one with the completion.
        for each in sorted(
            {column for record in records for column in record.columns} & {*EXTRAS} & {*kinds}
        ):
            gets = "the run's function, not the column" if each == LOG else "the column, not what the run has"
            yield f"{place}: the reward {name} gets as {each!r} {gets}. Rename the column if it should get the other"


def _uses(
    config: Config,
    prompts: Mapping[str, Sequence[PromptRecord]],
    held_out: Mapping[str, Sequence[PromptRecord]],
) -> Iterator[tuple[str, Any, str, Sequence[PromptRecord], str]]:
    """Yield the setting of each reward and its value, the reward's name, and the prompts with their setting."""
    rl = config.rl
    for source, each in ({} if rl is None else rl.by_source).items():
        place = f"rl.sources.{source}" if source else "rl"
        has_own = rl is not None and source and rl.collect.sources[source].rewards
        path = f"{place}.rewards" if has_own else "rl.rewards"
        for name, weight in each.rewards.items() if prompts[source] else ():
            yield f"{path}.{name}", weight, name, prompts[source], f"{place}.prompts"
    sampler = config.train_parameters.sampler
    further = () if sampler is None else sampler.evaluation.further_rewards
    for source, name in [*config.held_out_rewards.items(), *(("", name) for name in further)]:
        asked = f"rl.sources.{source}.held_out" if source else "train_parameters.sampler.prompts"
        path = asked if source else "train_parameters.sampler.reward"
        if records := held_out.get(source):
            yield path, name, name, records, asked


def signature_problems(
    reward: Callable[..., Any], records: Sequence[PromptRecord], source: str
) -> Iterator[tuple[str, str]]:
    """Yield the rule and the fix for each parameter of a reward that these prompts, from `source`, cannot fill."""
    signature = RewardSignature.of(reward)
    columns = {name for record in records for name in record.columns if name not in RESERVED}
    # Silent: it scores without a look at what was sampled.
    if not signature.sees_completion:
        yield "has no parameter for the completion", "Add a parameter `completion`, or `messages`."
    for name in signature.missing(columns):
        rule = f"asks for {name!r}, which nothing supplies"
        if name in OF_TRL:
            yield f"{rule}: it belongs to TRL's trainer", f"Give it a default: `{name}=None`."
        else:
            has = ", ".join(sorted(columns)) or "none but `prompt`"
            fix = nearest(name, columns) or "Give it a default, or add the column."
            yield f"{rule}: the columns of {source} are {has}", fix
    if signature.takes_lists:
        return  # A list has None where a row lacks the column.
    for name in signature.required:
        lacking = next((place for place, each in enumerate(records) if name not in each.columns), None)
        if name in columns and lacking is not None:
            fix = "Give it a default, or fill the column."
            yield f"asks for {name!r}, which prompt {lacking} of {source} does not have", fix


SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "unk_token_id")
"""What must be equal besides the vocabulary; the padding token is in no distribution that counts."""


def teacher_problems(config: Config, rl: RLSettings, spec: AlgorithmSpec) -> Iterator[str]:
    """Yield what the settings themselves forbid."""
    # All of these are silent, but for folders and servers, which are opened after models are loaded.
    teacher = rl.teacher
    if spec.needs_teacher and rl.hyperparameters.dynamic_sampling:
        rule = f"would drop groups of equal rewards, and {spec.name} learns from them too"
        yield refuse(config, "rl.dynamic_sampling", rule, "Leave it out.", True)
    if teacher is None:
        if spec.needs_teacher:
            fix = "Add the section rl.teacher with a model or a server, or choose another algorithm."
            yield refuse(config, "rl.algorithm", "learns from a teacher, and there is none", fix)
        return
    if (teacher.model is None) == (teacher.server is None):
        what = "names neither" if teacher.model is None else "names both"
        yield f"the section 'rl.teacher' {what} a model and a server: it must name one of them."
    if teacher.model is not None and not (Path(teacher.model) / "config.json").is_file():
        yield refuse(config, "rl.teacher.model", "has no config.json", "Name a folder of save_pretrained.")
    elif teacher.model is not None:
        fix, longest = "Use a teacher of the policy's family.", config.train_parameters.max_seq_len
        described, its_own = (description_of(Path(each)) or {} for each in (config.model, teacher.model))
        mine, its = (number_in(each, ["vocab_size"]) for each in (described, its_own))
        if mine is not None and its is not None and its < mine:
            rule = f"has embeddings for {its} tokens, and the policy for {mine}"
            yield refuse(config, "rl.teacher.model", rule, fix)
        limit = own_length(its_own)
        if limit is not None and limit < longest:
            rule = f"reads at most {limit} tokens, and train_parameters.max_seq_len={longest}"
            yield refuse(config, "rl.teacher.model", rule, fix)
    if teacher.kind == "full" and teacher.server is not None:
        rule = "needs the teacher's whole distribution, and a server returns only the sampled tokens"
        yield refuse(config, "rl.teacher.kind", rule, "Use sampled, or name the teacher's folder.")
    if teacher.kind == "sampled" and not (spec.level == "token" and spec.samples_from_policy):
        rule = f"changes the advantages of tokens that the policy sampled, and {spec.name} learns otherwise"
        yield refuse(config, "rl.teacher.kind", rule, "Use full, or another algorithm.")
    sampling = rl.collect.sampling
    cuts = not Support.of(sampling).is_whole or sampling.get("structured_outputs")
    if teacher.kind == "full" and teacher.beta == 0 and cuts:
        rule = "is infinite where top_p, top_k, min_p or a grammar cut tokens that the teacher may draw"
        yield refuse(config, "rl.teacher.beta", rule, "Use 0.1 or more, or do not cut.")
    temperature = sampling["temperature"]
    if teacher.server is not None and temperature != 1:
        rule = "must be 1.0 with rl.teacher.server, which scores at this temperature alone"
        fix = "Use 1.0, or name the teacher's folder."
        yield refuse(config, "rl.sampling_params.temperature", rule, fix, temperature)


def check_teacher(config: Config) -> None:
    """Raise `ConfigError` unless the teacher has the policy's tokenizer; reads both, or asks the server.

    A server shows the text of each token and no more: special tokens are not compared, nor are tokens that one
    tokenizer has and the policy's has not.

    Raises:
        EngineError: The server does not answer, or does not answer like vLLM.
    """
    rl = config.rl
    if rl is None or rl.teacher is None:
        return
    # Silent: the policy would learn other tokens' probabilities.
    policy, difference = load_tokenizer(config.model), None
    path = "rl.teacher.model" if rl.teacher.model is not None else "rl.teacher.server"
    if rl.teacher.model is not None:
        difference = tokenizer_difference(policy, load_tokenizer(rl.teacher.model))
    elif rl.teacher.server is not None:
        # This imports the HTTP client, which other checks do without.
        from vectorlm.sampling.backends.server.client import ScoringServer

        server = ScoringServer(rl.teacher.server, rl.teacher.timeout_s)
        longest = config.train_parameters.max_seq_len
        token_ids = sorted(policy.get_vocab().values())
        mine, its = str(policy.decode(token_ids)), server.decode(token_ids)
        if mine != its:
            pairs = enumerate(zip(mine, its, strict=False))
            place = next((index for index, (a, b) in pairs if a != b), min(len(mine), len(its)))
            near = slice(max(place - 8, 0), place + 8)
            difference = (
                f"in the text of all tokens, it has {its[near]!r} where the policy has {mine[near]!r}"
            )
        elif (room := server.max_model_len()) <= longest:
            rule = f"has room for {room} tokens, and must have room for one more than max_seq_len={longest}"
            raise ConfigError(refuse(config, path, rule, f"Start it with `--max-model-len {longest + 1}`."))
    if difference is not None:
        fix = "Distillation compares token by token: use a teacher of the policy's family."
        raise ConfigError(refuse(config, path, f"has another tokenizer than the policy: {difference}", fix))


def tokenizer_difference(policy: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> str | None:
    """Say where two tokenizers first differ; None where they mean the same by every token."""
    tokens = [{index: token for token, index in each.get_vocab().items()} for each in (policy, teacher)]
    for index in sorted(tokens[0].keys() | tokens[1].keys()):
        mine, its = (each.get(index) for each in tokens)
        if mine != its:
            return f"token {index} is {mine!r} for the policy and {its!r} for the teacher"
    for name in SPECIAL_TOKENS:
        mine, its = getattr(policy, name), getattr(teacher, name)
        if mine != its:
            return f"{name} is {mine} for the policy and {its} for the teacher"
    return None
