"""Whole reinforcement learning runs whose prompts and environments have images."""

import json

import pytest
from kit.rank_processes import forked
from kit.rl_runs import ONE_AT_A_TIME, cut_after_step_2, numbers, stop_after_step_2
from kit.sft_runs import are_equal, lines, weights_of
from kit.vision_models import COLOURS, KINDS, picture, save_vlm
from safetensors.torch import load_file

from vectorlm.cli import main
from vectorlm.data.images import image_tokens_of, picture_of, takes_images
from vectorlm.runs.config.load import load_config
from vectorlm.runs.reinforcement import reinforce
from vectorlm.train.load import load_tokenizer

pytestmark = pytest.mark.slow
CONFIG = """
model: {folder}/model
train_parameters:
  output_dir: {output}
  max_seq_len: 128
  seed: 3
  optimizer: {{lr: 1.0e-3, weight_decay: 0.0}}
  lr_scheduler_type: constant
  freeze: []
  checkpointing_enabled: true
engine: {{max_model_len: 128, kv_cache_memory_bytes: 16777216, dtype: float32}}
rl:
  algorithm: grpo
  prompts: {folder}/prompts.jsonl
  rewards: {{"{folder}/rewards.py:letters": 1.0}}
  group_size: 4
  prompts_per_step: 2
  max_steps: 4
  save_every: 2
  sampling_params: {{max_tokens: 6}}
  rollout: {{save_tokens: true}}
evaluation: {{every: 2, prompts: {folder}/prompts.jsonl, sampling_params: {{max_tokens: 4, seed: 7}}}}
"""
FILES = {
    "rewards.py": "def letters(text, wanted, **columns):\n    return sum(map(str.isalpha, text)) / 8\n",
    "agent.py": """
import httpx

def looks(url, key, row):
    messages = []
    for name in (row["wanted"], "b"):
        parts = [{"type": "image_url", "image_url": {"url": f"file://{FOLDER}/{name}.png"}}]
        messages.append({"role": "user", "content": [*parts, {"type": "text", "text": "?"}]})
        asked = {"model": "policy", "messages": messages}
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.post(f"{url}/chat/completions", headers=headers, json=asked, timeout=60)
        answer.raise_for_status()
        messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
    return 0.0
""",
    "game.py": """
from PIL import Image

class Shows:
    def __init__(self, wanted):
        self.wanted, self.num_turns = wanted, 0

    def step(self, message):
        self.num_turns += 1
        image = Image.new("RGB", (56 * self.num_turns, 56), (30, 200, 40 * self.num_turns))
        parts = [{"type": "image", "image": image}, {"type": "text", "text": "and this?"}]
        return [{"role": "user", "content": parts}]
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of("qwen2.5-vl", tmp_path_factory.mktemp("pictures"))


def folder_of(kind, path):
    save_vlm(kind, path / "model")
    rows = []
    for colour in COLOURS:
        picture(colour).save(path / f"{colour}.png")
        parts = [{"type": "image"}, {"type": "image_url", "image_url": {"url": f"file://{path}/b.png"}}]
        asked = [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]
        rows.append({"prompt": asked, "images": [str(path / f"{colour}.png")], "wanted": colour})
    (path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in FILES.items():
        (path / name).write_text(text.replace("{FOLDER}", str(path)))
    return path


def config_of(folder, output, *overrides):
    path = output.with_suffix(".yaml")
    path.write_text(CONFIG.format(folder=folder, output=output))
    return load_config(path, [*ONE_AT_A_TIME, *overrides])


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """Return the folder of a run of four steps on one rank."""
    output = tmp_path_factory.mktemp("whole") / "run"
    forked(reinforce, config_of(folder, output), world_size=1)
    return output


def gaps(output):
    """Return the largest difference between engine and trainer of each step."""
    found = [line.get("sampler/logprob_gap_max") for line in lines(output / "metrics.jsonl")]
    assert [gap for gap in found if gap is not None]
    return [gap for gap in found if gap is not None]


def test_a_run_trains_and_exports_a_model_with_its_processor(whole, folder):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    metrics = lines(whole / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 1, 2, 3, 4]
    assert max(gaps(whole)) < 1e-5
    AutoProcessor.from_pretrained(whole / "final-model")
    model = AutoModelForImageTextToText.from_pretrained(whole / "final-model")
    before = AutoModelForImageTextToText.from_pretrained(folder / "model").state_dict()
    changed = {name for name, weight in model.state_dict().items() if not weight.equal(before[name])}
    assert any("visual" in name for name in changed)
    assert any("language_model" in name for name in changed)
    assert takes_images(load_tokenizer(whole / "final-model"))


def test_rollouts_name_their_pictures_and_hold_placeholders(whole, folder):
    tokens = image_tokens_of(load_tokenizer(folder / "model"))
    for row in lines(whole / "rollouts.jsonl"):
        wanted = row["columns"]["wanted"]
        parts = row["prompt"][0]["content"]
        assert [part.get("image") for part in parts] == [f"{folder}/{wanted}.png", f"{folder}/b.png", None]
        assert row["prompt_token_ids"].count(tokens.placeholder) == 2


def test_a_frozen_part_keeps_its_bits(folder, tmp_path):
    config = config_of(folder, tmp_path / "run", "train_parameters.freeze=[vision]", "rl.max_steps=2")
    forked(reinforce, config, world_size=1)
    before = load_file(folder / "model/model.safetensors")
    after = load_file(tmp_path / "run/final-model/model.safetensors")
    equal = {name for name in before if before[name].equal(after[name])}
    vision = {name for name in before if "visual" in name}
    assert vision
    assert vision <= equal
    assert equal < before.keys()
    # The checkpoint does not have the frozen part.
    assert main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "exported")]) == 0
    assert are_equal(weights_of(tmp_path / "exported"), after)


@pytest.mark.parametrize("mode", ["merged", "adapter"])
def test_adapters_are_trained_on_pictures(folder, tmp_path, mode):
    adapters = (
        "train_parameters.lora_peft_config={r: 4, target_modules: '.*language_model.*(q_proj|up_proj)'}"
    )
    overrides = [adapters, f"engine.lora_mode={mode}", "train_parameters.freeze=[vision]", "rl.max_steps=3"]
    output = tmp_path / "run"
    forked(reinforce, config_of(folder, output, *overrides), world_size=1)
    assert max(gaps(output)) < 1e-5
    found = load_file(output / "final-model/adapter_model.safetensors")
    trained = [name for name, weight in found.items() if "lora_B" in name and weight.any()]
    assert len(trained) == 4
    assert all("language_model" in name for name in found)


def test_adapters_in_the_vision_model_are_trained_merged_and_trained_further(folder, tmp_path):
    adapters = "{r: 4, target_modules: '.*visual.*qkv|.*language_model.*q_proj', exclude_modules: [lm_head]}"
    given = [f"train_parameters.lora_peft_config={adapters}", "engine.lora_mode=merged", "rl.max_steps=3"]
    given.append("train_parameters.freeze=[vision]")
    run, more = tmp_path / "run", tmp_path / "more"
    forked(reinforce, config_of(folder, run, *given), world_size=1)
    assert max(gaps(run)) < 1e-5
    found = load_file(run / "final-model/adapter_model.safetensors")
    trained = [name for name, weight in found.items() if "lora_B" in name and weight.any()]
    assert {"visual" in name for name in trained} == {True, False}
    assert len(found) == 2 * len(trained)
    merged = [tmp_path / "merged", tmp_path / "merged-checkpoint"]
    for source, path in zip((run / "final-model", run), merged, strict=True):
        assert main(["export", str(source), "--merge", "--output", str(path)]) == 0
    assert are_equal(*map(weights_of, merged))
    # A run that merges the adapters freezes the vision model with them.
    given = [f"model={run}/final-model", "train_parameters.merge_adapters=True", "rl.max_steps=1"]
    forked(reinforce, config_of(folder, more, *given, "train_parameters.freeze=[vision]"), world_size=1)
    last = weights_of(more)
    assert all(
        weight.equal(last[name]) == ("visual" in name) for name, weight in weights_of(merged[0]).items()
    )
    assert main(["export", str(more), "--output", str(tmp_path / "exported")]) == 0
    assert are_equal(weights_of(tmp_path / "exported"), last)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "qwen2.5-vl"])
def test_another_family_is_trained_on_two_ranks_and_resumed(tmp_path, kind):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    other = folder_of(kind, tmp_path)
    for name in ("whole", "cut"):
        if name == "cut":
            cut_after_step_2(tmp_path / "whole", tmp_path / name)
        forked(reinforce, config_of(other, tmp_path / name), world_size=2)
        assert max(gaps(tmp_path / name)) < 1e-5
    assert are_equal(weights_of(tmp_path / "whole"), weights_of(tmp_path / "cut"))
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "whole/final-model")
    before = AutoModelForImageTextToText.from_pretrained(other / "model").state_dict()
    changed = {name for name, weight in model.state_dict().items() if not weight.equal(before[name])}
    assert any(".vis" in name for name in changed)
    AutoProcessor.from_pretrained(tmp_path / "whole/final-model")


def test_two_ranks_learn_what_one_learns(folder, whole, tmp_path):
    forked(reinforce, config_of(folder, tmp_path / "run"), world_size=2)
    assert max(gaps(tmp_path / "run")) < 1e-5
    first = [row for row in lines(whole / "rollouts.jsonl") if row["train_step"] == 1]
    second = [row for row in lines(tmp_path / "run" / "rollouts.jsonl") if row["train_step"] == 1]
    assert [row["token_ids"] for row in first] == [row["token_ids"] for row in second]
    losses = [lines(output / "metrics.jsonl")[1]["policy/grad_norm"] for output in (whole, tmp_path / "run")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_run_that_was_killed_goes_on_with_equal_bits(folder, whole, tmp_path):
    config = config_of(folder, tmp_path / "cut")
    with pytest.raises(AssertionError, match="rank"):
        forked(stop_after_step_2, config, world_size=1)
    forked(reinforce, config, world_size=1)
    assert are_equal(weights_of(whole), weights_of(tmp_path / "cut"))
    assert numbers(tmp_path / "cut") == numbers(whole)


def test_an_environment_returns_pictures(folder, tmp_path):
    output = tmp_path / "run"
    game = f"rl.environment={folder}/game.py:Shows"
    answers = "rl.sampling_params={max_tokens: 6, structured_outputs: {choice: [r, g, b, y]}}"
    config = config_of(folder, output, game, answers, "rl.max_turns=3", "rl.max_steps=2")
    forked(reinforce, config, world_size=1)
    assert max(gaps(output)) < 1e-5
    tokens = image_tokens_of(load_tokenizer(folder / "model"))
    rows = lines(output / "rollouts.jsonl")
    assert {row["num_turns"] for row in rows} >= {3}
    for row in rows:
        replies = [message for message in row["messages"][1:] if message["role"] == "user"]
        shown = [
            part["image"] for message in replies for part in message["content"] if part["type"] == "image"
        ]
        pairs = zip(row["token_ids"], row["policy_mask"], strict=True)
        placed = [token for token, is_policy in pairs if token == tokens.placeholder and not is_policy]
        assert len(placed) == len(shown) == row["num_turns"] - 1
        drawn = [picture((30, 200, 40 * turn), (56 * turn, 56)) for turn in range(1, row["num_turns"])]
        hashes = [picture_of(image).removeprefix("sha256:") for image in drawn]
        assert shown == [f"{output}/pictures/{digest}" for digest in hashes]
        for name, image in zip(shown, drawn, strict=True):
            assert picture_of(name).open().tobytes() == image.tobytes()
        assert row["pictures"][2:] == shown
    replayed = ["rl.rollout.source=file", f"rl.rollout.path={output}/rollouts.jsonl", "rl.max_steps=2"]
    again = config_of(folder, tmp_path / "again", *replayed)
    forked(reinforce, again, world_size=1)
    # With the same rollouts and weights, the images' features equal the first run's.
    losses = [
        [line["policy/grad_norm"] for line in lines(run / "metrics.jsonl") if "policy/grad_norm" in line]
        for run in (output, tmp_path / "again")
    ]
    assert losses[0] == losses[1]


def test_a_picture_of_an_environment_is_refused_where_a_model_reads_text_alone(folder, tmp_path):
    game = f"rl.environment={folder}/game.py:Shows"
    answers = "rl.sampling_params={max_tokens: 6, structured_outputs: {choice: [r, g, b, y]}}"
    (folder / "texts.jsonl").write_text('{"prompt": [{"role": "user", "content": "?"}], "wanted": "r"}\n' * 4)
    given = [game, answers, f"rl.prompts={folder}/texts.jsonl", "evaluation=null", "rl.algorithm.name=ppo"]
    config = config_of(folder, tmp_path / "run", *given, "rl.max_turns=2", "rl.max_steps=1")
    with pytest.raises(AssertionError, match=r"rl\.algorithm\.name"):
        forked(reinforce, config, world_size=1)


def test_an_agent_sends_pictures(folder, tmp_path):
    output = tmp_path / "run"
    answers = "rl.sampling_params={max_tokens: 6, structured_outputs: {choice: [r, g, b, y]}}"
    agent = f"rl.environment=openai:{folder}/agent.py:looks"
    forked(reinforce, config_of(folder, output, agent, answers, "rl.max_steps=2"), world_size=1)
    assert max(gaps(output)) < 1e-5
    for row in lines(output / "rollouts.jsonl"):
        assert (row["num_turns"], row["branches"]) == (2, [])
        shown = [picture_of(name).open().getpixel((0, 0)) for name in row["pictures"]]
        assert shown == [COLOURS[row["columns"]["wanted"]], COLOURS["b"]]


def test_updates_in_flight_use_new_features_of_pictures(folder, tmp_path):
    output = tmp_path / "run"
    overrides = ["rl.async={max_staleness: 2}", "rl.sampling_params={max_tokens: 40}", "rl.max_steps=6"]
    config = config_of(folder, output, *overrides, "rl.correction.preset=decoupled", "engine.max_num_seqs=8")
    forked(reinforce, config, world_size=1)
    ages = [line.get("staleness/token_max", 0) for line in lines(output / "metrics.jsonl")[1:]]
    assert 0 < max(ages) <= 2
    assert list((output / "final-model").glob("*model.safetensors"))
