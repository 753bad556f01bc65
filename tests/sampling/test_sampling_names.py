"""Imports and calls of code written for VectorLM, on an engine without vLLM."""

import importlib

import pytest

import vectorlm
import vectorlm.sampling
from vectorlm import FakeEngine
from vectorlm.sampling import GONE, LoRASamplingEngine, SamplingEngine


def test_the_engine_is_found_where_vectorlm_had_it():
    assert SamplingEngine is vectorlm.SamplingEngine


def test_generate_text_only_is_generate_text_with_a_warning():
    with FakeEngine(lambda prompt, version: f"{prompt}!") as engine:
        with pytest.warns(DeprecationWarning, match="generate_text_only") as caught:
            assert engine.generate_text_only(["a", "b"]) == ["a!", "b!"]
        assert caught[0].filename == __file__
        assert engine.generate_text(["a"]) == ["a!"]


def test_the_lora_engine_is_an_engine_with_room_for_adapters(monkeypatch):
    asked = []
    engine = "vectorlm.sampling.engine.SamplingEngine"
    monkeypatch.setattr(engine, lambda *args, **more: asked.append((args, more)))
    with pytest.warns(DeprecationWarning, match="max_lora_rank=8"):
        LoRASamplingEngine("model", max_lora_rank=8, sampling_params={"temperature": 0})
    more = {"enable_lora": True, "max_lora_rank": 8, "sampling_params": {"temperature": 0}}
    assert asked == [(("model",), more)]


@pytest.mark.parametrize(
    ("positional", "named", "text"),
    [
        ((object(),), {}, "takes the folder of a model, not a object"),
        (("model",), {"synchronization_barriers": None}, "synchronization_barriers is no longer an argument"),
        ((), {"vllm_llm": object()}, "vllm_llm is no longer an argument"),
        (("model",), {"adapter_temp_folder": "/dev/shm/0"}, "adapter_temp_folder is no longer an argument"),
    ],
)
def test_the_lora_engine_says_which_arguments_are_gone(positional, named, text):
    with pytest.warns(DeprecationWarning, match="is now"), pytest.raises(TypeError, match=text):
        LoRASamplingEngine(*positional, **named)


@pytest.mark.parametrize("name", GONE)
def test_an_import_of_what_is_gone_says_what_to_do(name):
    with pytest.raises(ImportError, match=f"has no {name}"):
        exec(f"from vectorlm.sampling import {name}")
    assert not hasattr(importlib.import_module("vectorlm.sampling"), "anything_else")
