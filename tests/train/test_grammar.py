"""Grammars in training: log-probabilities are over the tokens that the grammar allowed at each position."""

import pytest
import torch
from kit.letters import letter_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from vectorlm.algorithms.registry import get_algorithm
from vectorlm.algorithms.support import Support
from vectorlm.errors import RolloutError
from vectorlm.ranks.topology import Topology
from vectorlm.rl.micro_batch import micro_batches_of
from vectorlm.rl.rollout import Rollout, RolloutGroup, make_batch
from vectorlm.train.grammar import Grammar
from vectorlm.train.language_model import LanguageModel
from vectorlm.types import PromptRecord

# The tokenizer's end token, and an end token that is usually a letter.
ENDS, VOCAB = {0, 2}, 48
WORDS = ["bed", "bee", "cow", "be"]
KINDS = [{"choice": WORDS}, {"regex": "be(d|e)?|cow"}, {"grammar": 'root ::= "be" ("d" | "e")? | "cow"'}]


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def ids(tokenizer, text):
    return tuple(tokenizer.convert_tokens_to_ids(["</s>" if letter == "$" else letter for letter in text]))


def allowed(tokenizer, written):
    """Return the allowed tokens by comparison with all words; an end token ends a word."""
    text = "".join(tokenizer.convert_ids_to_tokens(written))
    if "</s>" in text:
        return set(range(VOCAB))
    following = {word[len(text)] for word in WORDS if word.startswith(text) and len(word) > len(text)}
    return set(ids(tokenizer, "".join(sorted(following)))) | (ENDS if text in WORDS else set())


def rollout_of(prompt, tokens, mask, ends):
    num = len(tokens)
    return Rollout(
        PromptRecord("q"), prompt, tokens, mask, (0.0,) * num, (0,) * num, "", "stop", turn_ends=ends
    )


def rows_of(tokenizer, turns, left_out=()):
    """Return rollouts and their batch: one rollout for each list of turns, with a reply of two tokens between turns."""
    rollouts = []
    for texts in turns:
        tokens, mask, ends = (), (), ()
        for text in texts:
            gap = (5, 6) if tokens else ()
            written = ids(tokenizer, text)
            tokens, mask = (
                tokens + gap + written,
                mask + (False,) * len(gap) + (text not in left_out,) * len(written),
            )
            ends += (len(tokens),)
        rollouts.append(rollout_of((3, 4), tokens, mask, ends))
    rewards = torch.arange(float(len(rollouts)))
    return rollouts, make_batch([RolloutGroup(rollouts, rewards, {"r": rewards})], get_algorithm("grpo"))


def inputs(batch):
    (micro_batch,), _ = micro_batches_of(
        batch, [0], Topology(0, 0, 1, 1, "cpu"), max_tokens=10**6, keep_groups_whole=True
    )
    return micro_batch.inputs_of(batch)


TURNS = [["bed$", "cow$"], ["be", "bee$"], ["cow$b"], ["bed", "be"]]


@pytest.mark.parametrize("asked", KINDS, ids=lambda entry: next(iter(entry)))
@pytest.mark.parametrize("support", [Support(), Support(top_p=0.9, top_k=2)])
@pytest.mark.parametrize("packs", [True, False])
def test_logprobs_and_entropies_equal_a_slow_loop_over_all_words(folder, tokenizer, asked, support, packs):
    rollouts, batch = rows_of(tokenizer, TURNS)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    policy = LanguageModel(
        model, 0.7, support=support, grammar=Grammar(asked, tokenizer, VOCAB, ENDS), packs=packs
    )
    found = policy(inputs(batch), "value")
    for row, rollout in enumerate(rollouts):
        tokens = [3, 4, *rollout.token_ids]
        logits = model(torch.tensor([tokens])).logits[0] / 0.7
        start = 0
        for at, token in enumerate(rollout.token_ids):
            if not rollout.policy_mask[at]:
                start = at + 1
                continue
            start = at if at in rollout.turn_ends else start
            kept = sorted(allowed(tokenizer, rollout.token_ids[start:at]))
            assert token in kept
            scores = logits[1 + at, kept]
            if support.top_k:
                best = scores.topk(min(2, len(kept)))
                chances = best.values.softmax(-1)
                number = int((chances.cumsum(0) - chances < support.top_p).sum())
                kept = {kept[index] for index in best.indices[:number].tolist()} | {token}
                scores = logits[1 + at, sorted(kept)]
                kept = sorted(kept)
            logprobs = scores.log_softmax(-1)
            # The results are float32.
            assert found.logprobs[row, 2 + at].item() == pytest.approx(
                logprobs[kept.index(token)].item(), abs=1e-6
            )
            entropy = -(logprobs.exp() * logprobs).sum().item()
            assert found.entropies[row, 2 + at].item() == pytest.approx(entropy, abs=1e-6)


def test_json_forces_what_it_leaves_no_choice_and_ends(tokenizer):
    schema = {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}
    letters = letter_tokenizer()
    written = [*letters.encode('{"b": true}', add_special_tokens=False), 2]
    rollout = rollout_of((65,), tuple(written), (True,) * 12, (12,))
    rewards = torch.zeros(2)
    batch = make_batch([RolloutGroup([rollout] * 2, rewards, {})], get_algorithm("grpo"))
    for asked in ({"json": schema}, {"json_object": True}):
        masks = Grammar(asked, letters, 130, {2}).bitmasks(inputs(batch))[:12]
        kept = [[bit for bit in range(130) if int(row[bit // 32]) >> (bit % 32) & 1] for row in masks]
        assert kept[0] == [ord("{")]
        assert kept[11] == [2]
        assert all(token in entry for token, entry in zip(written, kept, strict=True))
    assert len(kept[2]) > 50


def test_tokens_that_are_left_out_count_and_a_strange_completion_is_refused(tokenizer):
    grammar = Grammar(KINDS[0], tokenizer, VOCAB, ENDS)
    _, batch = rows_of(tokenizer, [["bed$", "cow$"], ["be$", "bee$"]], left_out=["bed$"])
    whole = rows_of(tokenizer, [["bed$", "cow$"], ["be$", "bee$"]])[1]
    stale = torch.zeros_like(whole.mask)
    stale[:, :4] = True
    for entry in (batch, whole.without(stale)):
        rows = inputs(entry)
        assert 0 < len(grammar.bitmasks(rows)) == rows.is_asked.sum() < whole.mask.sum()
    assert torch.equal(grammar.bitmasks(inputs(batch))[:4], grammar.bitmasks(inputs(whole))[4:8])
    with pytest.raises(RolloutError, match="token 2 of a completion is 22"):
        grammar.bitmasks(inputs(rows_of(tokenizer, [["beu$"], ["bed$"]])[1]))
