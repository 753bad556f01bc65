"""Commands and programs of README and docs/ run as written, except for sizes."""

import ast
import shlex
import sys
from importlib import import_module

import pytest
import yaml
from datasets import Dataset
from kit.pages import ROOT, blocks, commands, run
from kit.rank_processes import save_tiny_llama
from kit.rl_runs import lines

from vectorlm.cli import main
from vectorlm.runs.config.load import DEFAULT_PATH
from vectorlm.sampling.testing import CHECKS

QUICK = [
    "--set", "train_parameters.epochs=1", "--set", "dataset.train_ds=data/countdown/eval",
    "--set", "evaluation.every=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Return a folder like a clone after `make run` has made the data."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("configs", "examples", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    made = {
        "make_countdown": ["--num_train", "1024", "--num_eval", "256", "--num_questions", "16"],
        "make_chats": ["--num_chats", "40", "--num_questions", "40"],
        "make_nim": ["--num_chats", "40", "--num_games", "40", "--num_held_out", "12"],
        "make_pictures": ["--num_train", "16", "--num_eval", "4"],
    }
    # Run the programs in this process, which has the imports of three others.
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(ROOT / "examples")
        for name, few in made.items():
            patch.setattr(sys, "argv", [name, *few])
            import_module(name).main()
        assert main(["preprocess", "configs/countdown_reward.yaml"]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "configs").glob("*.yaml")))
def test_every_config_is_sound(checkout, name, monkeypatch, capsys):
    """Stand-ins replace files that a config starts from and this machine does not have."""
    monkeypatch.chdir(checkout)
    text = (ROOT / "configs" / name).read_text()
    stand_ins = {
        "model": "data/countdown/model",
        "evaluation.prompts": "data/countdown/eval.jsonl",
        "train_parameters.max_seq_len": 64,
        "train_parameters.use_flash_attention": "False",
    }
    if "rl:" in text:
        stand_ins["rl.prompts"] = "data/countdown/train.jsonl"
    if "enable_wandb_logging: True" in text:
        stand_ins["wandb_config.mode"] = "offline"
    if "max_model_len:" in text:
        stand_ins["engine.max_model_len"] = 64
    if "max_tokens: 1024" in text:
        stand_ins |= {f"{section}.sampling_params.max_tokens": 16 for section in ("rl", "evaluation")}
    if "small_sums.py:" in text:
        stand_ins["evaluation.rewards"] = "countdown"
    if "small_sums.py:" in text and "rl:" in text:
        stand_ins["rl.rewards"] = "{countdown: 1.0}"
    elif "small_sums.py:" in text:
        stand_ins |= {f"dataset.{part}_ds": f"data/countdown/{part}" for part in ("train", "eval")}
    if "/train_pairs" in text:
        stand_ins["dataset.eval_ds"] = "data/countdown/train_pairs"
    if "\nreward_model:" in text:
        del stand_ins["evaluation.prompts"]
    if "data/chats" in text or "data/nim" in text:
        stand_ins = {"dataset.train_ds": "data/countdown/train", "dataset.eval_ds": "data/countdown/eval"}
    if "data/chats" in text and "rl:" in text:
        stand_ins = {"model": "data/chats/model"}
    if "data/nim" in text and "rl:" in text:
        stand_ins = {"model": "data/nim/model"}
    if "data/pictures" in text:
        stand_ins = {}
    if "  teacher:" in text:
        stand_ins["rl.teacher.model"] = "data/countdown/model"
    settings = [word for key, value in stand_ins.items() for word in ("--set", f"{key}={value}")]
    assert main(["check", f"configs/{name}", "--world_size", "2", *settings]) == 0, capsys.readouterr().err
    assert f"configs/{name}: ok" in capsys.readouterr().out


@pytest.mark.slow
def test_the_main_command_leaves_its_files_and_its_model_is_sampled_from(checkout, run_here, capsys):
    first = shlex.split(commands("README.md", "vectorlm run")[0], comments=True)
    run(checkout, "-m", *first, *QUICK)
    made = {path.name for path in (checkout / "runs/countdown_sft").iterdir()}
    names = "final-model metrics.jsonl samples.jsonl run.png config.yaml run.json sampler.log checkpoints"
    assert made == set(names.split())
    run_here(checkout, "-m", *shlex.split(commands("README.md", "vectorlm sample")[0]))
    assert capsys.readouterr().out


@pytest.mark.slow
def test_the_commands_for_reinforcement_learning_train(checkout, run_here):
    _, *lines_of_page = commands("README.md", "vectorlm run")
    warm_up, reinforce = (shlex.split(line, comments=True) for line in lines_of_page)
    # In the README, the command before this one runs a sampler.
    run_here(checkout, "-m", *warm_up, *QUICK[:4], "--set", "train_parameters.sampler=null")
    few = ["--set", "rl.max_steps=1", "--set", "rl.prompts_per_step=8"]
    run_here(checkout, "-m", *reinforce, *few)
    assert "eval/accuracy" in lines(checkout / "runs/countdown_grpo/metrics.jsonl")[1]
    assert (checkout / "runs/countdown_grpo/final-model").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["calculator_grpo", "guessing_grpo"])
def test_the_examples_with_turns_run(checkout, run_here, name):
    few = ["model=data/chats/model", "rl.max_steps=2", "rl.prompts_per_step=4", "rl.group_size=4"]
    few.append(f"train_parameters.output_dir=runs/{name}")
    # The model has not learned to end its turns.
    few.append(f"rl.sampling_params={{max_tokens: 8, stop_token_ids: {list(range(4, 200, 2))}}}")
    settings = [word for setting in few for word in ("--set", setting)]
    run_here(checkout, "-m", "vectorlm", "run", f"configs/{name}.yaml", "--world_size", "1", *settings)
    rollouts = lines(checkout / f"runs/{name}" / "rollouts.jsonl")
    assert [row["train_step"] for row in rollouts] == [1] * 16 + [2] * 16
    # In the calculator example, an answer without a call ends the rollout.
    assert name == "calculator_grpo" or max(row["num_turns"] for row in rollouts) == 5


@pytest.mark.slow
def test_the_self_play_example_plays_against_older_selves_and_logs_its_win_rate(checkout, run_here):
    few = ["model=data/nim/model", "rl.max_steps=2", "rl.prompts_per_step=4", "rl.group_size=4"]
    few += ["rl.keep_adapters={every: 1, last: 1}", "evaluation.every=2"]
    # The model has not learned to move, and most games end with its first turn.
    few.append(f"rl.sampling_params={{max_tokens: 1, stop_token_ids: {list(range(4, 200))}}}")
    settings = [word for setting in few for word in ("--set", setting)]
    run_here(checkout, "-m", "vectorlm", "run", "configs/selfplay_grpo.yaml", "--world_size", "1", *settings)
    metrics = lines(checkout / "runs/selfplay_grpo" / "metrics.jsonl")
    rated = [line for line in metrics if "eval/win_rate" in line]
    assert [line["step"] for line in rated] == [0, 2]
    assert all(line["eval/win_rate"] == line["eval/accuracy/environment"] for line in rated)
    assert len(lines(checkout / "runs/selfplay_grpo" / "rollouts.jsonl")) == 32


@pytest.mark.slow
def test_the_example_with_images_runs(checkout, run_here):
    few = ["rl.max_steps=2", "rl.prompts_per_step=4", "evaluation.every=2"]
    settings = [word for one in few for word in ("--set", one)]
    run_here(checkout, "-m", "vectorlm", "run", "configs/pictures_grpo.yaml", "--world_size", "1", *settings)
    rollouts = lines(checkout / "runs/pictures_grpo" / "rollouts.jsonl")
    assert [row["train_step"] for row in rollouts] == [1] * 64 + [2] * 64


@pytest.mark.slow
def test_the_ten_lines_run(checkout, run_here):
    (checkout / "loop.py").write_text(blocks("README.md", "python")[0])
    run_here(checkout, "loop.py")


@pytest.mark.slow
def test_the_custom_loop_runs(checkout, run_here):
    command = ast.get_docstring(ast.parse((ROOT / "examples/custom_loop.py").read_text())).splitlines()[2]
    words = shlex.split(command.split("  ")[0])
    assert words[0] == "python"
    run_here(checkout, *words[1:], "--num_steps", "1")


@pytest.mark.slow
def test_the_loop_of_the_guide_runs(tmp_path, run_here, capsys):
    save_tiny_llama(tmp_path / "model", hidden_size=64)
    (code,) = blocks("docs/howto/own_loop.md", "python")
    changes = {
        # Another test runs the README's loop with vLLM; this test checks the rest of the loop.
        'SamplingEngine(path, dtype="float32", max_model_len=64)': 'HFEngine(path, dtype="float32")',
        "data/countdown/model": "model",
        "20, world_size=2": "3, world_size=2",
    }
    for old, new in changes.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    (tmp_path / "loop.py").write_text(code)
    run_here(tmp_path, "loop.py")
    assert len(ast.literal_eval(capsys.readouterr().out.splitlines()[-1])) == 3
    names = {path.name for path in (tmp_path / "my-model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names


@pytest.mark.slow
def test_the_plain_torchrun_command_trains_without_a_sampler(checkout):
    (command,) = commands("docs/multi_node.md", "torchrun --nproc_per_node 2 examples/llama_example.py")
    words = ["-m", "torch.distributed.run", "--standalone", *shlex.split(command)[1:]]
    run(checkout, *words, *QUICK, "--set", "train_parameters.output_dir=runs/plain")
    assert (checkout / "runs/plain/final-model").is_dir()


@pytest.mark.slow
def test_commands_and_scripts_without_a_file_take_the_reference_config(checkout, run_here, capsys):
    run_here(checkout, "-m", "vectorlm", "check", "--world_size", "2")
    assert str(DEFAULT_PATH) in capsys.readouterr().out
    assert "examples/llama_example_mp.py" in run(checkout, "examples/llama_example.py", *QUICK[:4])
    assert (checkout / "runs/config/final-model/model.safetensors").is_file()
    assert not (checkout / "runs/config/samples.jsonl").exists()


@pytest.fixture
def contracts(tmp_path):
    """Return a folder with the files that the pages about contracts use."""
    save_tiny_llama(tmp_path / "path/to/a/small/model", hidden_size=64)
    (tmp_path / "my_inference.py").write_text(
        "from vectorlm.sampling.backends.transformers import Transformers as MyInference\n"
    )
    return tmp_path


@pytest.mark.slow
def test_a_backend_of_ones_own_goes_through_every_check(contracts, run_here):
    _, backend, ranks = blocks("docs/howto/own_backend.md", "python")
    (contracts / "test_inference.py").write_text(backend)
    # tests/sampling/testing/test_contract.py runs all checks on the same backend.
    one = ["-k", CHECKS[0].__name__, "test_inference.py"]
    printed = run(contracts, "-m", "pytest", "-p", "no:cacheprovider", *one)
    assert f"1 passed, {len(CHECKS) - 1} deselected" in printed
    (contracts / "ranks.py").write_text(ranks)
    run_here(contracts, "ranks.py")


@pytest.mark.slow
def test_an_engine_follows_the_trainer_of_the_page(contracts, run_here, capsys):
    (contracts / "followed.py").write_text(blocks("docs/contracts.md", "python")[0])
    run_here(contracts, "followed.py")
    assert len(capsys.readouterr().out.splitlines()) >= 3


@pytest.mark.slow
def test_what_was_moved_over_from_trl_runs(tmp_path, run_here):
    """The prompts are messages in a saved dataset, with the page's rewards and config."""
    _, rewards, *_ = blocks("docs/from_trl.md", "python")
    (config,) = blocks("docs/from_trl.md", "yaml")
    settings = yaml.safe_load(config)
    save_tiny_llama(tmp_path / settings["model"], hidden_size=64)
    questions = [
        {"prompt": [{"role": "user", "content": letter * 3}], "answer": None if letter == "d" else letter}
        for letter in "abcd"
    ]
    Dataset.from_list(questions).save_to_disk(tmp_path / settings["rl"]["prompts"])
    (tmp_path / "rewards.py").write_text(rewards)
    (tmp_path / "gsm8k.yaml").write_text(config)
    tiny = [
        "train_parameters.max_seq_len=64",
        "rl.max_steps=2",
        "rl.prompts_per_step=2",
        "rl.group_size=4",
        "rl.sampling_params.max_tokens=6",
        "engine.dtype=float32",
        "engine.kv_cache_memory_bytes=16777216",
    ]
    settings_of_tests = [word for setting in tiny for word in ("--set", setting)]
    run_here(tmp_path, "-m", "vectorlm", "run", "gsm8k.yaml", *settings_of_tests)
    output = tmp_path / settings["train_parameters"]["output_dir"]
    assert (output / "final-model/config.json").is_file()
    rollouts = lines(output / "rollouts.jsonl")
    assert len(rollouts) == 2 * 2 * 4
    for row in rollouts:
        total = (row["rewards"]["right"] or 0.0) + 0.1 * row["rewards"]["brief"]
        assert row["reward"] == pytest.approx(total, abs=1e-6)
    assert any(row["rewards"]["right"] is None for row in rollouts), "no question without an answer"
