"""The contract's suite for every backend on every channel; tests/sampling/test_server.py runs it against the server."""

import contextlib
from functools import cache, partial

import pytest
from kit.rank_processes import on_ranks
from kit.tiny_engine import TINY_ENGINE

from vectorlm import FakeEngine, HFEngine, SamplingEngine, Topology
from vectorlm.sampling.testing import CHECKS, MODEL_CHECKS, EngineUnderTest, run_checks

SCRIPT = "step {1}: {0}".format
"""Function of a prompt and a version; unlike a function of this file, it can be sent to a sampler process."""


SCRIPTED = {
    "inference": "vectorlm.sampling.backends.scripted:Scripted",
    "answers": SCRIPT,
    # The engine is slow, which keeps many requests in flight while a check looks at them.
    "num_steps": 3,
    "step_s": 0.02,
    "max_num_seqs": 4,
}
ENGINES = {
    "vllm_process": partial(SamplingEngine, **TINY_ENGINE),
    "transformers_inline": HFEngine,
    "scripted_process": partial(SamplingEngine, **SCRIPTED),
    # A batch needs three steps, because a batch that finishes immediately could not show how to wait for it.
    "scripted_inline": lambda path, topology=None: FakeEngine(SCRIPT, topology=topology, num_steps=3),
}


def checks_of(kind):
    return [check for check in CHECKS if not (kind.startswith("scripted") and check in MODEL_CHECKS)]


# The other engines have the same backend or the same channel.
SLOW = {"scripted_process": pytest.mark.slow}
CASES = [
    pytest.param(kind, check, marks=SLOW.get(kind, ()), id=f"{kind}-{check.__name__}")
    for kind in ENGINES
    for check in checks_of(kind)
]


TINY_LLAMA = {"tied": True, "hidden_size": 64}


@pytest.fixture(scope="module")
def subject_of(folder):
    """Start each engine once, at its first check."""
    with contextlib.ExitStack() as stack:
        yield cache(lambda kind: under_test(stack.enter_context(ENGINES[kind](folder)), folder, kind))


def under_test(engine, path, kind, topology=None):
    # A scripted engine has no weights and answers with their version.
    fresh = None if kind.startswith("scripted") else partial(ENGINES[kind], topology=topology)
    return EngineUnderTest(engine, path, topology=topology or Topology.from_environment(), fresh=fresh)


@pytest.mark.parametrize(("kind", "check"), CASES)
def test_an_engine_keeps_the_contract(kind, check, subject_of):
    check(subject_of(kind))


def keep_the_contract(topology, kind, path):
    with ENGINES[kind](path, topology=topology) as engine:
        run_checks(under_test(engine, path, kind, topology), checks_of(kind))


# The tests of docs/howto/own_backend.md run `transformers_inline` on two ranks. For the ranks, the backend of a
# sampler process makes no difference.
@pytest.mark.parametrize(
    "kind",
    [
        "scripted_inline",
        pytest.param("vllm_process", marks=pytest.mark.slow),
    ],
)
def test_an_engine_keeps_the_contract_on_two_ranks(kind, folder):
    on_ranks(2, keep_the_contract, kind, folder)
