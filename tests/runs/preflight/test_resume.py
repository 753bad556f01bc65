"""Messages about checkpoints in output_dir, before a run starts."""

import json
from pathlib import Path

import pytest
from kit.rank_processes import on_ranks
from kit.sft_runs import train

from vectorlm.cli import main
from vectorlm.errors import CheckpointError
from vectorlm.runs.config.load import load_config
from vectorlm.runs.preflight.resume import find_resumption, identity_of, settings_of_rank
from vectorlm.train.checkpoint.folder import locked, mark_finished

ROOT = Path(__file__).parents[3]
WITH = "train_parameters.checkpointing_enabled=True"
RL = "rl={algorithm: grpo, max_steps: 4, prompts: p.jsonl, prompts_per_step: 2, group_size: 2, rewards: {countdown: 1}}"
SAMPLER = "train_parameters.sampler={sample_frequency: 2, prompts: p.jsonl}"


@pytest.fixture
def path(write_complete):
    """Return a config whose files exist and whose run has a checkpoint of step 6, saved by one rank."""
    Path("models/tiny/model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")
    for split in ("train", "eval"):
        Path("data", split, "state.json").write_text(json.dumps({"_fingerprint": "abc"}))
    Path("p.jsonl").write_text('{"prompt": "a", "numbers": [1], "target": 1}\n')
    path = write_complete()
    save(path)
    return path


def save(path, *overrides, world_size=1, is_finished=False):
    checkpoint = Path("runs/tiny/checkpoints/step-00000006")
    checkpoint.mkdir(parents=True, exist_ok=True)
    identity = identity_of(load_config(path, [WITH, *overrides]), world_size, num_examples=21)
    (checkpoint / "identity.json").write_text(json.dumps(identity))
    if is_finished:
        (checkpoint / "finished").touch()


def found(path, *overrides, world_size=1, num_examples=21):
    return find_resumption(load_config(path, [WITH, *overrides]), world_size, num_examples)


def refused(path, *overrides, **more):
    with pytest.raises(CheckpointError) as caught:
        found(path, *overrides, **more)
    return str(caught.value)


def test_the_same_config_goes_on_and_nothing_has_changed(path):
    assert found(path).step == 6
    assert found(path).changes == ()
    assert find_resumption(load_config(path), 1) is None, "checkpoints are off"


def test_a_finished_run_of_epochs_is_known_before_its_prompts_are_counted(path):
    epochs = (SAMPLER, RL, "rl.num_epochs_over_prompts=2")
    save(path, *epochs, "rl.max_steps=6", is_finished=True)
    unknown = (*epochs, "rl.max_steps=null")
    assert found(path, *unknown).is_finished
    assert not found(path, *unknown, "rl.num_epochs_over_prompts=3").is_finished
    Path("p.jsonl").write_text('{"prompt": "a", "numbers": [1], "target": 1}\n' * 2)
    assert not found(path, *unknown).is_finished


@pytest.mark.parametrize(
    ("override", "is_finished"),
    [
        *(("early_stopping_patience=2", True), ("early_stopping_patience=1", True)),
        *(("early_stopping_patience=3", False), ("early_stopping_patience=null", False)),
        ("early_stopping_min_delta=0.5", False),
    ],
)
def test_a_run_that_stopped_early_continues_only_if_it_may_train_longer(path, override, is_finished):
    patient = "train_parameters.early_stopping_patience=2"
    save(path, patient)
    mark_finished(Path("runs/tiny/checkpoints"), stopped_early=True)
    assert found(path, patient, f"train_parameters.{override}").is_finished == is_finished


def test_a_folder_that_was_moved_is_the_same_run(path):
    Path("runs").rename("elsewhere")
    Path("models/tiny").rename("models/moved")
    changed = found(path, "train_parameters.output_dir=elsewhere/tiny", "model=models/moved")
    assert changed.changes == ("model='models/moved' (was 'models/tiny')",)


def test_each_changed_setting_is_named_alone(path):
    changes = found(path, "train_parameters.optimizer.lr=2e-4", "train_parameters.use_mp=True").changes
    assert changes == (
        "train_parameters.optimizer.lr=0.0002 (was 0.0001)",
        "train_parameters.use_mp=true (was null)",
    )
    save(path, SAMPLER, RL)
    changes = found(path, SAMPLER, RL, "rl.algorithm.clip_high=0.3", "rl.async={max_staleness: 1}").changes
    assert "rl.algorithm.clip_high=0.3 (was 0.2)" in changes
    assert "rl.async.max_staleness=1 (was null)" in changes


def test_other_content_under_the_same_name_is_noticed(path):
    Path("data/train/state.json").write_text(json.dumps({"_fingerprint": "xyz"}))
    assert found(path).changes == ("the content of dataset.train_ds has changed",)
    save(path, SAMPLER, RL)
    Path("p.jsonl").write_text('{"prompt": "b", "numbers": [1], "target": 1}\n')
    assert found(path, SAMPLER, RL).changes == ("the content of rl.prompts has changed",)
    Path("models/tiny/model.safetensors").write_bytes(b"\3" + bytes(7) + b"{ }")
    assert "the content of model has changed" in refused(path, SAMPLER, RL)


def test_adapters_that_a_run_no_longer_starts_from_are_noticed(path):
    merged = ("train_parameters.adapters=trained", "train_parameters.merge_adapters=True")
    Path("trained").mkdir()
    Path("trained/adapter_config.json").write_text("{}")
    save(path, *merged)
    assert found(path, *merged).changes == ()
    assert "the content of train_parameters.adapters has changed" in refused(path)


@pytest.mark.parametrize("section", ["reward_model", "preference"])
def test_a_section_that_trains_is_neither_added_nor_removed(path, section):
    override = f"{section}={{{'loss: dpo' if section == 'preference' else 'center_coef: 0.1'}}}"
    assert f"section that trains={section} (was none)" in refused(path, override)
    save(path, override)
    assert found(path, override).changes == ()
    assert f"section that trains=none (was {section})" in refused(path)


@pytest.mark.parametrize("num_bytes", [100, 1_000_000])
def test_another_base_of_the_same_sizes_is_noticed(path, num_bytes):
    weights = Path("models/tiny/model.safetensors")
    start = b"\2" + bytes(7) + b"{}"
    weights.write_bytes(start + b"a" * num_bytes)
    save(path)
    assert found(path).changes == ()
    weights.write_bytes(start + b"b" * num_bytes)
    assert "the content of model has changed" in refused(path)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("train_parameters.seed=4", "train_parameters.seed=4 (was 11)"),
        ("train_parameters.freeze=[]", "train_parameters.freeze=[] (was ['vision'])"),
        ("train_parameters.lora_peft_config={r: 4}", "train_parameters.lora_peft_config.r=4 (was null)"),
        (
            "dataset.train_bs=8",
            "global batch=8 (ranks with different rows x train_bs x gradient_accumulation_steps) (was 4)",
        ),
    ],
)
def test_what_the_weights_or_the_order_of_the_data_depend_on_is_refused(path, override, text):
    assert refused(path, override, "train_parameters.optimizer.lr=2e-4") == refused(path, override)
    assert f"step-00000006: {text}" in refused(path, override)
    assert "model=runs/tiny/final-model" not in refused(path, override)
    Path("runs/tiny/final-model").mkdir()
    assert "with model=runs/tiny/final-model. To start over" in refused(path, override)


def test_another_number_of_ranks_is_answered_with_the_ranks_or_the_accumulation_that_restore_the_batch(path):
    save(path, "train_parameters.gradient_accumulation_steps=2", world_size=2)
    steps = "train_parameters.gradient_accumulation_steps"
    assert f"Restore it with world_size=2 or {steps}=4, or choose" in refused(path, f"{steps}=2")
    assert f"Restore it with {steps}=8, or choose" in refused(path, "dataset.train_bs=2")
    assert "Restore it, or choose" in refused(path, "dataset.train_bs=3")


def test_other_rows_and_ranks(path):
    assert "rows of dataset.train_ds=22 (was 21)" in refused(path, num_examples=22)
    assert "global batch=8" in refused(path, world_size=2)
    assert found(path, "dataset.train_bs=2", world_size=2).changes == (
        "dataset.train_bs=2 (was 4)",
        "world_size=2 (was 1)",
    )


def test_another_algorithm_is_another_run(path):
    save(path, SAMPLER, RL)
    assert "rl.algorithm.name='rloo' (was 'grpo')" in refused(path, SAMPLER, RL, "rl.algorithm=rloo")


@pytest.mark.parametrize("before", ["null", "{every: 2, last: 3}"])
@pytest.mark.parametrize("now", ["null", "{every: 2, last: 3}", "{every: 4, last: 3}", "{every: 2, last: 1}"])
def test_other_kept_adapters_are_another_run(path, before, now):
    # The checkpoint holds their tensors.
    save(path, SAMPLER, RL, f"rl.keep_adapters={before}")
    if now == before:
        assert found(path, SAMPLER, RL, f"rl.keep_adapters={now}").changes == ()
    else:
        assert "rl.keep_adapters" in refused(path, SAMPLER, RL, f"rl.keep_adapters={now}")


def test_checkpoints_of_earlier_versions_are_refused_with_what_to_do(path):
    Path("runs/tiny/checkpoints/step-00000006/identity.json").write_text('{"seed": 11}')
    assert "written by an earlier version of vectorlm. Delete runs/tiny/checkpoints." in refused(path)


def test_check_says_how_the_run_goes_on(path, capsys):
    changed = ["--set", WITH, "--set", "train_parameters.optimizer.lr=2e-4"]
    assert main(["check", path, *changed]) == 0
    assert (
        "resumes       from step 6; train_parameters.optimizer.lr=0.0002 (was 0.0001)"
        in capsys.readouterr().out
    )
    assert main(["check", path, "--set", WITH, "--set", "train_parameters.seed=4"]) == 1
    assert "train_parameters.seed=4 (was 11)" in capsys.readouterr().err
    save(path, is_finished=True)
    assert main(["check", path, "--set", WITH]) == 0
    assert "runs/tiny is finished at step 6" in capsys.readouterr().out


def test_a_finished_run_says_so_at_once(path, run_here, capsys):
    save(path, is_finished=True)
    run_here(Path.cwd(), ROOT / "examples/llama_example_mp.py", "--yaml_path", path, "--set", WITH)
    out, err = capsys.readouterr()
    assert out == ""
    for named in ("step 6", "runs/tiny/final-model", "train_parameters.epochs", "runs/tiny/checkpoints"):
        assert named in err
    assert not found(path, "train_parameters.epochs=3").is_finished


def test_a_folder_in_use_is_refused_before_a_model_is_loaded(path):
    in_use = r"train_parameters\.output_dir='runs/tiny' is in use by another run\."
    with locked(Path("runs/tiny")), pytest.raises(AssertionError, match=in_use):
        on_ranks(1, train, load_config(path, [WITH]))


def test_what_ranks_must_have_alike_are_settings_files_and_versions(path):
    Path("mine.py").write_text("def score(text):\n    return 1.0\n")
    rl = RL.replace("countdown", '"mine.py:score"')

    def alike(*more):
        return settings_of_rank(load_config(path, [SAMPLER, rl, *more]))

    before = alike()
    assert alike("train_parameters.output_dir=elsewhere") == before
    assert {"python", "torch", "transformers"} <= before.keys()

    def changed():
        now = alike()
        return {name for name in {**before, **now} if before.get(name) != now.get(name)}

    Path("mine.py").write_text("def score(text):\n    return 2.0\n")
    assert changed() == {"content of mine.py:score"}
    Path("p.jsonl").write_text('{"prompt": "b", "numbers": [1], "target": 1}\n')
    Path("models/tiny/model.safetensors").unlink()
    assert changed() == {"content of mine.py:score", "content of p.jsonl", "content of models/tiny"}


@pytest.mark.parametrize("name", ["agents.py:play", "agents:play"])
def test_ranks_compare_the_file_of_an_agent(path, monkeypatch, name):
    monkeypatch.syspath_prepend(Path.cwd())
    Path("agents.py").write_text("def play(url, key, row):\n    return 1.0\n")

    def content():
        config = load_config(path, [SAMPLER, RL, f"rl.environment=openai:{name}"])
        return settings_of_rank(config)[f"content of openai:{name}"]

    before = content()
    Path("agents.py").write_text("def play(url, key, row):\n    return 2.0\n")
    assert content() != before
