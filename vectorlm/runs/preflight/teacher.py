"""Check the teacher's settings and tokenizer; imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vectorlm.algorithms.spec import AlgorithmSpec
from vectorlm.algorithms.support import Support
from vectorlm.errors import ConfigError
from vectorlm.runs.config.schema import Config, RLSettings
from vectorlm.runs.config.setting import refuse
from vectorlm.runs.preflight.local_model import description_of, number_in, own_length
from vectorlm.train.load import load_tokenizer

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "unk_token_id")
"""Tokens that must be equal besides the vocabulary; padding is never compared."""


def teacher_problems(config: Config, rl: RLSettings, spec: AlgorithmSpec) -> Iterator[str]:
    """Yield the problems of the teacher's settings."""
    # All are silent, except folders and servers, which are opened after models are loaded.
    teacher = rl.teacher
    if spec.needs_teacher and rl.hyperparameters.dynamic_sampling:
        rule = f"cannot be used with {spec.name}, which also learns from groups of equal rewards"
        yield refuse(config, "rl.dynamic_sampling", rule, "Leave it out.", True)
    if teacher is None:
        if spec.needs_teacher:
            fix = "Add the section rl.teacher with a model or a server, or choose another algorithm."
            yield refuse(config, "rl.algorithm", "needs a teacher", fix)
        return
    if (teacher.model is None) == (teacher.server is None):
        yield "the section 'rl.teacher' must name either a model or a server. Add one, or remove one."
    if teacher.model is not None and not (Path(teacher.model) / "config.json").is_file():
        yield refuse(config, "rl.teacher.model", "needs a config.json", "Name a folder of save_pretrained.")
    elif teacher.model is not None:
        fix, longest = "Use a teacher of the policy's family.", config.train_parameters.max_seq_len
        described, its_own = (description_of(Path(folder)) or {} for folder in (config.model, teacher.model))
        mine, its = (number_in(description, ["vocab_size"]) for description in (described, its_own))
        if mine is not None and its is not None and its < mine:
            rule = f"must have embeddings for all {mine} tokens of the policy, and has {its}"
            yield refuse(config, "rl.teacher.model", rule, fix)
        limit = own_length(its_own)
        if limit is not None and limit < longest:
            rule = f"must read train_parameters.max_seq_len={longest} tokens, and reads at most {limit}"
            yield refuse(config, "rl.teacher.model", rule, fix)
    if teacher.kind == "full" and teacher.server is not None:
        rule = "needs the teacher's whole distribution, and a server returns only the sampled tokens"
        yield refuse(config, "rl.teacher.kind", rule, "Use sampled, or name the teacher's folder.")
    if teacher.kind == "sampled" and not (spec.level == "token" and spec.samples_from_policy):
        rule = f"cannot be sampled with {spec.name}, which does not learn from advantages of sampled tokens"
        yield refuse(config, "rl.teacher.kind", rule, "Use full, or another algorithm.")
    sampling = rl.collect.sampling
    cuts = not Support.of(sampling).is_whole or sampling.get("structured_outputs")
    if teacher.kind == "full" and teacher.beta == 0 and cuts:
        rule = "must be above 0 with top_p, top_k, min_p or a grammar, which remove tokens that the teacher may draw"
        yield refuse(config, "rl.teacher.beta", rule, "Use 0.1 or more.")
    temperature = sampling["temperature"]
    if teacher.server is not None and temperature != 1:
        rule = "must be 1.0 with rl.teacher.server, which scores only at this temperature"
        fix = "Use 1.0, or name the teacher's folder."
        yield refuse(config, "rl.sampling_params.temperature", rule, fix, temperature)


def check_teacher(config: Config) -> None:
    """Raise `ConfigError` unless the teacher has the policy's tokenizer.

    A server only returns the texts of the policy's tokens, so special tokens and further tokens are not compared.

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
        elif (limit := server.max_model_len()) <= longest:
            rule = f"must read one token more than max_seq_len={longest}, and reads at most {limit}"
            raise ConfigError(refuse(config, path, rule, f"Start it with `--max-model-len {longest + 1}`."))
    if difference is not None:
        fix = "Distillation compares token by token: use a teacher of the policy's family."
        raise ConfigError(refuse(config, path, f"must have the policy's tokenizer: {difference}", fix))


def tokenizer_difference(policy: Any, teacher: Any) -> str | None:
    """Describe the first difference of two tokenizers; None if all tokens are equal."""
    tokens = [
        {index: token for token, index in tokenizer.get_vocab().items()} for tokenizer in (policy, teacher)
    ]
    for index in sorted(tokens[0].keys() | tokens[1].keys()):
        mine, its = (vocabulary.get(index) for vocabulary in tokens)
        if mine != its:
            return f"token {index} is {mine!r} for the policy and {its!r} for the teacher"
    for name in SPECIAL_TOKENS:
        mine, its = getattr(policy, name), getattr(teacher, name)
        if mine != its:
            return f"{name} is {mine} for the policy and {its} for the teacher"
    return None
