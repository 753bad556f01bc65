"""Ranks that split a model, compared with one rank: loss, gradients, steps, adapters and checkpoints."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from kit.families import FAMILIES, RECURRENT, WITH_BUFFERS, save_family
from kit.rank_processes import on_ranks
from kit.tensors import full

from vectorlm.data.loader import Collator, StepLoader
from vectorlm.errors import ConfigError
from vectorlm.ranks.topology import Topology
from vectorlm.rl.models import disable_dropout
from vectorlm.sampling.weights.arena import Arena, plain_slots
from vectorlm.sampling.weights.inspection import checksum
from vectorlm.sampling.weights.lora_source import adapter_source, merged_source
from vectorlm.sampling.weights.module_source import ModuleSource
from vectorlm.sampling.weights.plan import Layout
from vectorlm.train.checkpoint.state import CheckpointStore, load_weights
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.load import load_model
from vectorlm.train.lora import add_lora
from vectorlm.train.objective import Completions
from vectorlm.train.optimizer_step import OptimizerStep
from vectorlm.train.optimizers import make_optimizer
from vectorlm.train.packing import Rows
from vectorlm.train.settings import ModelSettings, OptimizerSettings
from vectorlm.train.shard import load_sharded
from vectorlm.train.split import why_not_split
from vectorlm.types import TrainedModel

ALL = {**FAMILIES, **WITH_BUFFERS, "Qwen3.5": RECURRENT["Qwen3.5"]}
TENSOR, EXPERT = {"tensor_parallel": 2}, {"expert_parallel": 2}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "o_proj"], "init_lora_weights": "gaussian"}
NUM_ROWS, LENGTH, FIRST = 8, 12, 3


def save(name, path, tied=False, **settings):
    """Save a family's model with two key-value heads, which two ranks can split."""
    family = replace(ALL[name], settings={**ALL[name].settings, "num_key_value_heads": 2, **settings})
    return save_family(family, path / f"{name}{'-tied' * tied}{len(settings)}", tied=tied)


def whole(tensor):
    tensor = full(tensor)
    return tensor.detach().clone()


class Trainer:
    """A model on this rank that learns from a few rows in two micro-batches per step."""

    def __init__(self, topology, folder, settings, optimizer=None, lora=None):
        settings = ModelSettings(**settings)
        self.topology = replace(topology, model_parallel=settings.model_parallel)
        torch.manual_seed(0)

        def load(is_empty):
            model = disable_dropout(load_model(folder, is_empty=is_empty))
            return model if lora is None else add_lora(model, lora)

        self.model = load_sharded(load, self.topology, settings)
        self.language_model = LanguageModel(self.model)
        self.optimizer = make_optimizer(
            OptimizerSettings(**{"lr": 1e-3, **(optimizer or {})}), self.model, False
        )
        self.step = OptimizerStep(self.model, self.optimizer, None, 0.05, self.topology)

    def learn(self, num_steps=1):
        """Return loss, gradients and gradient norm of the last step."""
        tokens = torch.randint(0, 48, (NUM_ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
        own = tokens[self.topology.data_share :: self.topology.num_data_shares]
        for _ in range(num_steps):
            total = torch.zeros((), dtype=torch.float64)
            for index, ids in enumerate(own.chunk(2)):
                is_asked = torch.zeros_like(ids).bool()
                is_asked[:, FIRST:] = True
                rows = Rows(ids, torch.ones_like(ids), is_asked, tuple(range(len(ids))))
                loss = -self.language_model.logprobs(rows).sum() / (NUM_ROWS * (LENGTH - FIRST))
                self.step.backward(loss, is_last=index == 1)
                total += loss.item()
            dist.all_reduce(total)
            gradients = {
                name: whole(weight.grad)
                for name, weight in self.model.named_parameters()
                if weight.grad is not None
            }
            norm = self.step.finish(1)["grad_norm"]
        return total.item() / self.topology.ranks_per_share, gradients, norm

    def weights(self):
        return {name: whole(weight) for name, weight in self.model.named_parameters()}


def learn_all(topology, cases):
    """Return by case the results of a step, and the reason if rows were padded."""
    found = {}
    for name, (folder, settings, more) in cases.items():
        trainer = Trainer(topology, folder, settings, **more)
        found[name] = (*trainer.learn(), trainer.language_model.why_padded)
    return found


def assert_like_one_rank(world_size, cases):
    """Compare with one rank; `cases` are (folder, settings, arguments of `Trainer`) by name."""
    cases = {name: case if len(case) == 3 else (*case, {}) for name, case in cases.items()}
    alone = on_ranks(1, learn_all, {name: (folder, {}, more) for name, (folder, _, more) in cases.items()})[0]
    for results in on_ranks(world_size, learn_all, cases):
        for name, (loss, gradients, norm, why_padded) in results.items():
            expected_loss, expected, expected_norm, expected_reason = alone[name]
            assert loss == pytest.approx(expected_loss, rel=1e-6), name
            assert norm == pytest.approx(expected_norm, rel=1e-5), name
            assert why_padded == expected_reason, name
            assert gradients.keys() == expected.keys()
            for weight, gradient in gradients.items():
                # The difference is fp32 round-off of sums in another order.
                largest = expected[weight].abs().max().item()
                torch.testing.assert_close(
                    gradient, expected[weight], rtol=0, atol=1e-5 * largest + 1e-7, msg=f"{name} {weight}"
                )


def test_two_ranks_that_split_matrices_or_experts_learn_what_one_rank_learns(tmp_path):
    dense, experts = save("Qwen3", tmp_path, tied=True), save("Qwen3-MoE", tmp_path)
    cases = {
        "tied, norms on heads": (dense, TENSOR),
        "recomputed": (dense, {**TENSOR, "use_activation_checkpointing": True}),
        "matrices of experts": (experts, TENSOR),
        "experts": (experts, EXPERT),
        "both": (experts, {**TENSOR, **EXPERT}),
    }
    assert_like_one_rank(2, cases)


@pytest.mark.slow
def test_four_ranks_that_split_and_shard_learn_what_one_rank_learns(tmp_path):
    dense, tied = save("Llama", tmp_path), save("Llama", tmp_path, tied=True)
    experts = save("Qwen3-MoE", tmp_path, num_experts=8)
    cases = {
        "dense": (dense, TENSOR),
        "tied": (tied, {**TENSOR, "sharding_strategy": "SHARD_GRAD_OP"}),
        "matrices of experts": (experts, TENSOR),
        "experts": (experts, EXPERT),
        "both": (experts, {**TENSOR, **EXPERT}),
        "experts over all": (experts, {**TENSOR, "expert_parallel": 4}),
        "adapters": (experts, TENSOR, {"lora": LORA}),
    }
    assert_like_one_rank(4, cases)


def learn_on_nodes(topology, folder):
    return Trainer(topology, folder, {**TENSOR, "sharding_strategy": "HYBRID_SHARD"}).learn()


@pytest.mark.slow
def test_replicas_on_two_nodes_learn_what_one_rank_learns(tmp_path):
    folder = save("Llama", tmp_path)
    loss, expected, _, _ = on_ranks(1, learn_all, {"": (folder, {}, {})})[0][""]
    for found, gradients, _ in on_ranks(4, learn_on_nodes, folder, num_nodes=2):
        assert found == pytest.approx(loss, rel=1e-6)
        torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-7)


UNPLANNED = ("OPT", "gpt-oss", "Mamba-2", "Falcon-H1", "Granite 4 hybrid", "Nemotron-H")
"""Families without a tensor plan in transformers 5.19."""
WITH_EXPERTS = ("Mixtral", "OLMoE", "GLM-4-MoE", "dots.llm1", "gpt-oss", "DeepSeek-V2", "GLM-4-MoE-Lite")


@pytest.mark.long
def test_two_ranks_learn_what_one_rank_learns_in_every_family_with_a_plan(tmp_path):
    names = [name for name in ALL if name not in (*UNPLANNED, "Apertus")]
    cases = {name: (save(name, tmp_path), TENSOR) for name in names}
    cases |= {f"{name}, experts": (save(name, tmp_path), EXPERT) for name in WITH_EXPERTS}
    assert_like_one_rank(2, cases)


def learn_wrongly(topology, folder):
    trainer = Trainer(topology, folder, TENSOR)
    before = trainer.weights()
    with pytest.raises(ConfigError) as caught:
        trainer.learn()
    return str(caught.value), all(map(torch.equal, before.values(), trainer.weights().values()))


@pytest.mark.slow
def test_a_plan_that_forgets_a_weight_is_refused_before_the_weights_change(tmp_path):
    """Apertus' activation has weights between split matrices."""
    for text, is_same in on_ranks(2, learn_wrongly, save("Apertus", tmp_path)):
        assert "train_parameters.tensor_parallel" in text
        assert "act_fn" in text
        assert is_same


OPTIMIZERS = {
    "adamw": {},
    "foreach": {"foreach": True},
    "sgd": {"name": "sgd", "lr": 0.1, "arguments": {"momentum": 0.9}},
    "adafactor": {"name": "adafactor"},
}


def optimize(topology, folder, settings):
    found = {}
    for name, optimizer in OPTIMIZERS.items():
        trainer = Trainer(topology, folder, settings, optimizer=optimizer)
        trainer.learn(3)
        found[name] = trainer.weights()
    return found


@pytest.mark.slow
def test_optimizers_step_weights_of_several_meshes(tmp_path):
    folder = save("Qwen3-MoE", tmp_path)
    (expected,) = on_ranks(1, optimize, folder, {})
    for found in on_ranks(2, optimize, folder, {**TENSOR, **EXPERT}):
        for name, weights in found.items():
            for weight, value in weights.items():
                # The bound is a small share of a step, because Adam divides round-off by the root of a small average.
                assert (value - expected[name][weight]).abs().max() < 5e-5, (name, weight)


def publish_all(topology, cases):
    """Publish every model after a step; return by case the arena's tensors, the checksums and the expected tensors."""
    found = {}
    for name, (folder, settings, lora, source_of) in cases.items():
        trainer = Trainer(topology, folder, settings, optimizer={"name": "sgd", "lr": 0.1}, lora=lora)
        trainer.learn()
        source = source_of(trainer.model, trainer.topology)
        num_bytes, slots = plain_slots(source.manifest(), lambda name: "float32")
        made = [Arena.create(num_bytes)] if topology.is_main else [None]
        paths = [made[0] and made[0].path]
        dist.broadcast_object_list(paths)
        layout = Layout(paths[0], num_bytes, slots)
        source.inspect(layout, True, True)
        sums = source.publish(layout, True)
        dist.barrier()
        arena = Arena.open(paths[0], num_bytes)
        found[name] = {slot.name: arena.view(slot).clone() for slot in slots}, slots, sums, trainer.weights()
        dist.barrier()
    return found


@pytest.mark.slow
def test_ranks_publish_their_blocks_and_adapters_of_them(tmp_path):
    dense, experts = save("Llama", tmp_path), save("Qwen3-MoE", tmp_path)
    everything = {**LORA, "target_modules": [*LORA["target_modules"], "down_proj", "up_proj", "lm_head"]}
    cases = {
        "matrices of experts": (experts, TENSOR, None, ModuleSource),
        "both": (experts, {**TENSOR, **EXPERT}, None, ModuleSource),
        "merged": (dense, TENSOR, everything, merged_source),
        "merged beside experts": (experts, {**TENSOR, **EXPERT}, LORA, merged_source),
        "adapter": (dense, TENSOR, everything, adapter_source),
    }
    alone = on_ranks(1, publish_all, {name: (case[0], {}, *case[2:]) for name, case in cases.items()})[0]
    results = on_ranks(2, publish_all, cases)
    for name, (sent, slots, _, weights) in results[0].items():
        by_rank = [found[name][2] for found in results]
        for slot, *parts in zip(slots, *by_rank, strict=True):
            assert sum(parts) % 2**64 == checksum(sent[slot.name], word_bytes=slot.word_bytes), slot.name
        if cases[name][2] is None:
            assert all(torch.equal(sent[weight], value) for weight, value in weights.items()), name
        torch.testing.assert_close(sent, alone[name][0], rtol=1e-5, atol=1e-6)


LAYOUTS = {
    "one": (1, {}),
    "sharded": (2, {}),
    "matrices": (2, TENSOR),
    "experts": (2, EXPERT),
    "four": (4, TENSOR),
}


def train_and_save(topology, folder, settings, path):
    trainer = Trainer(topology, folder, settings)
    trainer.learn(2)
    CheckpointStore(path, {}).save(2, {"policy": TrainedModel(trainer.model, trainer.optimizer)}, {})
    saved = trainer.weights()
    trainer.learn(2)
    return saved, trainer.weights()


def load_and_train(topology, folder, settings, path):
    trainer = Trainer(topology, folder, settings)
    CheckpointStore(path, {}).load(2, {"policy": TrainedModel(trainer.model, trainer.optimizer)})
    loaded = trainer.weights()
    trainer.learn(2)
    return loaded, trainer.weights()


def drop_out(topology, folder, settings, path, saves):
    """Save a checkpoint, or load it and learn; return the weights. Each share of the data drops out other numbers."""
    trainer = Trainer(topology, folder, settings, lora={**LORA, "lora_dropout": 0.5})
    torch.manual_seed(trainer.topology.data_share)
    store = CheckpointStore(path, {}, model_parallel=trainer.topology.model_parallel)
    trained = {"policy": TrainedModel(trainer.model, trainer.optimizer)}
    if not saves:
        store.load(1, trained)
    trainer.learn(2)
    if saves:
        store.save(1, trained, {})
    return trainer.weights()


def are_equal(some, others):
    return all(torch.equal(some[name], others[name]) for name in some)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("matrices", ("matrices", "sharded", "experts")),
        pytest.param("experts", ("experts", "one", "matrices", "four"), marks=pytest.mark.long),
        pytest.param("four", ("four", "one", "matrices", "experts"), marks=pytest.mark.long),
        pytest.param("sharded", ("matrices", "experts", "four"), marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_goes_on_in_the_same_layout_bit_for_bit_and_in_every_other(tmp_path, before, after):
    folder, path = save("Qwen3-MoE", tmp_path), str(tmp_path / "checkpoints")
    world_size, settings = LAYOUTS[before]
    saved, expected = on_ranks(world_size, train_and_save, folder, settings, path)[0]
    model = load_model(folder)
    load_weights(Path(path) / "step-00000002", model)
    assert are_equal(saved, dict(model.named_parameters())), "the export reads the checkpoint in one process"
    for layout in after:
        world_size, settings = LAYOUTS[layout]
        loaded, found = on_ranks(world_size, load_and_train, folder, settings, path)[0]
        assert are_equal(loaded, saved), layout
        if layout == before:
            assert are_equal(found, expected)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6, msg=partial("{1} {0}".format, layout))


@pytest.mark.slow
@pytest.mark.parametrize("before", ["one", "sharded", "matrices"])
def test_ranks_that_come_to_split_a_model_drop_out_the_same_numbers(tmp_path, before):
    folder, path = save("Qwen3", tmp_path), str(tmp_path / "checkpoints")
    on_ranks(LAYOUTS[before][0], drop_out, folder, LAYOUTS[before][1], path, True)
    first, second = on_ranks(2, drop_out, folder, TENSOR, path, False)
    assert are_equal(first, second)


def test_models_and_sizes_that_do_not_fit_a_plan_are_refused(tmp_path):
    def refused(name, lora=None, **settings):
        model = load_model(save(name, tmp_path, **settings.pop("more", {})), is_empty=True)
        model = model if lora is None else add_lora(model, lora).get_base_model()
        problem = why_not_split(model, ModelSettings(**settings))
        return problem and problem[:2]

    assert refused("Llama", **TENSOR) is None
    for name, settings in (("OPT", TENSOR), ("Llama", EXPERT)):
        setting, rule = refused(name, **settings)
        assert setting in settings
        assert "needs a plan" in rule
    setting, rule = refused("Llama", tensor_parallel=2, more={"vocab_size": 47})
    assert setting == "tensor_parallel"
    assert "lm_head.weight" in rule
    setting, rule = refused("Qwen3-MoE", expert_parallel=4)
    assert setting == "expert_parallel"
    assert "experts" in rule
    setting, rule = refused("Qwen3-MoE", tensor_parallel=32, more={"num_attention_heads": 32})
    assert "gate_up_proj" in rule
    for lora in (
        {"target_modules": ["q_proj"], "use_dora": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_parameters": ["mlp.experts.gate_up_proj"], "target_modules": []},
    ):
        setting, rule = refused("Qwen3-MoE", lora, **TENSOR)
        assert setting == "lora_peft_config", lora
    assert refused("Qwen3-MoE", {"target_modules": ["q_proj", "o_proj"]}, **TENSOR, **EXPERT) is None


PAIRS = [
    {"input_ids": [*range(2, 6 + row), 7, 8, 9], "labels": [-100, *range(3, 6 + row), -100, 8, 9]}
    | {"seq_lengths": [4 + row, 3], "pair_margin": 0.0}
    for row in range(5)
]


def references(topology, folder, size):
    """Return the reference log-probabilities of pairs; ranks with the same rows compute them together."""
    topology = replace(topology, model_parallel=size)
    loader = StepLoader(
        Dataset.from_list(PAIRS), Collator(0, -100, 16), topology, micro_batch_size=2, seed=0, shuffle=False
    )
    return Completions(LanguageModel(load_model(folder)), averages=False).table(loader, len(PAIRS))


def test_references_of_pairs_are_those_of_one_rank(folder):
    (expected,) = on_ranks(1, references, folder, 1)
    assert expected.abs().min() > 1
    for found in on_ranks(2, references, folder, 2):
        torch.testing.assert_close(found, expected)


def test_ranks_that_split_a_model_have_the_same_share_of_the_data():
    ranks = [Topology(rank, rank, 8, 8, model_parallel=4) for rank in range(8)]
    assert [rank.data_share for rank in ranks] == [0] * 4 + [1] * 4
    assert {rank.num_data_shares for rank in ranks} == {2}
