"""Packed rows: the layout by hand, and values and gradients compared with rows computed one by one in float64."""

import itertools
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from flash import written_down
from kit.families import ATTENTIVE, FAMILIES, RECURRENT, save_family
from kit.rank_processes import on_ranks
from kit.tensors import full
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from vectorlm.algorithms.support import WHOLE, Support
from vectorlm.rl.models import disable_dropout
from vectorlm.train import attention, language_model, settings
from vectorlm.train.attention import packed_attention
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.load import load_model
from vectorlm.train.lora import add_lora
from vectorlm.train.packing import Bundle, Rows, pack
from vectorlm.train.settings import ModelSettings
from vectorlm.train.shard import load_sharded

TEMPERATURE = 0.8
EVERY = FAMILIES | RECURRENT | ATTENTIVE


def make_rows(input_ids, lengths, asked, groups):
    """Return padded rows; `asked` are (row, token) pairs."""
    input_ids = torch.tensor(input_ids)
    is_asked = torch.zeros_like(input_ids, dtype=torch.bool)
    for row, token in asked:
        is_asked[row, token] = True
    attention_mask = (torch.arange(input_ids.shape[1]) < torch.tensor(lengths)[:, None]).long()
    return Rows(input_ids, attention_mask, is_asked, groups)


def random_rows():
    """Return two groups with common beginnings and rows of many lengths, one without asked tokens, and a single row."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(1, 48, (7, 30), generator=generator)
    input_ids[1:4, :12], input_ids[5, :3] = input_ids[0, :12], input_ids[4, :3]
    lengths = torch.tensor([30, 17, 21, 13, 30, 8, 19])[:, None]
    places = torch.arange(30)
    is_asked = (places < lengths) & (places >= torch.tensor([12, 12, 12, 12, 5, 4, 2])[:, None])
    is_asked[3], is_asked[0, 15] = False, False
    return Rows(input_ids, (places < lengths).long(), is_asked, (0, 0, 0, 0, 1, 1, 2))


def test_a_common_beginning_lies_once_and_the_last_tokens_not_at_all():
    rows = make_rows(
        [[1, 2, 3, 4, 0], [1, 2, 5, 6, 7], [1, 2, 9, 0, 0]],
        [4, 5, 3],
        [(0, 2), (0, 3), (1, 4), (2, 2)],
        (0, 0, 1),
    )
    packing = pack(rows)
    # The beginnings come first, then the rest of group 0, longest first. Row 1 asks for token 4: token 3 is its last.
    assert packing.input_ids.tolist() == [[1, 2, 1, 2, 5, 6, 3]]
    assert packing.position_ids.tolist() == [[0, 1, 0, 1, 2, 3, 2]]
    assert packing.bundles == (Bundle(0, (2, 2)), Bundle(4, (2, 1), (0, 2)))
    # Tokens 2 and 3 of row 0 are predicted from its tokens 1 and 2, and token 4 of row 1 from its token 3.
    assert packing.places.tolist() == [1, 6, 5, 3]
    assert rows.targets.tolist() == [3, 4, 7, 9]


def test_equal_rows_are_computed_once_and_rows_without_a_question_never():
    rows = make_rows([[1, 2, 3]] * 3, [3, 3, 3], [(0, 2), (1, 2)], (0, 0, 0))
    packing = pack(rows)
    assert packing.input_ids.tolist() == [[1, 2]]
    assert packing.places.tolist() == [1, 1]
    nothing = pack(make_rows([[4, 5]], [2], [], (0,)))
    assert (nothing.input_ids.tolist(), nothing.places.tolist()) == ([[4]], [])


def test_stretches_of_like_length_attend_together():
    lengths = [1000, 900, 300, 290, 20, 10, 5]
    ids = torch.arange(7)[:, None].expand(7, 1001)
    rows = make_rows(ids.tolist(), [n + 1 for n in lengths], list(enumerate(lengths)), range(7))
    assert [bundle.lengths for bundle in pack(rows).bundles] == [(1000, 900), (300, 290), (20, 10, 5)]


@pytest.mark.parametrize("bundles", [[(600,), (40, 20)], [(220, 220, 220)]])
def test_attention_keeps_for_the_backward_pass_no_more_than_what_it_read(bundles):
    """The values are a slice of a fused projection's output, as in Phi-3."""
    lengths = list(itertools.chain(*bundles))
    ids = torch.arange(3)[:, None].expand(3, 601).tolist()
    packing = pack(make_rows(ids, [n + 1 for n in lengths], list(enumerate(lengths)), range(3)))
    assert [bundle.lengths for bundle in packing.bundles] == bundles
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    query, key, fused = (torch.randn(1, n, 660, 8, requires_grad=True) * 1 for n in (2, 2, 6))
    value = fused[:, 4:]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        found, _ = packed_attention(torch.nn.Module(), query, key, value, None, packing=packing)
    found.sum().backward()
    # The bound has queries, keys, values and outputs of 600 and twice 40 tokens, log-sums and places.
    assert sum(kept.values()) <= 4 * (4 * 2 * 680 * 8) + 4 * 2 * 680 + 8 * 2 * 680


class Operations(TorchDispatchMode):
    """A mode that counts operations by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket] += 1
        return func(*args, **(kwargs or {}))


def test_no_bundle_makes_a_gradient_of_all_tokens():
    """There are two groups with a common beginning, whose rows attend in several bundles."""
    beginnings = [[100 + group] * 30 for group in range(2)]
    lengths = [110, 100, 40, 35]
    rows = [[*beginnings[row // 4], *([row] * lengths[row % 4])] for row in range(8)]
    ids = [row + [0] * (140 - len(row)) for row in rows]
    ends = [len(row) for row in rows]
    packing = pack(make_rows(ids, ends, [(row, end - 1) for row, end in enumerate(ends)], [0] * 4 + [1] * 4))
    assert sum(bundle.shared[1] > 0 for bundle in packing.bundles) == 4
    query, key, value = (torch.randn(1, 2, packing.num_tokens, 8, requires_grad=True) for _ in range(3))
    with Operations() as operations:
        found, _ = packed_attention(torch.nn.Module(), query, key, value, None, packing=packing)
        found.sum().backward()
    assert operations.counts[torch.ops.aten.slice_backward] == 0


def test_on_cuda_rows_of_16_bits_attend_in_one_call(monkeypatch):
    """The test checks shapes and dtypes, without a mask and without padding."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention, "_mask", None)
    monkeypatch.setattr(attention, "_as_rows", None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)  # FakeTensorMode does not support it.
    layout = pack(random_rows())
    n = layout.input_ids.shape[1]
    with FakeTensorMode():
        for dtype, window in itertools.product((torch.bfloat16, torch.float16), (None, 8)):
            heads = [
                torch.empty(1, n, item, 64, dtype=dtype, device="cuda").transpose(1, 2) for item in (8, 2, 2)
            ]
            found, _ = packed_attention(
                torch.nn.Module(), *heads, None, packing=layout, sliding_window=window
            )
            assert (found.shape, found.dtype, found.device.type) == ((1, n, 8, 64), dtype, "cuda")


@pytest.mark.parametrize(
    ("dtype", "sizes", "capability", "is_taken"),
    [
        (torch.bfloat16, (128, 128), (8, 0), True),
        (torch.float32, (128, 128), (9, 0), False),
        (torch.bfloat16, (192, 128), (9, 0), False),
        (torch.bfloat16, (100, 100), (9, 0), False),
        (torch.float16, (512, 512), (9, 0), False),
        (torch.float16, (64, 64), (7, 5), False),
    ],
)
def test_the_flash_kernel_takes_16_bits_and_heads_that_it_knows(
    dtype, sizes, capability, is_taken, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode():
        query, value = (torch.empty(1, 2, 3, size, dtype=dtype, device="cuda") for size in sizes)
        assert attention.flash_takes(query, value) is is_taken
    assert not attention.flash_takes(
        torch.empty(1, 2, 3, 128, dtype=dtype), torch.empty(1, 2, 3, 128, dtype=dtype)
    )


def test_gradients_of_the_operator_for_cuda_have_its_dtypes_and_are_those_of_padded_rows(
    windows, monkeypatch
):
    layout = pack(random_rows())
    n = layout.input_ids.shape[1]
    generator = torch.Generator().manual_seed(0)
    heads = [
        torch.randn(1, item, n, 16, generator=generator).bfloat16().requires_grad_() for item in (4, 2, 2)
    ]
    outcomes = []
    for takes in (True, False):
        monkeypatch.setattr(attention, "flash_takes", lambda query, value, takes=takes: takes)
        found, _ = packed_attention(torch.nn.Module(), *heads, None, packing=layout, scaling=0.5)
        weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
        outcomes.append((found, *torch.autograd.grad((found * weights).sum(), heads)))
    assert windows == [((-1, 0), torch.bfloat16)]
    for mine, theirs in zip(*outcomes, strict=True):
        assert mine.dtype == torch.bfloat16
        # bfloat16 has eight bits, and gradients are summed over the rows of a group.
        torch.testing.assert_close(mine, theirs, rtol=0.03, atol=0.03)


def values_and_gradient(model, rows, compute):
    """Compute log-probabilities and entropies, and the gradient of a sum of both with random weights."""
    model.zero_grad()
    logprobs, entropies, *_ = compute(rows)
    weights = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(2)).to(logprobs.dtype)
    ((logprobs + 0.1 * entropies) * weights).sum().backward()
    gradient = {
        name: full(item.grad).clone() for name, item in model.named_parameters() if item.grad is not None
    }
    return logprobs.detach(), entropies.detach(), gradient


def one_by_one(model):
    """Return a function that computes each row separately with transformers."""

    def compute(rows):
        logprobs = torch.zeros(rows.input_ids.shape, dtype=torch.float64)
        entropies = torch.zeros_like(logprobs)
        for row, is_asked in enumerate(rows.is_asked):
            length = int(rows.attention_mask[row].sum())
            ids = rows.input_ids[row, :length]
            all_logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0] / TEMPERATURE, dim=-1)
            for token in torch.nonzero(is_asked)[:, 0].tolist():
                logprobs[row, token] = all_logprobs[token - 1, ids[token]]
                entropies[row, token] = -(all_logprobs[token - 1].exp() * all_logprobs[token - 1]).sum()
        return logprobs, entropies

    return compute


@pytest.fixture
def windows(monkeypatch):
    """Compute attention by the float64 version of CUDA's operator; yield the windows and dtypes of its calls."""
    calls = []
    monkeypatch.setattr(attention, "flash_takes", lambda query, value: True)
    with written_down("cpu", calls):
        yield calls


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_every_family_is_packed_and_says_what_its_rows_say_one_by_one(name, tmp_path):
    assert_rows_say_the_same(name, tmp_path)


@pytest.mark.parametrize(
    ("name", "seen"),
    [("Llama", {(-1, 0)}), ("Mistral", {(7, 0)}), ("Gemma 3", {(7, 0), (-1, 0)}), ("Gemma 2", set())],
)
def test_families_say_the_same_by_the_operator_for_cuda(name, seen, tmp_path, windows, monkeypatch):
    """The families have windows, several queries per key, and scale factors; capped scores use the CPU's attention."""
    if seen:
        monkeypatch.setattr(attention, "_mask", None)
    assert_rows_say_the_same(name, tmp_path)
    assert {window for window, _ in windows} == seen


def assert_rows_say_the_same(name, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = save_family(EVERY[name], tmp_path)
    model = disable_dropout(load_model(folder))
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **eager)
    with torch.no_grad():
        # With the small random weights, attention would hardly matter.
        for item in (*model.parameters(), *exact.parameters()):
            # A state decays by the exponential of a vector's numbers, and these stay unchanged.
            item.mul_(3 if item.dim() > 1 or name not in RECURRENT else 1)
    rows = random_rows()
    computes = LanguageModel(model, TEMPERATURE)
    assert computes.why_padded is None
    assert pack(rows).input_ids.shape[1] < rows.attention_mask.sum()
    found = values_and_gradient(model, rows, lambda rows: computes(rows, "gradient"))
    expected = values_and_gradient(exact, rows, one_by_one(exact))
    torch.testing.assert_close(found[:2], expected[:2], rtol=2e-5, atol=1e-5, check_dtype=False)
    largest = max(item.abs().max() for item in expected[2].values())
    for parameter, gradient in expected[2].items():
        gap = (found[2][parameter].double() - gradient).abs().max()
        assert gap <= 1e-4 * largest, parameter


@pytest.mark.parametrize(
    ("config", "settings", "reason"),
    [
        ("BloomConfig", {"n_layer": 2, "n_head": 2}, "its attention is eager"),
        (
            "MptConfig",
            {"d_model": 64, "n_heads": 2, "n_layers": 2, "max_seq_len": 64},
            "its attention is eager",
        ),
        ("MambaConfig", {"state_size": 8}, "its packed rows would change each other"),
        (
            "Qwen2MoeConfig",
            {
                "num_experts": 2,
                "num_experts_per_tok": 1,
                "moe_intermediate_size": 32,
                "use_sliding_window": True,
                "sliding_window": 12,
                "layer_types": ["sliding_attention", "full_attention"],
                "shared_expert_intermediate_size": 32,
            },
            "its attention does not pass on its sliding window",
        ),
        (
            "Llama4TextConfig",
            {"intermediate_size_mlp": 64, "num_local_experts": 2, "head_dim": 32, "attention_chunk_size": 8},
            "it has layers of chunked_attention",
        ),
    ],
)
def test_a_model_whose_attention_cannot_take_it_is_padded_and_named(config, settings, reason, tmp_path):
    import transformers

    common = {
        "vocab_size": 48,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, config)(**(common | settings))
    )
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    computes = LanguageModel(disable_dropout(loaded), TEMPERATURE)
    assert computes.why_padded is not None
    assert computes.why_padded.startswith(reason)
    assert loaded.config._attn_implementation != "packed"
    rows = random_rows()
    logprobs, entropies = computes(rows, "value")[:2]
    expected, spread = one_by_one(loaded)(rows)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropies.double(), spread, rtol=1e-4, atol=1e-4)


def test_a_model_that_packing_would_change_is_padded_and_says_how_far_it_would_be_off(folder, monkeypatch):
    model = disable_dropout(load_model(folder))
    monkeypatch.setattr(language_model, "_head", lambda causal, layer: lambda states: 2 * layer(states))
    computes = LanguageModel(model)
    assert computes.why_padded is not None
    assert "off by" in computes.why_padded
    assert model.training
    assert model.config._attn_implementation == "sdpa"


def test_padded_rows_keep_the_cap_of_a_model_whose_attention_is_packed(tmp_path):
    """A user may call the model directly."""
    folder = save_family(FAMILIES["Gemma 2"], tmp_path)
    model, plain = load_model(folder).eval(), load_model(folder).eval()
    for item in (model, plain):
        for name, parameter in item.named_parameters():
            parameter.data.mul_(30 if "q_proj" in name or "k_proj" in name else 1)
    assert LanguageModel(model).packs
    assert (model.config._attn_implementation, plain.config._attn_implementation) == ("packed", "eager")
    rows = random_rows()
    inputs = {"input_ids": rows.input_ids, "attention_mask": rows.attention_mask}
    for given in (inputs, {"input_ids": rows.input_ids[:, :5]}):
        is_token = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
        torch.testing.assert_close(
            model(**given).logits[is_token], plain(**given).logits[is_token], rtol=1e-4, atol=1e-4
        )


def both_ways(topology, folder, settings, lora, support=WHOLE):
    """Compute rows packed and padded with one sharded model; return both values and gradients."""

    def load(is_empty):
        model = disable_dropout(load_model(folder, dtype=settings.dtype, is_empty=is_empty))
        return add_lora(model, {"r": 4, "target_modules": ["q_proj", "down_proj"]}) if lora else model

    model = load_sharded(load, topology, settings)
    rows, found = random_rows(), []
    for packs in (True, False):
        computes = LanguageModel(model, TEMPERATURE, support=support, packs=packs)
        assert computes.packs is packs
        found.append(
            values_and_gradient(model, rows, lambda rows, computes=computes: computes(rows, "gradient"))
        )
    return found


WAYS = [
    (ModelSettings(use_activation_checkpointing=True), False, WHOLE, 1e-5),
    (ModelSettings(sharding_strategy="NO_SHARD"), True, WHOLE, 1e-5),
    (ModelSettings(use_mp=True), False, WHOLE, 0.05),
    (ModelSettings(dtype="bfloat16", use_activation_checkpointing=True), True, WHOLE, 0.05),
    (ModelSettings(), True, Support(top_p=0.8, top_k=30, min_p=0.1), 1e-5),
]
"""Model settings, whether adapters are trained, the support of the distributions, and a tolerance."""


def all_ways(topology, folder):
    return [both_ways(topology, folder, *how) for *how, _ in WAYS]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_sharded_models_say_the_same_packed_and_padded(folder, world_size):
    for found in on_ranks(world_size, all_ways, folder):
        for (packed, padded), (*_, tolerance) in zip(found, WAYS, strict=True):
            assert_alike(packed, padded, tolerance)
        assert not torch.allclose(found[-1][0][0], found[1][0][0]), "nothing was cut"


def both_ways_compiled(topology, folder, settings):
    """Compute rows with compiled blocks, but without inductor's kernels, whose compilation takes two minutes."""
    torch.compile = partial(torch.compile, backend="aot_eager")
    return both_ways(topology, folder, replace(settings, compile=True), True)


@pytest.mark.slow
def test_compiled_blocks_say_the_same(folder):
    settings = ModelSettings(use_activation_checkpointing=True)
    ((plain, _),) = on_ranks(1, both_ways, folder, settings, True)
    for packed, padded in on_ranks(1, both_ways_compiled, folder, settings):
        assert_alike(packed, plain, 1e-5)
        assert_alike(padded, plain, 1e-5)


def assert_alike(found, expected, tolerance):
    torch.testing.assert_close(found[:2], expected[:2], rtol=tolerance, atol=tolerance)
    largest = max(item.abs().max() for item in expected[2].values())
    assert found[2].keys() == expected[2].keys()
    for name, gradient in expected[2].items():
        assert (found[2][name] - gradient).abs().max() <= tolerance * largest, name


def test_logits_are_made_in_chunks_and_only_for_tokens_that_are_asked_for(folder, monkeypatch):
    model = disable_dropout(load_model(folder))
    computes, shapes = LanguageModel(model), []
    model.lm_head.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape[0]))
    rows = random_rows()
    computes.logprobs(rows)
    num_asked = int(rows.is_asked.sum())
    assert shapes == [num_asked]
    shapes.clear()
    monkeypatch.setattr(settings, "CHUNK_BYTES", 48 * 4 * 30)
    computes.logprobs(rows)
    assert shapes == [30] * (num_asked // 30) + [num_asked % 30]
    assert num_asked > 30


@pytest.mark.parametrize(
    ("vocab_size", "expected"), [(32768, 2048), (32769, 2047), (151936, 441), (1 << 30, 1)]
)
def test_a_chunk_of_logits_takes_at_most_256_mib(vocab_size, expected):
    assert settings.chunk_tokens(vocab_size) == expected
