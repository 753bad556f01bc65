"""Limits of HFEngine that the contract does not cover; test_vllm_sampling.py compares it with vLLM."""

import contextlib
import itertools

import pytest
import torch
from kit.families import WITH_BUFFERS, save_family
from kit.module_trainer import ModuleTrainer
from swap_cases import FP32_GAP, largest_gap
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MptConfig,
    MptForCausalLM,
    OpenAIGPTConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
)

from vectorlm.errors import EngineError
from vectorlm.ranks.topology import Topology
from vectorlm.sampling.backends import generation, transformers
from vectorlm.sampling.backends.transformers import Transformers
from vectorlm.sampling.inline_engines import HFEngine

PROMPTS = ["abcabc", [5, 6, 7, 8, 9, 5, 6], [10]]
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "logprobs": 0}
SAMPLED = {**GREEDY, "temperature": 1.0, "seed": 3, "n": 2}


TINY_LLAMA = {"hidden_size": 64}


@pytest.fixture(scope="module")
def engine(folder):
    with HFEngine(folder) as engine:
        yield engine


def tokens(answers):
    return [[completion.token_ids for completion in completions] for completions in answers]


def test_slices_and_batches_change_nothing(engine, folder, monkeypatch):
    expected = tokens(engine.sample(PROMPTS, SAMPLED))
    monkeypatch.setattr(generation, "SLICE_TOKENS", 1)
    assert tokens(engine.sample(PROMPTS, SAMPLED)) == expected
    monkeypatch.setattr(generation, "SLICE_TOKENS", 5)
    with HFEngine(folder, batch_size=1) as one_by_one:
        assert tokens(one_by_one.sample(PROMPTS, SAMPLED)) == expected


def test_tokens_are_drawn_as_often_as_they_are_likely(engine, folder):
    num_draws = 2000
    params = {"n": num_draws, "max_tokens": 1, "seed": 0, "ignore_eos": True, "temperature": 0.5}
    (completions,) = engine.sample([[2, 3]], params)
    counts = torch.bincount(
        torch.tensor([completion.token_ids[0] for completion in completions]), minlength=48
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = (model(torch.tensor([[2, 3]])).logits[0, -1].double() / 0.5).softmax(-1) * num_draws
    # Chi-square with 47 degrees of freedom exceeds 90 once in 10,000 seeds; at temperature 1 it would be hundreds.
    assert ((counts - expected) ** 2 / expected).sum() < 90


def test_sampling_leaves_the_trainers_random_state_alone(engine):
    before = torch.get_rng_state()
    engine.sample(PROMPTS, {**SAMPLED, "seed": None})
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_seed_every_call_draws_anew(engine):
    unseeded = {**SAMPLED, "seed": None}
    assert tokens(engine.sample(PROMPTS, unseeded)) != tokens(engine.sample(PROMPTS, unseeded))


def test_learned_positions_do_not_count_the_padding(tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=48, n_positions=64, n_embd=32, n_layer=2, n_head=2, eos_token_id=0)
    model = GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path)
    with HFEngine(tmp_path) as engine:
        completions = [completion for (completion,) in engine.sample([[2], [5, 6, 7, 8]], GREEDY)]
        assert largest_gap(completions, model) < FP32_GAP
        with pytest.raises(EngineError, match="tokenizer"):
            engine.sample("abc")


@pytest.mark.parametrize("slice_tokens", [5, 32])
def test_a_sequence_that_has_ended_needs_no_positions_beyond_the_context(tmp_path, monkeypatch, slice_tokens):
    monkeypatch.setattr(generation, "SLICE_TOKENS", slice_tokens)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=48, n_positions=64, n_embd=32, n_layer=2, n_head=2, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    prompts, limits = [[5] * 62, [2, 3], [7, 8] * 25], [40, 40, 1]
    params = [{**GREEDY, "max_tokens": limit} for limit in limits]
    with HFEngine(tmp_path) as engine:
        together = engine.sample(prompts, params)
        alone = [engine.sample([prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
    assert tokens(together) == tokens(alone)
    assert [len(completion.token_ids) for (completion,) in together] == [2, 40, 1]
    for (mine,), (theirs,) in zip(together, alone, strict=True):
        assert mine.sampler_logprobs == pytest.approx(theirs.sampler_logprobs, abs=1e-5)


@pytest.mark.parametrize(("asked", "longest"), [(None, 64), (9, 9), (65, 64)])
def test_prompt_and_completion_are_no_longer_than_the_model_or_the_run_allows(folder, asked, longest):
    backend = Transformers(str(folder), receiver="live", max_model_len=asked)
    with pytest.raises(EngineError, match=f"{longest} tokens"):
        backend.submit("long", [2] * longest, GREEDY)
    for index, limit in enumerate((24, None)):
        backend.submit(f"{index}", [2] * (longest - 4), {**GREEDY, "max_tokens": limit})
    ended = [output.completions[0] for output in backend.poll()]
    assert [(len(completion.token_ids), completion.finish_reason) for completion in ended] == [
        (4, "length")
    ] * 2


def test_a_model_without_a_limit_needs_one_from_the_caller(tmp_path):
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=48, hidden_size=32, n_layer=2, n_head=2)).eval()
    model.save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="max_model_len="):
        HFEngine(tmp_path)
    with HFEngine(tmp_path, max_model_len=32) as engine:
        completions = [
            completion for (completion,) in engine.sample([[2], [5] * 20], {**GREEDY, "max_tokens": None})
        ]
    assert [len(completion.token_ids) for completion in completions] == [31, 12]
    assert largest_gap(completions, model) < FP32_GAP


def test_a_limit_by_another_name_is_the_models(tmp_path):
    MptForCausalLM(
        MptConfig(vocab_size=48, d_model=32, n_layers=2, n_heads=2, max_seq_len=64)
    ).save_pretrained(tmp_path)
    with HFEngine(tmp_path) as engine, pytest.raises(EngineError, match="64 tokens"):
        engine.sample([[2] * 64])


RECURRENT = {"vocab_size": 48, "hidden_size": 64, "num_hidden_layers": 3, "eos_token_id": None}
RECURRENT_GEMMA = {"num_attention_heads": 4, "lru_width": 64, "attention_window_size": 32}


@pytest.mark.parametrize(
    ("config", "size"),
    [
        # It counts padding as tokens.
        (RwkvConfig(**RECURRENT, attention_hidden_size=64, context_length=64), 1),
        # A second call cannot continue its cache.
        (RecurrentGemmaConfig(**RECURRENT, **RECURRENT_GEMMA), 1),
        # Its cache has another name.
        (MambaConfig(**RECURRENT, state_size=8), 64),
        # It has no cache.
        (OpenAIGPTConfig(vocab_size=48, n_embd=64, n_layer=2, n_head=4, n_positions=64), 64),
    ],
)
def test_models_that_cannot_be_batched_or_continued_sample_as_alone(tmp_path, monkeypatch, config, size):
    monkeypatch.setattr(generation, "SLICE_TOKENS", 5)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6 if weight.ndim > 1 else 1)  # Otherwise all tokens are about as likely.
    model.save_pretrained(tmp_path)
    warns = (
        contextlib.nullcontext() if size > 1 else pytest.warns(UserWarning, match="one completion at a time")
    )
    with warns, HFEngine(tmp_path, max_model_len=64) as engine:
        assert engine.local._channel._scheduler._backend.max_num_seqs == size
        answers = engine.sample([[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1]], SAMPLED)
    for completion in itertools.chain(*answers):
        read = len(completion.prompt_token_ids)
        token_ids = torch.tensor([[*completion.prompt_token_ids, *completion.token_ids]])
        with torch.no_grad():
            logprobs = model.eval()(token_ids).logits.log_softmax(-1)[0, read - 1 : -1]
        expected = logprobs.gather(1, token_ids[0, read:, None])[:, 0]
        assert torch.allclose(torch.tensor(completion.sampler_logprobs), expected, atol=1e-3)


def test_a_model_whose_slices_are_wrong_is_refused(folder, monkeypatch):
    monkeypatch.setattr(transformers, "computes_alike", lambda *_, **__: False)
    with pytest.raises(EngineError, match="LlamaForCausalLM cannot be sampled with transformers"):
        HFEngine(folder)


def test_every_sequence_is_sampled_by_its_own_parameters(engine):
    greedy = tokens(engine.sample([[2, 3]], GREEDY))[0]
    wild = {**GREEDY, "temperature": 5.0, "seed": 1}
    cuts = [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 0.0}]
    *cut, free = tokens(engine.sample([[2, 3]] * 5, [*({**wild, **setting} for setting in cuts), wild]))
    assert cut == [greedy] * 4
    assert free != greedy


def test_log_probabilities_of_the_model_itself_come_by_name(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with HFEngine(folder, logprobs_mode="raw_logprobs") as raw:
        (completion,) = raw.sample([[2, 3]], {**SAMPLED, "n": 1, "temperature": 0.5, "top_k": 4})[0]
    assert largest_gap([completion], model) < FP32_GAP
    with pytest.raises(EngineError, match="logprobs_mode="):
        HFEngine(folder, logprobs_mode="raw_logits")


def test_a_penalty_counts_neither_padding_nor_neighbours(engine):
    penalised = {**GREEDY, "repetition_penalty": 5.0}
    alone = tokens(engine.sample([[2]], penalised))
    assert tokens(engine.sample([[2], [5] * 30], [penalised, GREEDY]))[:1] == alone


def test_weights_that_sleep_take_no_memory(folder):
    backend = Transformers(str(folder), receiver="live")
    parameters = list(backend.model.parameters())
    num_elements = sum(parameter.numel() for parameter in parameters)
    backend.sleep(frozenset({"weights"}), frozenset())
    assert sum(parameter.untyped_storage().nbytes() for parameter in parameters) == 0
    backend.wake_up(frozenset({"weights"}))
    assert sum(parameter.numel() for parameter in parameters) == num_elements > 0


def test_a_bfloat16_copy_holds_the_trainers_weights_rounded(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01
    trainer = ModuleTrainer(model, torch.optim.SGD(model.parameters()), lambda *_: None, Topology())
    backend = Transformers(str(folder), receiver="live", dtype="bfloat16")
    layout = backend.connect(trainer.manifest(), None, "base")
    backend.load(0, trainer.publish(layout, True), ("base",), False)
    held = backend.model.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(held[name], tensor.bfloat16())


def test_buffers_that_a_model_computes_with_are_sent(tmp_path):
    folder = save_family(WITH_BUFFERS["Apertus"], tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, buffer in model.named_buffers():
        if name.endswith(".beta"):
            buffer.fill_(0.9)
    with HFEngine(folder) as engine:
        before = engine.sample([[5, 6, 7]], GREEDY)
        engine.update(model, 0)
        ((completion,),) = engine.sample([[5, 6, 7]], GREEDY)
    assert largest_gap([completion], model) < FP32_GAP
    assert completion.sampler_logprobs != pytest.approx(before[0][0].sampler_logprobs, abs=1e-2)


@pytest.mark.parametrize("steps", [6, 8, 12])
def test_a_batch_goes_on_from_an_interrupt_as_without_one(folder, monkeypatch, steps):
    """In a notebook, the user may call `result` again after Ctrl-C, and the batch may contain other requests."""
    monkeypatch.setattr(generation, "SLICE_TOKENS", 5)
    shape, left = generation._Sampler._shape, [steps]

    def interrupted(*args):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return shape(*args)

    with HFEngine(folder) as engine:
        expected = engine.sample(PROMPTS, SAMPLED)
        batch = engine.submit(PROMPTS, SAMPLED)
        monkeypatch.setattr(generation._Sampler, "_shape", interrupted)
        with pytest.raises(KeyboardInterrupt):
            batch.result()
        found = batch.result()
    assert tokens(found) == tokens(expected)
    for one, other in zip(found, expected, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            assert mine.sampler_logprobs == pytest.approx(theirs.sampler_logprobs, abs=1e-5)


def test_a_model_that_raises_ends_its_batch_and_no_other(folder, monkeypatch):
    backend = Transformers(str(folder), receiver="live", max_num_seqs=1)
    backend.submit("spoiled", [2], GREEDY)
    backend.submit("spared", [3], GREEDY)

    def fail(*args, **kwargs):
        raise ArithmeticError("not today")

    with monkeypatch.context() as patch:
        patch.setattr(backend.model, "generate", fail)
        (output,) = backend.poll()
    assert output.name == "spoiled"
    with pytest.raises(EngineError, match=r"(?s)ArithmeticError: not today.*Traceback"):
        raise output.error
    while not (outputs := backend.poll()):
        pass
    (output,) = outputs
    assert (output.name, len(output.completions[0].token_ids)) == ("spared", 24)


def test_a_folder_that_holds_no_whole_model_is_refused(tmp_path, folder):
    with pytest.raises(EngineError, match=r"config\.json"):
        HFEngine(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "model.norm.weight"}
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(EngineError, match=r"model\.norm\.weight"):
        HFEngine(tmp_path)
