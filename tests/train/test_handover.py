"""The hand-over of devices: its order, and unchanged results of training."""

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from kit.rank_processes import on_ranks, save_tiny_llama
from kit.tensors import full, local
from kit.tiny_runs import build_loop, whole_weights

from vectorlm.errors import EngineDied, EngineError, OutOfTurn
from vectorlm.ranks.topology import Topology
from vectorlm.sampling.inline_engines import FakeEngine, HFEngine
from vectorlm.train import handover
from vectorlm.train.handover import DeviceTurn, Offload
from vectorlm.train.load import load_model
from vectorlm.types import UpdateReport


class ScribeEngine:
    """An engine that records its calls and raises the given failures."""

    def __init__(self, failures=()):
        self.calls, self.failures = [], dict(failures)

    def _note(self, name, **flags):
        parts = "+".join(part for part, chosen in flags.items() if chosen)
        self.calls.append(f"{name} {parts}".strip())
        if error := self.failures.get(self.calls[-1]):
            raise error

    def sleep(self, *, weights=True, kv_cache=True):
        self._note("sleep", weights=weights, kv=kv_cache)

    def wake_up(self, *, weights=True, kv_cache=True):
        self._note("wake", weights=weights, kv=kv_cache)

    def update(self, model, train_step, in_flight="refuse"):
        self._note(f"update {train_step}")
        return UpdateReport(train_step, train_step == 4, 0, 0.0, 0.0, 0.0, busy=((1.0, 2.0),))


def stepped():
    """Return a small layer and its optimizer, whose state exists."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def turn_over(engine, *, model=None, topology=None, **settings):
    model, topology = model or torch.nn.Linear(2, 2), topology or Topology()
    return DeviceTurn(engine, model=model, topology=topology, **settings)


@pytest.mark.parametrize(
    ("sleep", "expected"),
    [
        ("none", ["update 3", "sample"]),
        ("kv_cache", ["sleep kv", "update 3", "wake kv", "sample", "sleep kv"]),
        ("all", ["sleep weights+kv", "wake weights", "update 3", "wake kv", "sample", "sleep weights+kv"]),
    ],
)
def test_the_engine_takes_its_kv_cache_back_last_and_sleeps_again(sleep, expected):
    engine = ScribeEngine()
    turn = turn_over(engine, sleep=sleep)
    with turn.sampling(3) as report:
        engine.calls.append("sample")
    assert report.version == 3
    assert engine.calls == expected


@pytest.mark.parametrize(
    ("sleep", "block"),
    [
        ("none", []),
        ("kv_cache", ["update 0", "wake kv", "sleep kv"]),
        ("all", ["wake weights", "update 0", "wake kv", "sleep weights+kv"]),
    ],
)
def test_the_check_before_the_first_step_wakes_updates_and_sleeps_and_counts_for_nothing(sleep, block):
    engine = ScribeEngine()
    turn = turn_over(engine, sleep=sleep)
    engine.calls.clear()
    turn.check_sleep()
    assert engine.calls == 2 * block
    assert (turn.swapped_at, turn.busy) == (None, [])


def test_torch_s_cache_is_emptied_before_each_part_of_the_engine_wakes(monkeypatch):
    engine = ScribeEngine()
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: engine.calls.append("empty"))
    turn = turn_over(engine, topology=Topology(device="cuda:0"), sleep="all")
    with turn.sampling(3):
        pass
    assert engine.calls[1:-1] == ["empty", "wake weights", "update 3", "empty", "wake kv"]


def test_the_optimizer_is_off_the_device_before_the_engine_wakes_and_back_after_it_sleeps():
    model, optimizer = stepped()
    memory = optimizer.state[model.weight]["exp_avg"].untyped_storage()
    sizes = []

    class Watched(ScribeEngine):
        def _note(self, name, **flags):
            super()._note(name, **flags)
            sizes.append((self.calls[-1], memory.nbytes()))

    turn = turn_over(Watched(), model=model, optimizer=optimizer, sleep="all", offload_optimizer=True)
    with turn.sampling(0):
        pass
    names = ["sleep weights+kv", "wake weights", "update 0", "wake kv", "sleep weights+kv"]
    assert sizes == list(zip(names, [16, 0, 0, 0, 0], strict=True))
    assert memory.nbytes() == 16


def test_sampling_inside_sampling_is_out_of_turn():
    turn = turn_over(ScribeEngine())
    with turn.sampling(1), pytest.raises(OutOfTurn, match=r"step 2 .* step 1"), turn.sampling(2):
        pass
    with turn.sampling(2):
        pass


@pytest.mark.parametrize("offload", [True, False])
def test_an_optimizer_step_inside_sampling_is_out_of_turn(offload):
    model, optimizer = stepped()
    turn = turn_over(ScribeEngine(), model=model, optimizer=optimizer, offload_optimizer=offload)
    with turn.sampling(4), pytest.raises(OutOfTurn, match="inside the sampling block of step 4"):
        optimizer.step()
    optimizer.step()


def test_an_offloaded_state_cannot_be_read_inside_sampling():
    model, optimizer = stepped()
    turn = turn_over(ScribeEngine(), model=model, optimizer=optimizer, offload_optimizer=True)
    with turn.sampling(4), pytest.raises(OutOfTurn, match="on the host"):
        optimizer.state_dict()
    assert all(value.numel() for value in optimizer.state_dict()["state"][0].values())


def test_an_optimizer_keeps_neither_an_engine_nor_the_host_block_of_an_earlier_turn():
    model, optimizer = stepped()
    kept = []
    for _ in range(2):
        engine = FakeEngine(lambda prompt, version: prompt)
        turn = turn_over(engine, model=model, optimizer=optimizer, offload_optimizer=True)
        with turn.sampling(0):
            pass
        kept += [weakref.ref(engine), weakref.ref(turn), weakref.ref(turn._offload)]
    gc.collect()
    assert [reference() is None for reference in kept] == [True] * 3 + [False] * 3
    optimizer.step()
    with turn.sampling(1), pytest.raises(OutOfTurn):
        optimizer.step()


def test_the_host_block_is_kept_until_the_copies_back_have_ended(monkeypatch):
    stream = SimpleNamespace(synchronize=lambda: ended.append(block() is not None))
    monkeypatch.setattr("torch.cuda.Stream", lambda device: stream)
    ended, offload = [], Offload(stepped()[1], "cuda:0")
    block = weakref.ref(offload._host)
    del offload
    gc.collect()
    assert ended == [True]
    assert block() is None


class Unforeseen(Exception):
    pass


@pytest.mark.parametrize(
    ("world_size", "error", "sleeps_again"),
    [
        (1, Unforeseen("mine"), True),
        (2, Unforeseen("of this rank alone"), False),
        (2, EngineError("of all ranks"), True),
        (1, EngineDied("gone"), False),
    ],
)
def test_after_an_error_in_the_block_training_can_go_on(world_size, error, sleeps_again):
    engine = ScribeEngine()
    model, optimizer = stepped()
    topology = Topology(world_size=world_size, local_world_size=world_size)
    turn = turn_over(
        engine, model=model, optimizer=optimizer, sleep="all", offload_optimizer=True, topology=topology
    )
    before = optimizer.state[model.weight]["exp_avg"].clone()
    with pytest.raises(type(error)) as caught, turn.sampling(1):
        raise error
    assert caught.value is error
    assert (engine.calls[-1] == "sleep weights+kv") == sleeps_again
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], before)
    optimizer.step()
    with turn.sampling(2):
        pass
    assert engine.calls[-1] == "sleep weights+kv"


def test_an_error_on_the_way_in_brings_everything_back_and_a_second_one_is_a_note():
    refusal = EngineError("no memory")
    engine = ScribeEngine({"wake weights": refusal})
    model, optimizer = stepped()
    turn = turn_over(engine, model=model, optimizer=optimizer, sleep="all", offload_optimizer=True)
    engine.failures["sleep weights+kv"] = EngineError("and no sleep")
    with pytest.raises(EngineError, match="no memory") as caught, turn.sampling(1):
        raise AssertionError("the block must not run")
    assert "and no sleep" in caught.value.__notes__[0]
    assert optimizer.state[model.weight]["exp_avg"].untyped_storage().nbytes() == 16
    assert model.weight.grad.untyped_storage().nbytes() == 16


def train(topology, folder, hand_over):
    """Train three steps of two micro-batches, with hand-overs before, between and during steps."""
    training = build_loop(topology, folder, num_micro_batches=2)
    stepper = training.optimizer_step
    greedy = {"temperature": 0.0, "max_tokens": 4}
    engine = HFEngine(folder, topology=topology, sampling_params=greedy)
    turn = DeviceTurn(
        engine,
        model=stepper.model,
        optimizer=stepper.optimizer,
        sleep="all",
        offload_optimizer=True,
        topology=topology,
    )
    answers = []

    def sample(step):
        if hand_over:
            with turn.sampling(step):
                answers.append(engine.sample(["abc"])[0][0].token_ids)

    for number, micro_batches in zip(range(3), training.remaining_steps(), strict=False):
        sample(2 * number)
        for batch in micro_batches:
            training.objective.sum_loss(batch)[0].backward()
            sample(2 * number + 1)  # the gradients of half a step exist now
        stepper.optimizer.step()
        stepper.optimizer.zero_grad()
        stepper.schedule.step()
    states = [full(value) for state in stepper.optimizer.state.values() for value in state.values()]
    return whole_weights(stepper.model), states, answers


def train_both_ways(topology, folder):
    return train(topology, folder, False), train(topology, folder, True)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_training_with_hand_overs_is_bit_for_bit_the_training_without(world_size, folder):
    results = on_ranks(world_size, train_both_ways, folder)
    start = dict(load_model(folder).named_parameters())
    for (weights, states, _), (same_weights, same_states, answers) in results:
        assert all(torch.equal(weights[name], same_weights[name]) for name in weights)
        assert all(torch.equal(one, other) for one, other in zip(states, same_states, strict=True))
        assert len(states) == 3 * len(weights)
        assert not torch.equal(weights["lm_head.weight"], start["lm_head.weight"])
        assert len(answers) == 9
    assert len({str(answers) for _, (_, _, answers) in results}) == 1


def trained_layer(optimizer_class, **settings):
    torch.manual_seed(0)
    layer = torch.nn.Linear(5, 3)
    optimizer = optimizer_class(layer.parameters(), **settings)
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
    return layer, optimizer


def tensors_of(optimizer):
    return [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]


def test_state_and_gradients_leave_and_return_as_the_same_objects_with_the_same_bits():
    layer, optimizer = trained_layer(torch.optim.AdamW, lr=0.1)
    held = [*tensors_of(optimizer), layer.weight.grad, layer.bias.grad]
    before = [tensor.clone() for tensor in held]
    offload = Offload(optimizer, "cpu")
    offload.move_out()
    # 15 weights and 3 biases have two averages and a gradient each; a tensor also has a count of steps.
    assert offload.num_bytes == (18 * 3 + 2) * 4
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in held)
    assert layer.weight.untyped_storage().nbytes() == 60
    offload.move_out()
    offload.move_back()
    assert offload.num_bytes == 0
    assert all(torch.equal(now, then) for now, then in zip(held, before, strict=True))
    assert [id(tensor) for tensor in tensors_of(optimizer)] == [id(tensor) for tensor in held[:-2]]
    offload.move_back()


def test_all_goes_into_one_block_that_is_kept_for_the_next_time(monkeypatch):
    blocks = []
    make = handover._host_block
    monkeypatch.setattr(handover, "_host_block", lambda *size: blocks.append(make(*size)) or blocks[-1])
    _, optimizer = trained_layer(torch.optim.AdamW, lr=0.1)
    offload = Offload(optimizer, "cpu")
    for _ in range(2):
        offload.move_out()
        offload.move_back()
    assert [block.numel() for block in blocks] == [(18 * 3 + 2) * 4]


class Order:
    """A stand-in for CUDA's streams that records each copy's stream and all waits."""

    def __init__(self, monkeypatch):
        self.log, self.now = [], "main"
        copy = torch.Tensor.copy_

        def noted(target, source, non_blocking=False):
            self.log.append((f"copy on {self.now}", non_blocking))
            return copy(target, source)

        monkeypatch.setattr(torch.Tensor, "copy_", noted)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.log.append("host waits"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(self, "main"))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(
            handover, "_host_block", lambda size, pinned: torch.empty(size, dtype=torch.uint8)
        )

    @contextlib.contextmanager
    def on(self, stream):
        self.now = stream.name
        yield
        self.now = "main"


class Stream:
    def __init__(self, order, name):
        self.order, self.name = order, name

    def wait_stream(self, other):
        self.order.log.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize("has_gradients", [False, True])
def test_the_way_back_is_beside_other_work_and_nothing_uses_the_state_before_its_end(
    monkeypatch, has_gradients
):
    layer, optimizer = trained_layer(torch.optim.SGD, lr=0.1, momentum=0.9)
    gradients = [parameter.grad.clone() for parameter in layer.parameters()]
    if not has_gradients:
        optimizer.zero_grad()
    offload = Offload(optimizer, "cpu")
    order = Order(monkeypatch)
    offload._stream = Stream(order, "side")
    offload.move_out()
    num = 4 if has_gradients else 2
    assert order.log == ["host waits", *[("copy on main", True)] * num, "host waits"]
    order.log.clear()
    offload.move_back()
    back = ["side waits for main", ("copy on side", True)] * num
    waits = ["main waits for side"]
    assert order.log == back + waits * has_gradients
    for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
        parameter.grad = gradient
    for use in (
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict(optimizer.state_dict()),
    ):
        order.log.clear()
        use()
        assert order.log[0] == waits[0]


def test_what_comes_later_goes_into_a_block_of_its_own():
    layer, optimizer = trained_layer(torch.optim.SGD, lr=0.1, momentum=0.9)
    offload = Offload(optimizer, "cpu")
    offload.move_out()
    layer.bias.grad = torch.tensor([5.0, 6.0, 7.0])
    offload.move_out()
    offload.move_back()
    assert layer.bias.grad.tolist() == [5.0, 6.0, 7.0]
    assert all(item.isfinite().all() and item.any() for item in tensors_of(optimizer))


def steps_of(monkeypatch, owner, method, fails_at, retry):
    """Train three steps; memory runs out on the way back of the second block, at the given call."""
    layer, optimizer = trained_layer(torch.optim.AdamW, lr=0.1)
    turn = turn_over(ScribeEngine(), model=layer, optimizer=optimizer, offload_optimizer=True)
    call, calls = getattr(owner, method), iter(range(100))

    def runs_out(*args, **kwargs):
        if next(calls) == fails_at:
            raise torch.OutOfMemoryError("no memory")
        return call(*args, **kwargs)

    for step in range(3):
        fails = step == 1 and fails_at is not None
        with (
            monkeypatch.context() as patch,
            pytest.raises(torch.OutOfMemoryError) if fails else turn.sampling(step),
        ):
            if fails:
                with turn.sampling(step):
                    patch.setattr(owner, method, runs_out)
        if fails and retry == "block":
            with turn.sampling(step):
                pass
        if retry == "step":
            optimizer.zero_grad()
            for parameter in layer.parameters():
                parameter.grad = torch.full_like(parameter, step)
        optimizer.step()
    assert turn._offload.num_bytes == 0
    return [*layer.parameters(), *tensors_of(optimizer)]


@pytest.mark.parametrize("retry", ["block", "step"])
@pytest.mark.parametrize("fails_at", range(8))
@pytest.mark.parametrize(("owner", "method"), [(torch.Tensor, "copy_"), (torch.UntypedStorage, "resize_")])
def test_no_state_is_lost_if_memory_runs_out_on_the_way_back(monkeypatch, owner, method, fails_at, retry):
    expected = steps_of(monkeypatch, owner, method, None, retry)
    found = steps_of(monkeypatch, owner, method, fails_at, retry)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_views_of_one_buffer_are_moved_once_and_state_that_is_the_weight_itself_stays():
    layer, optimizer = trained_layer(torch.optim.SGD, lr=0.1, momentum=0.9)
    flat = torch.arange(18.0)
    layer.weight.grad, layer.bias.grad = flat[:15].view(3, 5), flat[15:]
    optimizer.state[layer.weight] = {"history": [flat[2:4], (torch.ones(7),)], "slow": layer.weight.detach()}
    optimizer.state[layer.bias] = {}
    offload = Offload(optimizer, "cpu")
    offload.move_out()
    assert offload.num_bytes == (18 + 7) * 4
    offload.move_back()
    assert torch.equal(flat, torch.arange(18.0))
    assert torch.equal(layer.bias.grad, torch.tensor([15.0, 16.0, 17.0]))


def test_memory_that_torch_does_not_own_stays_where_it_is():
    layer, optimizer = trained_layer(torch.optim.SGD, lr=0.1)
    borrowed = torch.frombuffer(bytearray(12), dtype=torch.float32)
    layer.weight.grad, layer.bias.grad = None, borrowed
    offload = Offload(optimizer, "cpu")
    offload.move_out()
    assert offload.num_bytes == 0
    assert borrowed.tolist() == [0.0, 0.0, 0.0]


def shard_bytes(topology, model_dir):
    training = build_loop(topology, model_dir)
    training.optimize(next(training.remaining_steps()))
    optimizer = training.optimizer_step.optimizer
    offload = Offload(optimizer, "cpu")
    offload.move_out()
    moved = offload.num_bytes
    offload.move_back()
    assert all(local(state["exp_avg"]).isfinite().all() for state in optimizer.state.values())
    return moved


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_each_rank_moves_its_own_shards(tmp_path, world_size):
    from transformers import AutoModelForCausalLM

    model_dir = save_tiny_llama(tmp_path / "model")
    parameters = list(AutoModelForCausalLM.from_pretrained(model_dir).parameters())
    states = sum(parameter.numel() for parameter in parameters) * 2 * 4
    counts = len(parameters) * 4
    assert sum(on_ranks(world_size, shard_bytes, model_dir)) == states + counts * world_size


def test_a_device_that_holds_nothing_of_it_gives_nothing():
    _, optimizer = trained_layer(torch.optim.AdamW, lr=0.1)
    offload = Offload(optimizer, "meta")
    offload.move_out()
    assert offload.num_bytes == 0


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="sleep='deep'"):
        turn_over(ScribeEngine(), sleep="deep")
    with pytest.raises(ValueError, match="offload_optimizer"):
        turn_over(ScribeEngine(), offload_optimizer=True)


def test_what_the_engine_did_is_kept_until_somebody_asks():
    turn = turn_over(ScribeEngine())
    assert (turn.swapped_at, turn.busy) == (None, [])
    with turn.sampling(3):
        pass
    swapped_at = turn.swapped_at
    assert turn.busy == [(1.0, 2.0)]
    with turn.sampling(4) as report:
        assert report.skipped
    assert (turn.swapped_at, turn.busy) == (swapped_at, [(1.0, 2.0)])
