"""Rows with images, packed and padded, compared with transformers' processor and model."""

import pytest
import torch
import transformers
from kit.rank_processes import on_ranks
from kit.vision_models import KINDS, picture, save_vlm

from vectorlm.data.encoding import encode
from vectorlm.data.images import image_tokens_of, pictures_of
from vectorlm.rl.rollout import Rollout
from vectorlm.sampling.weights.lora_factors import is_lora_layer
from vectorlm.sampling.weights.model_size import names_of_vision
from vectorlm.train.images import weights_of_parts
from vectorlm.train.language_model import LanguageModel, probe
from vectorlm.train.load import load_model, load_tokenizer
from vectorlm.train.lora import add_lora
from vectorlm.train.packing import Rows, pack
from vectorlm.types import PromptRecord

RED, BLUE, WIDE = picture("r"), picture("b"), picture("g", (112, 56))
# Rows of group 0 share a prompt with two images. The two prompts of group 1 have equal tokens and different images.
ROWS = [(0, [RED, WIDE]), (0, [RED, WIDE]), (0, [RED, WIDE]), (1, [RED]), (1, [BLUE]), (2, [])]


@pytest.fixture(scope="module", params=KINDS)
def path(request, tmp_path_factory):
    return save_vlm(request.param, tmp_path_factory.mktemp("vlm") / "model")


@pytest.fixture(scope="module")
def tokenizer(path):
    return load_tokenizer(path)


def chat(images):
    return [
        {
            "role": "user",
            "content": [
                *({"type": "image", "image": image} for image in images),
                {"type": "text", "text": "?"},
            ],
        }
    ]


def answer(row):
    return torch.randint(10, 90, (3 + row,), generator=torch.Generator().manual_seed(row)).tolist()


@pytest.fixture(scope="module")
def rows(tokenizer):
    found = []
    for row, (_, images) in enumerate(ROWS):
        ids = encode(chat(images), lambda: tokenizer)
        expanded, placed = image_tokens_of(tokenizer).expand(ids, getattr(ids, "pictures", ()))
        found.append((expanded + answer(row), len(expanded), placed))
    longest = max(len(ids) for ids, _, _ in found)
    lengths = torch.tensor([len(ids) for ids, _, _ in found])[:, None]
    places = torch.arange(longest)
    input_ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _, _ in found])
    is_asked = (places < lengths) & (places >= torch.tensor([first for _, first, _ in found])[:, None])
    groups = [group for group, _ in ROWS]
    return Rows(
        input_ids, (places < lengths).long(), is_asked, groups, images=[placed for _, _, placed in found]
    )


def transformers_values(model, path):
    """Return the log-probabilities of the answers, row by row, from transformers' processor and model."""
    from transformers import AutoProcessor

    processor, found = AutoProcessor.from_pretrained(path), []
    for row, (_, images) in enumerate(ROWS):
        text = processor.apply_chat_template(chat(images), add_generation_prompt=True, tokenize=False)
        given = dict(processor(text=text, **({"images": images} if images else {}), return_tensors="pt"))
        sampled = torch.tensor([answer(row)])
        given["input_ids"] = torch.cat([given["input_ids"], sampled], 1)
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        if "mm_token_type_ids" in given:
            given["mm_token_type_ids"] = torch.cat([given["mm_token_type_ids"], torch.zeros_like(sampled)], 1)
        logprobs = model(**given).logits[0].log_softmax(-1)
        found.append(logprobs[-sampled.shape[1] - 1 : -1].gather(1, sampled.T)[:, 0])
    return torch.cat(found)


def gradients(model, values):
    values.square().sum().backward()
    found = {
        name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None
    }
    model.zero_grad()
    return found


@pytest.mark.parametrize("packs", [True, False])
def test_rows_with_pictures_are_computed_as_alone(path, tokenizer, rows, packs):
    model = load_model(path).eval()
    expected = transformers_values(model, path)
    expected_gradients = gradients(model, expected)
    assert any("vis" in name for name in expected_gradients)
    policy = LanguageModel(model, packs=packs, image_tokens=image_tokens_of(tokenizer))
    assert (policy.why_padded is None) == packs
    found = policy.logprobs(rows)[rows.is_asked]
    # Both are float32 and sum in different orders.
    assert (found - expected).abs().max() < 2e-6
    found_gradients = gradients(model, found)
    assert found_gradients.keys() == expected_gradients.keys()
    for name, expected_gradient in expected_gradients.items():
        off = (found_gradients[name] - expected_gradient).abs().max()
        assert off <= 1e-6 + 1e-5 * expected_gradient.abs().max(), name


def values_of_text_by_experts(topology, path):
    given = transformers.AutoConfig.from_pretrained(path)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sections = {
        name: {key: value for key, value in getattr(given, name).to_dict().items() if key != "model_type"}
        for name in ("text_config", "vision_config")
    }
    sections["text_config"] |= experts
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = {name: getattr(given, name) for name in names}
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(
        transformers.Qwen3VLMoeConfig(**sections, **tokens)
    ).eval()
    tokenizer = load_tokenizer(path)
    policy = LanguageModel(model, image_tokens=image_tokens_of(tokenizer))
    assert (policy.why_padded, policy.routers is None) == (None, False)
    rows = probe(model)
    found = policy.logprobs(rows)[rows.is_asked]
    logits = model(input_ids=rows.input_ids, attention_mask=rows.attention_mask).logits[:, :-1]
    alone = logits.log_softmax(-1).gather(2, rows.input_ids[:, 1:, None])[..., 0]
    return (found - alone[rows.is_asked[:, 1:]]).abs().max().item()


@pytest.mark.slow
def test_experts_of_a_pass_without_pictures_are_watched_beside_a_blank_picture(tmp_path):
    path = save_vlm("qwen3-vl", tmp_path / "model")
    assert max(on_ranks(2, values_of_text_by_experts, path)) < 2e-6


def test_a_picture_of_a_group_is_computed_once(path, tokenizer, rows):
    model = load_model(path).eval()
    policy = LanguageModel(model, image_tokens=image_tokens_of(tokenizer))
    patches = []
    (vision,) = map(model.get_submodule, names_of_vision(model))
    embed = next(
        module for module in vision.modules() if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d)
    )
    embed.register_forward_hook(lambda module, args, output: patches.append(output.numel() // 64))
    with torch.no_grad():
        policy.logprobs(rows)
    # Group 0 has two images for its three rows, and group 1 has one image for each of its two rows.
    tokens = image_tokens_of(tokenizer)
    merged = [
        tokens.expansion(placed.picture).count(tokens.image_token)
        for row in (0, 3, 4)
        for placed in rows.images[row]
    ]
    assert len(merged) == 4
    assert sum(patches) == 4 * sum(merged)
    assert pack(rows).num_tokens < int(rows.attention_mask.sum())


def test_rows_of_equal_tokens_and_other_pictures_differ(path, tokenizer, rows):
    policy = LanguageModel(load_model(path).eval(), image_tokens=image_tokens_of(tokenizer))
    equal = Rows(
        rows.input_ids[[3, 3]],
        rows.attention_mask[[3, 3]],
        rows.is_asked[[3, 3]],
        (0, 0),
        images=[rows.images[3], rows.images[4]],
    )
    with torch.no_grad():
        red, blue = policy.logprobs(equal)
    assert (red - blue).abs().max() > 1e-4


def rollout_of(tokenizer, token_ids, policy_mask, images, reply_images=()):
    pictures = [*images, *reply_images]
    ids = encode(chat(images), lambda: tokenizer)
    numbers = (-1.0,) * len(token_ids)
    found = encode(chat(pictures), lambda: tokenizer)
    return Rollout(
        PromptRecord("q"),
        tuple(ids),
        tuple(token_ids),
        tuple(policy_mask),
        numbers,
        (0,) * len(token_ids),
        "text",
        "stop",
        turn_ends=(len(token_ids),),
        pictures=pictures_of(found),
    )


def test_a_row_of_several_turns_is_expanded_with_its_reply(tokenizer):
    tokens = image_tokens_of(tokenizer)
    token_ids = [10, 11, tokens.placeholder, 12, 13]
    rollout = rollout_of(tokenizer, token_ids, [True, True, False, False, True], [RED], [WIDE])
    expanded, placed = rollout.with_expanded(tokens, spare=0)
    reply = tokens.expansion(rollout.pictures[1])
    assert expanded.token_ids == (10, 11, *reply, 12, 13)
    assert expanded.policy_mask == (True, True, *[False] * len(reply), False, True)
    assert len(expanded.sampler_logprobs) == len(expanded.versions) == len(expanded.token_ids)
    assert expanded.turn_ends == (len(expanded.token_ids),)
    whole = [*expanded.prompt_token_ids, *expanded.token_ids]
    assert [whole[one.start] for one in placed] == [tokens.image_token] * 2
    assert [one.picture for one in placed] == list(rollout.pictures)
    first = reply.index(tokens.image_token)
    assert placed[1].start == len(expanded.prompt_token_ids) + 2 + first


def test_a_sampled_image_token_is_not_trained_and_does_not_raise(path, tokenizer):
    tokens = image_tokens_of(tokenizer)
    policy = LanguageModel(load_model(path).eval(), image_tokens=tokens)
    for sampled in tokens.reserved:
        rollout = rollout_of(tokenizer, [10, sampled, 12], [True] * 3, [RED])
        expanded, placed = rollout.with_expanded(tokens, spare=0)
        assert expanded.token_ids == (10, 0, 12)
        assert expanded.policy_mask == (True, False, False)
        assert len(placed) == 1
        ids = torch.tensor([[*expanded.prompt_token_ids, *expanded.token_ids]])
        asked = torch.zeros_like(ids, dtype=torch.bool)
        asked[0, -3:] = True
        found = policy.logprobs(Rows(ids, torch.ones_like(ids), asked, (0,), images=[placed]))
        assert found.isfinite().all()


def test_no_token_is_trained_whose_context_differs_from_the_engine_s(tokenizer):
    """The engine reads a placeholder without a picture as a token; the trainer cannot, next to pictures."""
    tokens = image_tokens_of(tokenizer)
    for images in ([], [RED]):
        for reserved in tokens.reserved:
            token_ids = [10, reserved, 11, 12]
            rollout = rollout_of(tokenizer, token_ids, [True, False, False, True], images)
            expanded, placed = rollout.with_expanded(tokens, spare=0)
            assert len(placed) == len(images)
            assert expanded.token_ids == (10, 0, 11, 12)
            assert expanded.policy_mask == (True, False, False, False)


@pytest.mark.parametrize("parts", [(), ("vision",), ("language",), ("vision", "projector", "language")])
def test_parts_of_a_model_are_frozen(path, parts):
    model = load_model(path)
    for weight in weights_of_parts(model, parts):
        weight.requires_grad_(False)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    every = {name for name, _ in model.named_parameters()}
    vision = {name for name in every if ".vis" in name}
    projector = {name for name in every if ".connector." in name}
    expected = every - (vision if "vision" in parts else set())
    # Qwen's projector is part of its vision model.
    expected -= projector if "projector" in parts else set()
    expected -= every - vision - projector if "language" in parts else set()
    assert trained == expected


@pytest.mark.parametrize("targets", ["all-linear", ["proj", "q_proj", "lm_head"]])
def test_lora_adapts_the_language_model_and_its_head_only(path, targets):
    adapted = add_lora(load_model(path), {"r": 2, "target_modules": targets}).get_base_model()
    found = {name for name, module in adapted.named_modules() if is_lora_layer(module)}
    texts = ("model.language_model.", "model.text_model.")
    assert {name.rpartition(".")[2] for name in found} >= {"q_proj", *({"lm_head"} & {*targets})}
    assert all(name == "lm_head" or name.startswith(texts) for name in found)


def test_the_rows_of_a_trial_show_no_pictures_in_a_small_vocabulary(path):
    model = load_model(path)
    config = model.config
    config.get_text_config().vocab_size = 24
    config.image_token_id = 10
    ids = probe(model).input_ids
    # The trial adds one to some tokens.
    assert not {10} & {*ids.unique().tolist(), *(ids + 1).unique().tolist()}
    assert ids.max() < 23
