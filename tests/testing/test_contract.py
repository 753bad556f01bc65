"""One suite, all engines; tests/sampling/test_server.py holds the one that is reached over HTTP to it."""

import contextlib
import functools

import pytest
from rank_processes import on_ranks, save_tiny_llama

import vectorlm
from vectorlm.sampling.fake_engine import FakeEngine
from vectorlm.sampling.hf_engine import HFEngine
from vectorlm.testing import CHECKS, MODEL_CHECKS, Subject, run_checks


def vllm_engine(path, topology=None):
    return vectorlm.SamplingEngine(
        str(path),
        topology=topology,
        dtype="float32",
        max_model_len=64,
        kv_cache_memory_bytes=16 << 20,
        timeout_s=240,
    )


def transformers_engine(path, topology=None):
    return vectorlm.SamplingEngine(str(path), topology=topology, inference="transformers", timeout_s=240)


def hf_engine(path, topology=None):
    return HFEngine(path, topology=topology)


def fake_engine(path, topology=None):
    # Three steps a batch: one that is finished at once could not show how it is waited for.
    return FakeEngine(lambda prompt, version: f"step {version}: {prompt}", topology=topology, num_steps=3)


ENGINES = {"vllm": vllm_engine, "transformers": transformers_engine, "hf": hf_engine, "fake": fake_engine}


def checks_of(kind):
    return [check for check in CHECKS if kind != "fake" or check not in MODEL_CHECKS]


CASES = [(kind, check) for kind in ENGINES for check in checks_of(kind)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("contract") / "model", tied=True, hidden_size=64)


@pytest.fixture(scope="module")
def subject_of(model_path):
    """Start each engine once, when the first of its checks comes."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(
            lambda kind: Subject(stack.enter_context(ENGINES[kind](model_path)), model_path)
        )


@pytest.mark.parametrize(("kind", "check"), CASES, ids=[f"{kind}-{check.__name__}" for kind, check in CASES])
def test_an_engine_keeps_the_contract(kind, check, subject_of):
    check(subject_of(kind))


def keep_every_contract(topology, path):
    for kind, make_engine in ENGINES.items():
        print(f"the engine: {kind}", flush=True)
        with make_engine(path, topology) as engine:
            run_checks(Subject(engine, path, topology=topology), checks_of(kind))


def test_the_engines_keep_the_contract_on_two_ranks(model_path):
    on_ranks(2, keep_every_contract, model_path)
