"""Prompts with images: the engine computes the same as transformers, before and after updates."""

import pytest
import torch
from kit.vision_models import KINDS, picture, save_llava, save_vlm

from vectorlm import HFEngine, SamplingEngine
from vectorlm.algorithms.registry import get_algorithm
from vectorlm.data.encoding import encode
from vectorlm.data.images import PicturedIds, image_tokens_of, picture_of
from vectorlm.errors import EngineError
from vectorlm.rl.rollout import Rollout, RolloutGroup, make_batch
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.load import load_model, load_tokenizer
from vectorlm.types import PromptRecord

pytestmark = pytest.mark.slow
ENGINE = {
    "dtype": "float32",
    "max_model_len": 256,
    "kv_cache_memory_bytes": 32 << 20,
    "limit_mm_per_prompt": {"image": 3},
}
SAMPLED = {"max_tokens": 8, "logprobs": 0, "ignore_eos": True, "seed": 3, "n": 2}
RED, BLUE, WIDE = picture("r"), picture("b"), picture("g", (112, 56))
GAP = 1e-5


def chat(*images):
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]


CHATS = [chat(RED), chat(WIDE, BLUE), chat(RED, RED, WIDE), chat()]


@pytest.fixture(scope="module", params=KINDS)
def path(request, tmp_path_factory):
    return save_vlm(request.param, tmp_path_factory.mktemp("vlm") / "model")


@pytest.fixture(scope="module")
def engine(path):
    with SamplingEngine(str(path), **ENGINE) as engine:
        yield engine


def gap(answers, chats, model, path):
    """Return the largest difference of a log-probability from transformers', in float64 after the logits."""
    from transformers import AutoProcessor

    processor, found = AutoProcessor.from_pretrained(path), 0.0
    for asked, completions in zip(chats, answers, strict=True):
        images = [part["image"] for part in asked[0]["content"] if part["type"] == "image"]
        text = processor.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        for completion in completions:
            given = dict(processor(text=text, **({"images": images} if images else {}), return_tensors="pt"))
            sampled = torch.tensor([completion.token_ids])
            given["input_ids"] = torch.cat([given["input_ids"], sampled], 1)
            given["attention_mask"] = torch.ones_like(given["input_ids"])
            if "mm_token_type_ids" in given:
                types = [given["mm_token_type_ids"], torch.zeros_like(sampled)]
                given["mm_token_type_ids"] = torch.cat(types, 1)
            with torch.no_grad():
                logprobs = model(**given).logits[0].double().log_softmax(-1)
            mine = logprobs[-sampled.shape[1] - 1 : -1].gather(1, sampled.T)[:, 0]
            theirs = torch.tensor(completion.sampler_logprobs).double()
            found = max(found, (mine - theirs).abs().max().item())
    return found


def test_the_engine_computes_what_transformers_computes_after_every_update(engine, path):
    """The images stay the same: if updates did not empty the encoder cache, the engine would use old features."""
    model, tokenizer = load_model(path).eval(), load_tokenizer(path)
    answers = engine.sample(CHATS, SAMPLED)
    assert gap(answers, CHATS, model, path) < GAP
    for asked, completions in zip(CHATS, answers, strict=True):
        unexpanded = tuple(encode(asked, lambda: tokenizer))
        assert all(completion.prompt_token_ids == unexpanded for completion in completions)
    for version, part in enumerate([".vis", ""]):
        torch.manual_seed(version)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if part in name:
                    weight.add_(0.05 * torch.randn_like(weight))
        engine.update(model, version)
        before, answers = answers, engine.sample(CHATS, SAMPLED)
        assert gap(answers, CHATS, model, path) < GAP
        old = [gap([old], [asked], model, path) for old, asked in zip(before, CHATS, strict=True)]
        assert min(old[:3]) > 0.02, "the update changed little, so the gap proves little"
        # A prompt of text alone does not use the vision model.
        assert (old[3] > 0.02) == (part == "")
    engine.update(load_model(path), version + 1)


def test_encoded_prompts_are_prompts(engine, path):
    tokenizer = load_tokenizer(path)
    encoded = [encode(asked, lambda: tokenizer) for asked in CHATS]
    assert engine.sample(encoded, SAMPLED) == engine.sample(CHATS, SAMPLED)


def test_the_batch_of_rollouts_has_the_engines_log_probabilities(engine, path):
    """The test follows a run: completions, rollouts, expanded rows, packed passes."""
    tokenizer = load_tokenizer(path)
    tokens, groups = image_tokens_of(tokenizer), []
    for asked, completions in zip(CHATS[:3], engine.sample(CHATS[:3], SAMPLED), strict=True):
        record, pictures = PromptRecord(asked), encode(asked, lambda: tokenizer).pictures
        rollouts = [Rollout.from_completion(record, completion, pictures) for completion in completions]
        groups.append(RolloutGroup(rollouts, torch.tensor([0.0, 1.0]), {}, reward_weights={}))
    batch = make_batch(groups, get_algorithm("grpo"), image_tokens=tokens)
    policy = LanguageModel(load_model(path).eval(), image_tokens=tokens)
    from vectorlm.train.packing import Rows

    rows = Rows(
        batch.input_ids, batch.attention_mask, batch.mask, [row // 2 for row in range(6)], images=batch.images
    )
    with torch.no_grad():
        found = policy.logprobs(rows)[batch.mask]
    assert int(batch.mask.sum()) == 6 * 8
    assert (found - batch.sampler_logprobs[batch.mask]).abs().max() < GAP


def test_a_picture_that_cannot_be_read_fails_its_request_alone(engine, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    with pytest.raises(EngineError, match=r"broken\.png"):
        engine.sample([chat(RED), chat(tmp_path / "broken.png")], SAMPLED)
    with pytest.raises(EngineError, match=r"missing\.png"):
        engine.sample([chat(tmp_path / "missing.png")], SAMPLED)
    assert len(engine.sample(CHATS[:1], SAMPLED)) == 1


def test_more_pictures_than_placeholders_are_refused(engine, path):
    tokenizer = load_tokenizer(path)
    ids = encode(chat(RED), lambda: tokenizer)
    with pytest.raises(EngineError):
        engine.sample([PicturedIds.of(ids, ids.pictures * 2)], SAMPLED)
    assert len(engine.sample(CHATS[:1], SAMPLED)) == 1


def test_a_model_whose_weights_have_other_names_is_refused_with_them(tmp_path):
    """transformers 5.19 saves LLaVA with other names."""
    path = save_llava(tmp_path / "llava")
    with pytest.raises(EngineError) as raised, SamplingEngine(str(path), **ENGINE) as engine:
        engine.wait_until_ready()
    text = str(raised.value).partition("\n\n")[0]
    assert "LlavaForConditionalGeneration" in text
    assert "vision_tower.embeddings" in text
    assert "vision_tower.vision_model." in text
    assert len(text) < 600


def test_other_engines_take_no_pictures(folder):
    with HFEngine(folder) as engine, pytest.raises(EngineError, match="images"):
        engine.sample([PicturedIds.of([5, 6], [picture_of(RED)])], {"max_tokens": 2})
