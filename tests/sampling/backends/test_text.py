"""Texts decoded in one call, compared with vLLM's token-by-token decoding."""

from types import SimpleNamespace

import hypothesis
import pytest
from hypothesis import strategies
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from vectorlm.sampling.backends.vllm.backend import Texts
from vectorlm.sampling.backends.vllm.shim import make_sampling_params

CORPUS = ["the cat sat on the mat, ", "naïve café — Füße", "日本語 🙂🙃", "x = 3 * (4 + 5)\n\n"] * 20
SPECIAL = [AddedToken(name, special=True) for name in ("<s>", "</s>", "<|user|>")]


def by_bytes():
    """Return a tokenizer like GPT-2's and Qwen's: tokens are bytes, and a character may need several."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    return made


def by_pieces():
    """Return a tokenizer like Llama-2's: a space begins a word, the first is stripped, unknown characters are bytes."""
    made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=names))
    return made


def by_words():
    """Return a tokenizer like BERT's."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=150, special_tokens=["[UNK]"]))
    return made


@pytest.fixture(scope="module", params=[by_bytes, by_pieces, by_words], ids=lambda make: make.__name__)
def tokenizer(request):
    made = PreTrainedTokenizerFast(tokenizer_object=request.param())
    made.add_tokens(SPECIAL, special_tokens=True)
    return made


IDS = strategies.lists(strategies.integers(0, 10**6), max_size=20)
FLAGS = strategies.fixed_dictionaries(
    {
        name: strategies.booleans()
        for name in ("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output")
    }
)


def text_of_vllm(tokenizer, prompt, token_ids, finish_reason, flags):
    """Decode token by token with vLLM's detokenizer, as its output processor does."""
    request = SimpleNamespace(
        request_id="a", prompt_token_ids=prompt, sampling_params=SamplingParams(**flags)
    )
    steps = FastIncrementalDetokenizer(tokenizer, request)
    for index, token in enumerate(token_ids):
        steps.update([token], finish_reason == "stop" and index == len(token_ids) - 1)
    return steps.get_next_output_text(finished=True, delta=False)


def texts_of(tokenizer, prompt, completions, flags):
    texts, params = Texts(tokenizer), make_sampling_params(flags)
    texts.defer("a", params)
    assert not params.detokenize
    outputs = [SimpleNamespace(token_ids=ids, finish_reason=reason, text="") for ids, reason in completions]
    texts.fill(SimpleNamespace(request_id="a", prompt_token_ids=prompt, outputs=outputs))
    return [output.text for output in outputs]


@hypothesis.given(IDS, IDS, strategies.sampled_from(["stop", "length"]), FLAGS)
def test_any_tokens_decode_to_vllm_s_own_text(tokenizer, prompt, token_ids, finish_reason, flags):
    prompt, token_ids = ([token % len(tokenizer) for token in ids] for ids in (prompt or [0], token_ids))
    expected = text_of_vllm(tokenizer, prompt, token_ids, finish_reason, flags)
    assert texts_of(tokenizer, prompt, [(token_ids, finish_reason)], flags) == [expected]


@hypothesis.given(strategies.text("aeth cs,é日🙂 \n", min_size=1), strategies.text("aeth cs,é日🙂 \n"))
def test_texts_decode_to_vllm_s_own_text(tokenizer, prompt, text):
    prompt, token_ids = (tokenizer(part, add_special_tokens=False).input_ids for part in (prompt, text))
    prompt = prompt or [0]
    expected = text_of_vllm(tokenizer, prompt, token_ids, "length", {})
    assert texts_of(tokenizer, prompt, [(token_ids, "length")], {}) == [expected]


def test_text_that_is_not_wanted_or_has_to_be_searched_is_left_to_vllm(tokenizer):
    for given in ({"detokenize": False}, {"stop": ["the"]}):
        params = make_sampling_params(given)
        Texts(tokenizer).defer("a", params)
        assert params.detokenize == ("stop" in given)
    params = make_sampling_params({})
    Texts(None).defer("a", params)
    assert params.detokenize
