"""Ends of answers and tokens around prompts, with a real model's tokenizer and template."""

import json
import shutil
from pathlib import Path

import pytest
from kit.letters import make
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from vectorlm import SamplingEngine
from vectorlm.data.encoding import encode, end_tokens

pytestmark = pytest.mark.slow
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = [*CHAT, {"role": "assistant", "content": "Paris."}]
GREEDY = {"temperature": 0.0, "max_tokens": 12}
SIZES = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 64 << 20}


@pytest.fixture(scope="module")
def model(smollm2, tmp_path_factory):
    """Return the model's folder with the full stop as a second end token."""
    folder = tmp_path_factory.mktemp("ends") / "model"
    shutil.copytree(smollm2, folder, copy_function=lambda source, target: Path(target).symlink_to(source))
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    (stop,) = tokenizer.encode(".", add_special_tokens=False)
    named = json.loads((smollm2 / "generation_config.json").read_text())
    (folder / "generation_config.json").unlink()
    both = {**named, "eos_token_id": [tokenizer.eos_token_id, stop], "temperature": 0.1}
    (folder / "generation_config.json").write_text(json.dumps(both))
    return folder


@pytest.mark.parametrize("inference", ["vllm", "transformers"])
def test_stop_strings_and_several_ends_mean_the_same_to_both_engines(model, inference):
    tokenizer = AutoTokenizer.from_pretrained(model)
    (stop,) = tokenizer.encode(".", add_special_tokens=False)
    assert end_tokens(tokenizer) == {tokenizer.eos_token_id, stop}
    sizes = SIZES if inference == "vllm" else {"dtype": "float32"}
    with SamplingEngine(str(model), inference=inference, **sizes) as engine:
        ((ended,),) = engine.sample([CHAT], GREEDY)
        ((cut,),) = engine.sample([CHAT], {**GREEDY, "stop": ["Paris"], "logprobs": 0})
        ((going,),) = engine.sample([CHAT], {**GREEDY, "ignore_eos": True})
    assert (ended.finish_reason, ended.token_ids[-1]) == ("stop", stop)
    assert "Paris" in ended.text
    assert cut.finish_reason == "stop"
    assert "Paris" not in cut.text
    # The trainer gets the tokens of the stop string, and a log-probability for each of them.
    assert "Paris" in tokenizer.decode(cut.token_ids)
    assert len(cut.sampler_logprobs) == len(cut.token_ids)
    assert going.finish_reason == "length"
    assert going.token_ids[: len(ended.token_ids)] == ended.token_ids


@pytest.mark.parametrize("has_pad", [True, False])
def test_an_end_that_is_also_the_filler_is_learned(smollm2, tmp_path, monkeypatch, has_pad):
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    if not has_pad:
        tokenizer.pad_token = None
    Path("chats.jsonl").write_text(json.dumps({"messages": ANSWER}) + "\n")
    (row,), _ = make(load_path="chats.jsonl", tokenizer=tokenizer, assistant_only_loss=True, max_seq_len=128)
    counted = [label for label in row["labels"] if label != -100]
    assert tokenizer.decode(counted) == "Paris.<|im_end|>"


def test_a_beginning_that_tokenizer_and_template_both_write_stands_once(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", tokenizer.bos_token_id)]
    )
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    of_chat = encode(CHAT, lambda: tokenizer)
    assert of_chat == tokenizer.encode(rendered, add_special_tokens=False)
    assert of_chat[0] == tokenizer.bos_token_id != of_chat[1]
    with pytest.warns(UserWarning, match="no second one is added"):
        assert encode(rendered, lambda: tokenizer) == of_chat
    assert encode("Paris", lambda: tokenizer)[0] == tokenizer.bos_token_id
