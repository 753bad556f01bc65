"""Critic, reference and reward models: their outputs, on one rank and on two."""

import copy
import json
import shutil
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from datasets import load_from_disk
from kit.batches import rollout_of
from kit.families import FAMILIES, RECURRENT, save_family
from kit.rank_processes import on_ranks, save_adapters
from kit.tensors import full
from kit.vision_models import save_vlm
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_rl import build
from tokenizers import decoders
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from vectorlm.algorithms.support import Support
from vectorlm.data.preprocess import preprocess
from vectorlm.data.settings import PreprocessSettings
from vectorlm.errors import ConfigError
from vectorlm.ranks.topology import Topology
from vectorlm.rl.models import Critic, Reference, disable_dropout, load_critic, require_quiet
from vectorlm.rl.rewards.reward_model import RewardModel
from vectorlm.sampling.weights.lora_factors import is_lora_layer
from vectorlm.sampling.weights.model_tensors import reshard
from vectorlm.train.checkpoint.export import export_model
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.load import STEP_SEPARATOR, load_model
from vectorlm.train.lora import STARTING, add_lora, continue_lora, options_of, start_alone
from vectorlm.train.optimizer_step import OptimizerStep
from vectorlm.train.packing import Rows
from vectorlm.train.settings import ModelSettings
from vectorlm.train.shard import DEFAULTS, load_sharded, shard_model
from vectorlm.types import PromptRecord

CHAT = [{"role": "user", "content": "ab"}]
IDS, ATTENTION = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


def rows_of(first=1):
    """Return the two rows, with all their tokens from `first` on asked for."""
    return Rows(IDS, ATTENTION, ATTENTION.bool() & (torch.arange(4) >= first), (0, 1))


ROWS = rows_of()


@pytest.fixture(scope="module")
def judge(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "judge"
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).save_pretrained(path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(path)
    return path


def score(topology, judge, *batches, policy_tokenizer=None, **more):
    """Return the scores of each batch of rollouts."""
    load = partial(load_sharded, topology=topology)
    model = RewardModel(str(judge), load, topology, policy_tokenizer, max_tokens=24, max_length=12, **more)
    return [model(rollouts) for rollouts in batches]


@pytest.fixture
def changed(judge, tmp_path):
    """Return a function that saves a changed reward model and returns transformers' scores and ours."""

    def change(
        template, texts, rollouts, *, pads=None, step_separator=None, begins=False, world_size=1, **more
    ):
        tokenizer = AutoTokenizer.from_pretrained(judge)
        tokenizer.chat_template = template
        if begins:
            begin = [("</s>", tokenizer.eos_token_id)]
            tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
                single="</s> $A", special_tokens=begin
            )
        if pads is not None:
            tokenizer.pad_token = tokenizer.eos_token
        if step_separator is not None:
            tokenizer.init_kwargs[STEP_SEPARATOR] = step_separator
        model = AutoModelForSequenceClassification.from_pretrained(judge).eval()
        model.config.pad_token_id = tokenizer.eos_token_id if pads else None
        for part in (model, tokenizer):
            part.save_pretrained(tmp_path / "judge")
        ids = [torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]]) for text in texts]
        found = [
            scores for (scores,) in on_ranks(world_size, partial(score, **more), tmp_path / "judge", rollouts)
        ]
        assert found == [found[0]] * world_size
        return found[0], [model(row).logits.item() for row in ids]

    return change


ROLES = "{% for turn in messages %}{{ turn['role'][0] }}{{ turn['content'] }}{% endfor %}"
CONTENTS = "{% for turn in messages %}{{ turn['content'] }}{% endfor %}"


def test_a_chat_gets_the_special_tokens_of_its_template_and_no_others(changed):
    found, expected = changed(f"</s>{CONTENTS}", ["</s>abcd"], [rollout_of(CHAT, "cd")], begins=True)
    assert found == pytest.approx(expected, abs=1e-5)


def test_the_chat_with_an_environment_is_read_as_reward_functions_are_shown_it(changed):
    def played(last):
        turns = [("assistant", "c"), ("user", "f"), ("assistant", last)]
        messages = [*CHAT, *({"role": role, "content": content} for role, content in turns)]
        return [rollout_of(CHAT, f"cufa{last}", messages=messages)]

    found, expected = changed(ROLES, ["uabacufae"], played("e"))
    assert found == pytest.approx(expected, abs=1e-5)
    steps = ["uabacufez", "uabacufezgz"]
    found, scores = changed(ROLES, steps, played("ezgz"), pads=True, step_separator="z")
    assert found == pytest.approx([min(torch.tensor(scores).sigmoid().tolist())], abs=1e-5)


def test_the_tools_of_a_row_and_of_its_environment_are_rendered_as_in_preprocessing(changed, judge, tmp_path):
    template = f"{{% for tool in tools or [] %}}{{{{ tool['function']['name'] }}}}{{% endfor %}}{ROLES}"
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("xx", "yy")]
    record = PromptRecord(CHAT, {"tools": json.dumps(tools[:1])}, "games")
    rollouts = [rollout_of(record, "cd"), rollout_of(replace(record, columns={}), "cd")]
    own = {"games": tools[1:]}
    for source_tools, texts in ((None, ["xxuabacd", "uabacd"]), (own, ["xxyyuabacd", "yyuabacd"])):
        found, expected = changed(template, texts, rollouts, source_tools=source_tools)
        assert found == pytest.approx(expected, abs=1e-5)
    steps = ["xxyyuabcz", "xxyyuabczdz"]
    given = {"pads": True, "step_separator": "z", "source_tools": own}
    found, scores = changed(template, steps, [rollout_of(record, "czdz")], **given)
    assert found == pytest.approx([min(torch.tensor(scores).sigmoid().tolist())], abs=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(judge)
    tokenizer.chat_template = template
    answers = [[{"role": "assistant", "content": text}] for text in ("cd", "ce")]
    pair = {"prompt": CHAT, "chosen": answers[0], "rejected": answers[1], "tools": tools}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    paths = {"load_path": str(tmp_path / "pairs.jsonl"), "save_path": str(tmp_path / "pairs")}
    preprocess(PreprocessSettings(**paths, examples="pairs"), tokenizer, 64)
    (row,) = load_from_disk(tmp_path / "pairs")
    chosen = tokenizer("xxyyuabacd", add_special_tokens=False)["input_ids"]
    assert row["input_ids"][: row["seq_lengths"][0]] == chosen


@pytest.mark.parametrize("pads", [False, True])
def test_a_score_is_read_where_the_models_own_config_reads_it(changed, pads):
    """Rows end in the tokenizer's padding token, which counts as padding only if the model's config says so."""
    rollouts = [rollout_of(CHAT, text) for text in ("c", "defg")]
    texts = ["abc</s>", "abdefg</s>"]
    found, expected = changed(f"{CONTENTS}</s>", texts, rollouts, pads=pads, world_size=2)
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_reward_model_reads_prompt_and_completion_as_one_text(judge):
    texts = [("abc", "de"), ("a", "bcdefgh"), ("xyz", "")]
    tokenizer = AutoTokenizer.from_pretrained(judge)
    plain = AutoModelForSequenceClassification.from_pretrained(judge).eval()
    ids = [torch.tensor([tokenizer(prompt + text)["input_ids"]]) for prompt, text in texts]
    rollouts = [rollout_of(*pair) for pair in texts]
    for first, again, nothing in on_ranks(2, score, judge, rollouts, rollouts, []):
        assert first == again == pytest.approx([plain(row).logits.item() for row in ids], abs=1e-5)
        assert nothing == []


@pytest.mark.parametrize("separator", [None, "z"])
def test_token_ids_of_a_prompt_are_the_policys_and_not_the_reward_models(judge, tmp_path, separator):
    policy = AutoTokenizer.from_pretrained(judge)
    policy.backend_tokenizer.decoder = decoders.Fuse()
    other = shutil.copytree(judge, tmp_path / "other")
    saved = json.loads((other / "tokenizer.json").read_text())
    vocab = saved["model"]["vocab"]
    # The reward model's letters have other ids: a to z become the ids of z to a.
    letters = [letter for letter in vocab if len(letter) == 1]
    vocab |= dict(zip(letters, [vocab[letter] for letter in reversed(letters)], strict=True))
    (other / "tokenizer.json").write_text(json.dumps(saved))
    if separator is not None:
        tokenizer = AutoTokenizer.from_pretrained(other)
        tokenizer.init_kwargs[STEP_SEPARATOR] = separator
        tokenizer.save_pretrained(other)
        config = json.loads((other / "config.json").read_text()) | {"pad_token_id": 0}
        (other / "config.json").write_text(json.dumps(config))
    texts, ids = (
        [rollout_of(prompt, "dezfz") for prompt in prompts]
        for prompts in (("abc", "g"), map(policy.encode, ("abc", "g")))
    )
    ((expected, found),) = on_ranks(1, partial(score, policy_tokenizer=policy), other, texts, ids)
    assert found == expected


def test_what_is_no_reward_model_is_refused(folder, tmp_path):
    def load(load):
        return load(False)

    two = tmp_path / "two"
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2).save_pretrained(two)
    AutoTokenizer.from_pretrained(folder).save_pretrained(two)
    with pytest.raises(ConfigError, match="two"):
        RewardModel(str(two), load, Topology(), None, max_tokens=8, max_length=8)
    description = json.loads((folder / "config.json").read_text())
    headless = shutil.copytree(folder, tmp_path / "headless")
    (headless / "config.json").write_text(json.dumps({**description, "id2label": {"0": "score"}}))
    with pytest.raises(ConfigError, match=r"score\.weight"):
        RewardModel(str(headless), load, Topology(), None, max_tokens=8, max_length=8)
    with pytest.raises(ConfigError, match=r"config\.json"):
        RewardModel(str(tmp_path / "nowhere"), load, Topology(), None, max_tokens=8, max_length=8)


def test_the_head_of_a_critic_alone_may_be_missing(folder, tmp_path, caplog):
    logging.enable_propagation()
    load_critic(str(folder), lambda load: load(False))
    logging.disable_propagation()
    assert caplog.text == ""
    broken = shutil.copytree(folder, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="broken"):
        load_critic(str(broken), lambda load: load(False))


def warnings_of_a_critic(topology, folder, packs):
    critic = build(topology, folder, "ppo", packs=packs).models.critic
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        critic(ROWS).sum().backward()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("packs", [True, False])
def test_a_sharded_critic_does_not_warn(folder, packs):
    assert on_ranks(2, warnings_of_a_critic, folder, packs) == [[], []]


def test_a_critic_with_more_recurrent_layers_than_the_policy_pads_its_rows(tmp_path):
    family = RECURRENT["Qwen3-Next"]
    more = {**family.settings, "layer_types": ["linear_attention"] * 3, "num_hidden_layers": 3}
    folders = [
        save_family(replace(family, settings=settings), tmp_path / name)
        for name, settings in (("policy", family.settings), ("more", more))
    ]
    policy = LanguageModel(disable_dropout(load_model(folders[0])))
    assert policy.packs
    same, other = (Critic(load_critic(str(folder), lambda load: load(False)), policy) for folder in folders)
    assert same.why_padded is None
    assert "layers differ from the policy" in other.why_padded


@pytest.mark.parametrize("packs", [True, False])
def test_a_new_critic_says_nothing_and_its_value_is_that_of_the_state_before_the_token(folder, packs):
    model = load_critic(str(folder), lambda load: load(False))
    critic = Critic(model, LanguageModel(disable_dropout(load_model(folder)), packs=packs))
    assert (critic.why_padded is None) is packs
    assert critic(ROWS).eq(0).all()
    with torch.no_grad():
        model.score.weight.normal_()
    values = critic(ROWS)
    assert values[:, 0].eq(0).all()
    hidden = model.model(input_ids=IDS[:1, :2]).last_hidden_state[0, -1]
    torch.testing.assert_close(values[0, 2], model.score(hidden)[0])


TINY = {"vocab_size": 48, "hidden_size": 32}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4}
SMALL = {**TINY, **LAYERS, "intermediate_size": 48, "num_key_value_heads": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
NOISY = {
    "class defaults": transformers.SeedOssConfig(**SMALL, head_dim=8),
    "three kinds": transformers.Starcoder2Config(
        **SMALL, residual_dropout=0.1, embedding_dropout=0.1, attention_dropout=0.1
    ),
    "layers": transformers.OPTConfig(
        **TINY, **LAYERS, word_embed_proj_dim=32, ffn_dim=48, dropout=0.0, layerdrop=0.02
    ),
    "router": transformers.MixtralConfig(**SMALL, **EXPERTS, router_jitter_noise=0.1),
    "input of the router": transformers.PhimoeConfig(
        **SMALL, **EXPERTS, router_jitter_noise=0.01, input_jitter_noise=0.01
    ),
    "read in each pass": transformers.GPTNeoConfig(
        **TINY, num_layers=2, num_heads=4, attention_types=[[["global"], 2]], attention_dropout=0.1
    ),
}


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("name", NOISY)
def test_noise_by_any_name_is_seen_and_turned_off_and_exported_as_it_was(folder, tmp_path, name, packs):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(NOISY[name])).train()
    before = model.config.to_dict()
    policy = LanguageModel(model, packs=packs)
    with pytest.raises(ConfigError, match="policy"):
        require_quiet("policy", model, policy)
    state = torch.get_rng_state()
    require_quiet("policy", disable_dropout(model), policy)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training, "activation checkpointing needs training mode"
    export_model(model, folder, tmp_path / "model")
    after = transformers.AutoConfig.from_pretrained(tmp_path / "model").to_dict()
    noisy = {name for name in before if "drop" in name or "jitter" in name}
    assert {name: after[name] for name in noisy} == {name: before[name] for name in noisy}
    require_quiet("policy", model, policy)


class Shaky(torch.nn.Module):
    """A layer that drops one pass in fifty, with a rate that no config contains."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.rate = inner, 0.02

    def forward(self, states):
        kept = self.inner(states)
        return kept if torch.rand([]) >= self.rate else kept * 0.0


def shaken(topology, folder, packs):
    def load(is_empty):
        model = disable_dropout(load_model(folder, is_empty=is_empty))
        model.model.layers[1].mlp = Shaky(model.model.layers[1].mlp)
        return model

    model = load_sharded(load, topology, ModelSettings())
    policy = LanguageModel(model, packs=packs)
    state = torch.get_rng_state()
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp"):
        require_quiet("policy", model, policy)
    return torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("packs", [True, False])
def test_ranks_refuse_noise_that_no_config_names(folder, packs):
    assert on_ranks(2, shaken, folder, packs) == [True, True]


def test_dropout_before_a_head_of_zeros_is_seen(folder):
    model = load_critic(str(folder), lambda load: load(False))
    critic = Critic(model, LanguageModel(disable_dropout(load_model(folder))))
    require_quiet("critic", model, critic)
    model.dropout.p = 0.5
    with pytest.raises(ConfigError, match="critic"):
        require_quiet("critic", model, critic)


@pytest.mark.parametrize("packs", [True, False])
def test_no_logits_are_made_before_the_first_token_that_matters(folder, packs):
    model = disable_dropout(load_model(folder))
    policy = LanguageModel(model, 0.7, packs=packs)
    logprobs, entropy = policy(ROWS, "value")[:2]
    shapes = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape))
    later_logprobs, later_entropy = policy(rows_of(3), "value")[:2]
    assert shapes[0][:-1] == ((1,) if packs else (2, 2))
    assert later_logprobs[:, :3].eq(0).all()
    torch.testing.assert_close(later_logprobs[:, 3:], logprobs[:, 3:])
    torch.testing.assert_close(later_entropy[:, 3:], entropy[:, 3:])
    torch.testing.assert_close(policy.logprobs(rows_of(3)), later_logprobs)


def sync(topology, folder, split=DEFAULTS):
    models = build(topology, folder, "copg", split=split).models
    reference, policy = models.reference, models.policy
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.1)
        before = reference(ROWS)
        reference.sync()
        after = reference(ROWS)
        target = policy.logprobs(ROWS)
    weights = [[full(x) for x in model.model.parameters()] for model in (reference, policy)]
    return before, after, target, all(map(torch.equal, *weights))


def test_a_synced_reference_is_the_policy(folder):
    for before, after, target, are_equal in on_ranks(2, sync, folder):
        assert not torch.equal(before, target)
        assert torch.equal(after, target)
        assert are_equal


@pytest.mark.parametrize(
    ("split", "family", "world_size"),
    [
        (ModelSettings(tensor_parallel=2), "Llama", 2),
        pytest.param(ModelSettings(expert_parallel=2), "Qwen3-MoE", 2, marks=pytest.mark.slow),
        pytest.param(
            ModelSettings(tensor_parallel=2, expert_parallel=2), "Qwen3-MoE", 4, marks=pytest.mark.slow
        ),
    ],
)
def test_a_reference_is_synced_with_a_split_policy(tmp_path, split, family, world_size):
    settings = {**FAMILIES[family].settings, "num_key_value_heads": 2}
    save_family(replace(FAMILIES[family], settings=settings), tmp_path)
    for before, after, target, are_equal in on_ranks(world_size, sync, tmp_path, split):
        assert not torch.allclose(before, target, atol=1e-3)
        torch.testing.assert_close(after, target)
        assert are_equal


def test_the_reference_of_a_policy_with_adapters_is_the_base_and_of_all_tokens(folder):
    """The support of a truncated policy would exclude tokens that the policy can draw."""
    base, support = disable_dropout(load_model(folder)), Support(top_k=5)
    expected = LanguageModel(base).logprobs(ROWS).detach()
    copied = Reference(LanguageModel(base, support=support), disable_dropout(load_model(folder)))
    torch.testing.assert_close(copied(ROWS), expected)
    adapted = disable_dropout(add_lora(load_model(folder), {"r": 4, "target_modules": ["q_proj"]}))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    policy = LanguageModel(adapted, support=support)
    for _ in range(2):  # The second pass shows that the adapters are on again.
        assert (policy.logprobs(ROWS)[ROWS.is_asked] > expected[ROWS.is_asked] + 0.5).any()
        torch.testing.assert_close(Reference(policy, None)(ROWS), expected)
    plain = LanguageModel(adapted)
    assert not torch.allclose(plain.logprobs(ROWS), expected), "the adapters stayed off"


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory):
    """Return a folder of trained adapters, and the log-probabilities that transformers with PEFT computes."""
    path = tmp_path_factory.mktemp("models") / "adapters"
    save_adapters(folder, path, modules_to_save=["lm_head"])
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), path).eval()
    logprobs = torch.zeros(ROWS.is_asked.shape)
    for row, length in enumerate(ATTENTION.sum(dim=1).tolist()):
        with torch.no_grad():
            logits = model(IDS[row : row + 1, : length - 1]).logits[0]
        logprobs[row, 1:length] = logits.log_softmax(-1).gather(1, IDS[row, 1:length, None])[:, 0]
    return path, logprobs


def continued(topology, folder, path, output):
    """Return the values of policy and reference with continued adapters before and after a step; export the policy."""
    options = options_of(path)

    def load(is_empty):
        model = load_model(folder, is_empty=is_empty)
        return disable_dropout(continue_lora(model, path, options, is_empty=is_empty, keeps_start=True))

    model = load_sharded(load, topology)
    optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=0.5)
    step = OptimizerStep(model, optimizer, None, 1.0, topology)
    policy = LanguageModel(model)
    reference = Reference(policy, None, start_alone)
    found = [policy.logprobs(ROWS).detach(), reference(ROWS)]
    policy.logprobs(ROWS).sum().backward()
    step.optimizer.step()
    found += [policy.logprobs(ROWS).detach(), reference(ROWS)]
    export_model(model, folder, output)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_reference_of_continued_adapters_is_what_they_were(folder, adapters, tmp_path, world_size):
    path, expected = adapters
    asked = ROWS.is_asked
    output = tmp_path / "exported"
    for policy, reference, moved, still in on_ranks(world_size, continued, folder, path, output):
        torch.testing.assert_close(policy[asked], expected[asked])
        # Policy and reference use the same factors in the same order, and have equal bits.
        assert torch.equal(policy, reference)
        assert torch.equal(reference, still)
        assert not torch.allclose(moved[asked], expected[asked], atol=1e-3)
    before, after = (load_file(place / "adapter_model.safetensors") for place in (path, output))
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before)
    assert not (output / STARTING).exists()


def continued_weights(topology, folder, path):
    options = options_of(path)

    def load(is_empty):
        model = load_model(folder, is_empty=is_empty)
        return continue_lora(model, path, options, is_empty=is_empty, keeps_start=False)

    return {name: full(weight) for name, weight in load_sharded(load, topology).named_parameters()}


@pytest.mark.parametrize(
    "options",
    [
        {"layers_to_transform": 0},
        {"lora_alpha": 0},
        {"target_modules": ["qkv", "q_proj"], "exclude_modules": None},
        {"target_modules": ["qkv", "q_proj"], "exclude_modules": []},
    ],
)
def test_all_ranks_continue_the_adapters_of_the_folder(folder, tmp_path, options):
    sees = "exclude_modules" in options
    base = save_vlm("qwen2.5-vl", tmp_path / "model") if sees else folder
    config = LoraConfig(**{"task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj"], **options})
    model = get_peft_model(load_model(base), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.normal_()
    model.save_pretrained(tmp_path / "adapters")
    assert any("visual" in name and "lora_" in name for name, _ in model.named_parameters()) == sees
    expected = dict(model.named_parameters())
    for found in on_ranks(2, continued_weights, base, tmp_path / "adapters"):
        assert found.keys() == expected.keys()
        assert all(torch.equal(weight, expected[name]) for name, weight in found.items())
    rebuilt = add_lora(load_model(base), options_of(tmp_path / "adapters"))
    assert [layer.scaling for layer in filter(is_lora_layer, rebuilt.modules())] == [
        layer.scaling for layer in filter(is_lora_layer, model.modules())
    ]


def adapters_after_a_reference_pass(topology, folder):
    """Return, for each sharding strategy, whether every adapter has a gradient."""
    found = {}
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        model = disable_dropout(add_lora(load_model(folder), {"r": 4, "target_modules": ["q_proj"]}))
        shard_model(model, topology, ModelSettings(sharding_strategy=strategy))
        OptimizerStep(model, torch.optim.AdamW(model.parameters()), None, 1.0, topology)
        policy = LanguageModel(model, 1.0)
        Reference(policy, None)(ROWS)
        reshard(model)
        policy.logprobs(ROWS).sum().backward()
        found[strategy] = [x.grad is not None for name, x in model.named_parameters() if "lora_" in name]
    return found


def test_adapters_learn_after_they_were_off(folder):
    for has_gradient in on_ranks(2, adapters_after_a_reference_pass, folder):
        assert all(len(found) == 6 and all(found) for found in has_gradient.values())
