import pytest
import torch

from vectorlm.train.optimizer_step import Schedule
from vectorlm.train.settings import BY_LOSS

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")


def sgd(lr=1.0):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def build(name, num_warmup_steps=4, num_steps=20, lr=1.0, optimizer=None):
    return Schedule(name, optimizer or sgd(lr), num_warmup_steps=num_warmup_steps, num_steps=num_steps)


def rates(schedule, num_steps):
    found = []
    for _ in range(num_steps):
        found.append(schedule.learning_rate)
        schedule.step()
    return found


@pytest.mark.parametrize("name", ["plateau-with-warmup", "plataeu-with-warmup"])
def test_plateau_rises_linearly_to_the_peak_and_holds(name):
    assert rates(build(name), 7) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0])
    assert rates(build(name, num_warmup_steps=0), 2) == [1.0, 1.0]


def test_plateau_falls_tenfold_after_eleven_evaluations_without_progress_and_not_during_warmup():
    schedule = build("plateau-with-warmup")
    for _ in range(20):
        schedule.observe(1.0)
    assert rates(schedule, 5)[-1] == 1.0
    for _ in range(11):
        schedule.observe(1.0)
    assert schedule.learning_rate == 1.0
    schedule.observe(1.0)
    assert schedule.learning_rate == pytest.approx(0.1)
    schedule.step()
    assert schedule.learning_rate == pytest.approx(0.1)


def test_linear_and_cosine_follow_their_formulas():
    assert rates(build("linear"), 20)[:6] == pytest.approx([0, 0.25, 0.5, 0.75, 1, 15 / 16])
    assert rates(build("cosine"), 20)[12] == pytest.approx(0.5)


WARM = ("linear", "cosine", "polynomial", "constant_with_warmup", "inverse_sqrt", *BY_LOSS)


@pytest.mark.parametrize("name", WARM)
def test_no_schedule_uses_the_full_learning_rate_in_the_first_warmup_step(name):
    assert build(name, lr=1e-3).learning_rate < 0.5e-3


@pytest.mark.parametrize("num_steps", [2, 10])
@pytest.mark.parametrize("name", ["cosine", "plateau-with-warmup", "greedy"])
def test_a_schedule_goes_on_from_its_state_with_the_optimizers(name, num_steps):
    optimizers = [sgd(), sgd()]
    straight, resumed = (build(name, optimizer=optimizer) for optimizer in optimizers)
    for step in range(num_steps):
        straight.step()
        straight.observe(1.0 + step)
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    resumed.load_state_dict(straight.state_dict())
    assert resumed.learning_rate == straight.learning_rate
    for _ in range(8):
        straight.observe(9.0)
        resumed.observe(9.0)
    assert rates(resumed, 8) == rates(straight, 8)


def test_arguments_of_a_schedules_own_reach_transformers():
    schedule = Schedule("cosine_with_min_lr", sgd(), num_warmup_steps=2, num_steps=10, min_lr_rate=0.1)
    assert rates(schedule, 11)[-1] == pytest.approx(0.1)
    schedule = Schedule("warmup_stable_decay", sgd(), num_warmup_steps=2, num_steps=10, num_decay_steps=4)
    assert rates(schedule, 11) == pytest.approx([0, 0.5, 1, 1, 1, 1, 1, 0.853553, 0.5, 0.146447, 0], abs=1e-5)


@pytest.mark.parametrize(
    ("name", "arguments", "rate"),
    [
        ("plateau-with-warmup", {"patience": 0, "factor": 0.5}, 0.125),
        ("plateau-with-warmup", {"patience": 0, "factor": 0.5, "min_lr": 0.2}, 0.2),
        ("greedy", {"patience": 0, "factor": 0.5}, 0.125),
        ("greedy", {"patience": 0, "factor": 0.5, "min_lr": 0.2}, 0.2),
    ],
)
def test_a_resumed_schedule_follows_the_arguments_it_has_now_from_the_best_loss_it_had_seen(
    name, arguments, rate
):
    settings = {"num_warmup_steps": 0, "num_steps": 20}
    before, after = Schedule(name, sgd(), **settings), Schedule(name, sgd(), **settings, **arguments)
    before.observe(1.0)
    after.load_state_dict(before.state_dict())
    for _ in range(3):
        after.observe(2.0)
    assert after.learning_rate == pytest.approx(rate)


def test_a_resumed_greedy_schedule_rises_to_the_peak_it_has_now():
    before, after = (build("greedy", num_warmup_steps=0, lr=lr) for lr in (1.0, 2.0))
    for _ in range(12):
        before.observe(1.0)
    assert before.learning_rate == pytest.approx(0.95)
    after._optimizer.param_groups[0]["lr"] = before.learning_rate
    after.load_state_dict(before.state_dict())
    assert after.learning_rate == pytest.approx(1.9)
    for step in range(11):
        after.observe(0.5 - step / 100)
    assert after.learning_rate == pytest.approx(2.0)


def test_greedy_never_leaves_the_peak_upwards():
    schedule = build("greedy", num_warmup_steps=0, lr=1e-5)
    for loss in range(100, 0, -1):
        schedule.observe(float(loss))
    assert schedule.learning_rate == pytest.approx(1e-5)
