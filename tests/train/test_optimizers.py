"""Every supported optimizer: its steps, the memory of its state, and resumption."""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from kit.rank_processes import on_ranks
from kit.tensors import full, local
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import LlamaConfig, LlamaForCausalLM

from vectorlm.errors import ConfigError
from vectorlm.packages import is_installed
from vectorlm.runs.config.load import load_config
from vectorlm.runs.preflight.resume import identity_of
from vectorlm.runs.preflight.settings import setting_problems
from vectorlm.train.checkpoint.state import CheckpointStore
from vectorlm.train.handover import Offload
from vectorlm.train.lora import add_lora
from vectorlm.train.optimizer_step import OptimizerStep, Schedule
from vectorlm.train.optimizers import OPTIMIZERS, make_optimizer, state_bytes
from vectorlm.train.settings import OptimizerSettings
from vectorlm.train.shard import shard_model
from vectorlm.types import TrainedModel

OWN = f"{__file__}:own"
CASES = {
    **{name: OptimizerSettings(name=name, lr=3e-3) for name in OPTIMIZERS},
    "sgd": OptimizerSettings(name="sgd", lr=0.3, arguments={"momentum": 0.5}),
    "adafactor": OptimizerSettings(name="adafactor", lr=3e-2),
    OWN: OptimizerSettings(name=OWN, lr=3e-4, eps=1e-4),
}
IN_BLOCKS = {name for name, row in OPTIMIZERS.items() if row.per_rank_blocks}
names = pytest.mark.parametrize("name", CASES)


def own(params, lr, eps):
    return torch.optim.RMSprop(params, lr=lr, eps=eps)


def is_here(name):
    return name not in OPTIMIZERS or is_installed(OPTIMIZERS[name].package)


def build(topology, settings, lora):
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4))
    if lora:
        # A matrix needs 64 x 64 numbers, because optimizers with blocks do not quantise smaller tensors.
        model = add_lora(model, {"r": 64, "target_modules": ["q_proj"]})
    shard_model(model, topology)
    optimizer = make_optimizer(settings, model, False)
    schedule = Schedule("linear", optimizer, num_warmup_steps=1, num_steps=20)
    return OptimizerStep(model, optimizer, schedule, 1.0, topology)


def steps(training, numbers):
    losses = []
    for number in numbers:
        tokens = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(number % 2))
        loss = training.model(input_ids=tokens, labels=tokens).loss
        training.backward(loss / training.topology.world_size, is_last=True)
        losses.append(loss.item())
        training.finish(number)
    return losses


def trained_weights(model):
    return [full(entry).clone() for entry in model.parameters() if entry.requires_grad]


def bytes_of(value):
    if isinstance(value, DTensor):
        value = local(value)
    if is_traceable_wrapper_subclass(value):
        # The table of codes has 1 kB per tensor of any size.
        return sum(
            bytes_of(getattr(value, entry)) for entry in value.__tensor_flatten__()[0] if entry != "qmap"
        )
    return value.numel() * value.element_size()


def checkpoint(topology, path, training, step, action):
    store = CheckpointStore(path, {})
    models = {"policy": TrainedModel(training.model, training.optimizer)}
    if action == "save":
        store.save(step, models, {"schedule": training.schedule.state_dict()})
    else:
        training.schedule.load_state_dict(store.load(step, models)["schedule"])


def go_on(topology, path, lora):
    """Train six steps with each optimizer, and repeat the last three from a checkpoint."""
    found = {}
    for index, (name, settings) in enumerate(CASES.items()):
        if not is_here(name):
            continue
        training = build(topology, settings, lora)
        losses = steps(training, range(3))
        checkpoint(topology, path / str(index), training, 3, "save")
        offload = Offload(training.optimizer, "cpu")
        offload.move_out()
        num_moved = offload.num_bytes
        offload.move_back()
        losses += steps(training, range(3, 6))
        last = trained_weights(training.model)
        state = training.optimizer.state
        kept = sum(bytes_of(entry) for values in state.values() for entry in values.values())
        numbers = sum(local(entry).numel() for entry in training.model.parameters() if entry.requires_grad)
        again = build(topology, settings, lora)
        checkpoint(topology, path / str(index), again, 3, "load")
        steps(again, range(3, 6))
        is_same = all(map(torch.equal, trained_weights(again.model), last))
        found[name] = {
            "losses": losses,
            "is_same": is_same,
            "bytes": kept / numbers,
            "moved": num_moved,
            "weights": last,
        }
    return found


def go_on_elsewhere(topology, path, lora):
    """Train the last three steps from a checkpoint of another number of ranks."""
    found = {}
    for index, (name, settings) in enumerate(CASES.items()):
        if is_here(name) and name not in IN_BLOCKS:
            training = build(topology, settings, lora)
            checkpoint(topology, path / str(index), training, 3, "load")
            steps(training, range(3, 6))
            found[name] = trained_weights(training.model)
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    path = tmp_path_factory.mktemp("alone")
    return on_ranks(1, go_on, path, False)[0], path


@pytest.mark.slow
@names
def test_an_optimizer_learns_keeps_what_is_planned_and_goes_on_bit_for_bit(alone, name):
    if name not in alone[0]:
        pytest.skip(f"needs {OPTIMIZERS[name].package}")
    found = alone[0][name]
    assert found["losses"][-1] < found["losses"][0] - 0.05
    assert found["is_same"]
    assert found["moved"] > 0
    if name != OWN:
        # The plan excludes norms, counts of steps, and Adafactor's rows and columns.
        embeddings = 2 * 96 * 64
        outside = embeddings / (embeddings + 4 * 64 * 64 + 3 * 64 * 128)
        assert found["bytes"] == pytest.approx(state_bytes(CASES[name], 4, outside), rel=0.02, abs=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_two_ranks_go_on_bit_for_bit_and_another_number_of_ranks_goes_on(tmp_path, alone, lora):
    together = on_ranks(2, go_on, tmp_path, lora)
    assert all(entry["is_same"] for rank in together for entry in rank.values())
    (elsewhere,) = on_ranks(1, go_on_elsewhere, tmp_path, lora)
    for name, weights in elsewhere.items():
        # Sums of gradients round differently, and Adam's first steps divide by them; Muon computes in bfloat16.
        limit = 2e-3 if name == "muon" else 2e-4
        torch.testing.assert_close(weights, together[0][name]["weights"], rtol=0, atol=limit)
    if not lora:
        for name, found in alone[0].items():
            assert together[0][name]["losses"] == pytest.approx(found["losses"], abs=0.05)


@names
@pytest.mark.parametrize(
    ("schedule", "arguments"), [("polynomial", {"lr_end": 1e-4}), ("cosine_with_min_lr", {"min_lr": 1e-4})]
)
def test_a_schedule_falls_from_the_peak_of_every_optimizer_to_a_rate_that_it_is_given(
    name, schedule, arguments
):
    if not is_here(name):
        pytest.skip(f"needs {OPTIMIZERS[name].package}")
    model = torch.nn.Sequential(torch.nn.Embedding(4, 4), torch.nn.ModuleList([torch.nn.Linear(4, 4)]))
    optimizer = make_optimizer(CASES[name], model, False)
    falling = Schedule(schedule, optimizer, num_warmup_steps=0, num_steps=1, **arguments)
    assert falling.learning_rate == pytest.approx(CASES[name].lr)
    falling.go_to(1)
    assert falling.learning_rate == pytest.approx(1e-4)


TEXT = """\
model: model
train_parameters: {output_dir: run, max_seq_len: 16, optimizer: {lr: 0.01}}
dataset: {train_bs: 4, eval_bs: 4, train_ds: data, eval_ds: data}
"""
OPTIMIZER = "train_parameters.optimizer"


@pytest.fixture
def problems(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(TEXT)
    (tmp_path / "broken.py").write_text("def make(params, lr): raise ValueError('not today')")

    def find(*given):
        overrides = [entry if "." in entry.partition("=")[0] else f"{OPTIMIZER}.{entry}" for entry in given]
        with suppress(FileNotFoundError):
            return list(setting_problems(load_config("my.yaml", overrides), 1))

    return find


@pytest.mark.parametrize(
    ("given", "key", "fix"),
    [
        (["name=sgdm"], "name", "'sgd'"),
        (["name=paged_adamw8bit"], "name", "Use adamw8bit"),
        (["name=sgd", "betas=[0.5,0.9]"], "betas", "Leave it out."),
        (["name=sgd", "arguments={momentun: 0.9}"], "momentun", "'momentum'"),
        (["name=sgd", "momentum=-1"], "name", "Invalid momentum value"),
        (["name=adafactor", "eps=1e-3"], "eps", "Leave it out."),
        (["name=muon", "adjust_lr_fn=mine"], "name", "mine is not supported"),
        # Muon's AdamW would accept it, and the matrices would move in the other direction.
        (["name=muon", "maximize=true"], "maximize", "Leave it out."),
        (["name=broken.py:make"], "name", "not today"),
        (["name=broken.py:make", "fused=true"], "fused", "Leave it out."),
        (["arguments={momentum: 0.9}"], "momentum", "Leave it out."),
    ],
)
def test_what_an_optimizer_does_not_take_is_refused_by_name(problems, given, key, fix):
    (text,) = problems(*given)
    assert text.startswith(f"{OPTIMIZER}.{key}=")
    assert fix in text


def test_arguments_may_stand_beside_the_name(problems):
    with pytest.raises(ConfigError, match=rf"{OPTIMIZER}\.momentun"):
        problems("name=sgd", "momentun=0.9")
    assert problems("name=sgd", "momentum=0.9", "maximize=true") == []
    found = load_config("my.yaml", [f"{OPTIMIZER}.name=sgd", f"{OPTIMIZER}.momentum=0.9"])
    assert found.train_parameters.optimizer.arguments == {"momentum": 0.9}


@pytest.mark.skipif(not is_installed("torchao"), reason="needs torchao")
def test_blocks_of_a_rank_s_shard_are_of_this_number_of_ranks_and_replicas_round_alike(problems, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    config = load_config("my.yaml", [f"{OPTIMIZER}.name=adamw8bit"])
    assert identity_of(config, 2)["fixed"] != identity_of(config, 1)["fixed"]
    (text,) = problems(
        "name=adamw4bit", "bf16_stochastic_round=true", "train_parameters.sharding_strategy=NO_SHARD"
    )
    assert text.startswith("train_parameters.sharding_strategy='NO_SHARD'")


def thin(topology):
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4))
    model = add_lora(model, {"r": 1, "target_modules": ["q_proj"]})
    shard_model(model, topology)
    optimizer = make_optimizer(OptimizerSettings(name="muon", lr=3e-3), model, False)
    training = OptimizerStep(
        model, optimizer, Schedule("constant", optimizer, num_warmup_steps=0, num_steps=9), 1.0, topology
    )
    steps(training, range(1, 4))
    return trained_weights(model)


def test_muon_leaves_matrices_of_one_row_or_column_to_its_adamw():
    alone, *ranks = (*on_ranks(1, thin), *on_ranks(2, thin))
    for weights in ranks:
        for mine, expected in zip(weights, alone, strict=True):
            torch.testing.assert_close(mine, expected)


def are_multiplied(topology):
    """Return whether a step multiplies gradients, with a norm above the bound and with one below it."""
    found = []
    for bound in (1e-3, 1e3):
        training = replace(build(topology, OptimizerSettings(name="sgd", lr=1.0), False), max_grad_norm=bound)
        tokens = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(0))
        training.backward(training.model(input_ids=tokens, labels=tokens).loss, is_last=True)
        gradients = [local(parameter.grad) for parameter in training.model.parameters()]
        before = [(gradient.clone(), gradient._version) for gradient in gradients]
        training.finish(0)
        after = [(gradient, gradient._version) for gradient in gradients]
        found.append(
            not all(torch.equal(a, b) and i == j for (a, i), (b, j) in zip(before, after, strict=True))
        )
    return found


def test_gradients_are_multiplied_only_if_their_norm_exceeds_the_bound():
    for ranks in (1, 2):
        assert on_ranks(ranks, are_multiplied) == [[True, False]] * ranks
