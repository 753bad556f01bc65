"""Routed experts: the engine returns its choice for every token."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from in_flight_cases import another, update_on_the_way
from kit.mixtures import MIXTURES, save_mixture
from kit.rank_processes import save_tiny_llama
from kit.tiny_engine import TINY_ENGINE

from vectorlm import SamplingEngine
from vectorlm.sampling import messages
from vectorlm.sampling.backends.vllm.backend import finished
from vectorlm.sampling.backends.vllm.routes import BLOCK, RouteCapture
from vectorlm.sampling.contract import RequestOutput
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.load import load_model
from vectorlm.train.packing import Rows
from vectorlm.types import Completion

ENGINE = {**TINY_ENGINE, "max_model_len": 128, "enable_return_routed_experts": True}
SAMPLED = {"max_tokens": 24, "ignore_eos": True, "logprobs": 0, "seed": 1}
STEPS = {"max_num_batched_tokens": 32, "enable_chunked_prefill": True, "kv_cache_memory_bytes": 1 << 20}
"""Sizes that split prompts into chunks and preempt requests: the cache has room for 512 tokens of Qwen3-MoE."""


def whole(completion):
    return [*completion.prompt_token_ids, *completion.token_ids]


def rows_of(completions):
    length = max(len(whole(completion)) for completion in completions)
    ids, mask = (torch.zeros(len(completions), length, dtype=torch.int64) for _ in range(2))
    for row, completion in enumerate(completions):
        tokens = whole(completion)
        ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1
    places = torch.arange(length)
    starts = torch.tensor([len(completion.prompt_token_ids) for completion in completions])[:, None]
    return Rows(ids, mask, mask.bool() & (places >= starts), list(range(len(completions))))


def own_routes(model, completions):
    """Return the experts that transformers chooses for the tokens of completions, sorted."""
    language_model = LanguageModel(model, packs=False)
    with torch.no_grad():
        language_model.logprobs(rows_of(completions))
    found = language_model.routers.own_by_row()
    return [np.sort(found[row], axis=-1)[: len(whole(c)) - 1] for row, c in enumerate(completions)]


def check(model, groups):
    completions = [completion for group in groups for completion in group]
    for completion, expected in zip(completions, own_routes(model, completions), strict=True):
        assert completion.routes.dtype == np.uint8
        np.testing.assert_array_equal(np.sort(completion.routes, axis=-1), expected)


def prompts(count, length, seed=0):
    return torch.randint(2, 48, (count, length), generator=torch.Generator().manual_seed(seed)).tolist()


def test_every_token_has_the_experts_of_the_trainer(tmp_path):
    model = load_model(save_mixture("Qwen3-MoE", tmp_path / "model"))
    with SamplingEngine(tmp_path / "model", receiver="packed", **{**ENGINE, **STEPS}) as engine:
        engine.update(model, 0)
        shared = prompts(1, 70)[0]
        first = engine.sample([shared, shared[:40], [3]], {**SAMPLED, "n": 3})
        check(model, first)
        # The prefix cache contains the prompt and a first turn.
        again = engine.sample([shared, [*whole(first[1][0]), 5, 6]], SAMPLED)
        check(model, again)
        check(model, engine.sample(prompts(12, 30), {**SAMPLED, "max_tokens": 60}))


@pytest.mark.long
def test_tokens_keep_the_experts_of_the_weights_that_read_them_first(tmp_path):
    save_mixture("Qwen3-MoE", tmp_path / "model")
    old, new = (another(tmp_path / "model", seed) for seed in (1, 2))
    long = {**ENGINE, "max_model_len": 480, "kv_cache_memory_bytes": 2 << 20}
    with SamplingEngine(tmp_path / "model", **long) as engine:
        starts = prompts(2, 40)
        completions, counts, _ = update_on_the_way(engine, old, new, "recompute", starts)
        # The engine computes the keys of all tokens again, but reports each token's first routes.
        both = zip(
            completions, counts, own_routes(old, completions), own_routes(new, completions), strict=True
        )
        for completion, count, first, second in both:
            num_read = len(completion.prompt_token_ids) + count - 1
            found = np.sort(completion.routes, axis=-1)
            np.testing.assert_array_equal(found[:num_read], first[:num_read])
            np.testing.assert_array_equal(found[num_read:], second[num_read:])
        # New requests do not reuse the old weights' blocks.
        check(new, engine.sample(starts, SAMPLED))


@pytest.mark.parametrize(
    "name", ["Qwen3-MoE", *(pytest.param(name, marks=pytest.mark.slow) for name in [*MIXTURES][1:])]
)
def test_replay_closes_two_thirds_of_the_largest_gap_of_an_engine_in_bfloat16(tmp_path, name):
    model = load_model(save_mixture(name, tmp_path / "model")).eval()
    with SamplingEngine(tmp_path / "model", **{**ENGINE, "dtype": "bfloat16"}) as engine:
        answers = engine.sample(prompts(8, 24), {**SAMPLED, "max_tokens": 64})
    completions = [completion for (completion,) in answers]
    routes, rows = [x.routes for x in completions], rows_of(completions)
    sampler_logprobs = torch.tensor([x.sampler_logprobs for x in completions])
    start, language_model = len(completions[0].prompt_token_ids), LanguageModel(model)
    language_model.routers.begin_batch()
    with torch.no_grad():
        plain = language_model.logprobs(replace(rows, routes=routes))
        share = language_model.routers.differing_share()
        replayed = language_model.logprobs(replace(rows, replayed=routes))
    gaps = [(logprobs[:, start:] - sampler_logprobs).abs() for logprobs in (plain, replayed)]
    (before, after), means = ([gap.max() for gap in gaps], [gap.mean() for gap in gaps])
    gaps_shown = f"{means[0]:.1e} | {means[1]:.1e} | {before:.3f} | {after:.3f} | {before / after:.1f}"
    print(f"| {name} | {share:.1%} | {gaps_shown} |")
    assert after < before / 3


@pytest.mark.slow
def test_a_dense_engine_and_one_that_was_not_asked_return_no_routes(tmp_path):
    dense = save_tiny_llama(tmp_path / "dense", hidden_size=64)
    with SamplingEngine(dense, **{**ENGINE, "max_model_len": 64}) as engine:
        assert engine.sample([[3, 4]], SAMPLED)[0][0].routes is None
    save_mixture("Mixtral", tmp_path / "model")
    with SamplingEngine(
        tmp_path / "model", **{**TINY_ENGINE, "enable_return_routed_experts": False}
    ) as engine:
        assert engine.sample([[3, 4]], SAMPLED)[0][0].routes is None


def test_routes_cross_processes_as_bytes():
    routes = np.arange(24, dtype=np.uint16).reshape(3, 2, 4)
    completion = Completion((1, 2), (3, 4), (-1.0, -1.0), (0, 0), "ab", "stop", routes)
    (((found,),)) = messages.unpack(messages.pack([RequestOutput("a", [completion])], False))
    assert found == completion
    assert found.routes.dtype == np.uint16
    np.testing.assert_array_equal(found.routes, routes)


@pytest.mark.parametrize(("length", "kept"), [(5, 4), (4, 4), (3, None)])
def test_vllm_s_own_routes_are_cut_to_the_tokens_it_read(length, kept):
    routes = np.zeros((length, 2, 2), np.uint8)
    sample = SimpleNamespace(
        token_ids=[7, 8], logprobs=None, text="", finish_reason="stop", routed_experts=routes
    )
    output = SimpleNamespace(request_id="a", prompt_token_ids=[1, 2, 3], outputs=[sample])
    (completion,) = finished(output, [[0, 0]]).completions
    assert completion.routes is None if kept is None else len(completion.routes) == kept


class Script:
    """A model runner with one layer, whose router chooses experts by position and weights."""

    def __init__(self):
        router = SimpleNamespace(top_k=2, global_num_experts=300, set_capture_fn=self.__setattr__)
        router.set_capture_fn = lambda take: setattr(self, "take", take)
        layer = SimpleNamespace(router=router, layer_id=0)
        self.get_model = lambda: SimpleNamespace(modules=lambda: [layer])
        self.input_batch = SimpleNamespace(req_id_to_index={}, num_computed_tokens_cpu=np.zeros(4, int))
        self.query_start_loc = SimpleNamespace(np=np.zeros(5, int))
        self.requests = {}
        self.version = 0

    def execute_model(self, scheduled):
        batch, starts = self.input_batch, [0]
        batch.req_id_to_index = {name: index for index, name in enumerate(scheduled.order)}
        found = []
        for index, name in enumerate(scheduled.order):
            done, count = scheduled.done[name], scheduled.num_scheduled_tokens[name]
            batch.num_computed_tokens_cpu[index] = done
            found += [[self.version + done + place, 299] for place in range(count)]
            starts.append(starts[-1] + count)
        self.query_start_loc.np[: len(starts)] = starts
        self.take(torch.tensor(found))

    def begin(self, name, tokens):
        state = SimpleNamespace(num_tokens=len(tokens), mm_features=[], get_token_id=tokens.__getitem__)
        self.requests[name] = state

    def step(self, counts, new=(), resumed=(), order=None, **done):
        scheduled = SimpleNamespace(
            order=order or [*counts],
            done=done,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids={*resumed}),
        )
        self.execute_model(scheduled)


def test_cached_blocks_of_the_same_step_and_recomputed_tokens_keep_their_first_routes():
    script = Script()
    capture = RouteCapture(script)
    tokens = list(range(2 * BLOCK + 4))
    for name in "ab":
        script.begin(name, tokens)
    # b reuses the blocks that a computes in the same step, although b comes before a in the batch.
    script.step({"a": len(tokens), "b": 4}, "ab", order=["b", "a"], a=0, b=2 * BLOCK)
    script.version = 100
    capture.begin_generation()
    # a is preempted and computes all its tokens again with other weights, and one more token.
    script.requests["a"].num_tokens += 1
    script.step({"a": len(tokens) + 1}, resumed="a", a=0)
    # A later step replaces rejected draft tokens.
    script.step({"b": 3}, b=len(tokens))
    script.version = 200
    script.step({"b": 1}, b=len(tokens) + 1)
    a, b, unknown = capture.take(["a", "b", "c"], True)
    assert unknown is None
    assert a.dtype == np.uint16
    assert a[:, 0, 0].tolist() == [*range(len(tokens)), 100 + len(tokens)]
    assert b[:, 0, 0].tolist() == [*range(len(tokens)), 100 + len(tokens), 201 + len(tokens)]
    # A cached block with unknown routes makes the routes of the whole completion unknown.
    script.begin("d", tokens)
    script.step({"d": 4}, "d", d=2 * BLOCK)
    assert capture.take(["d"], True) == [None]
