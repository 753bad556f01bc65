"""Tasks of reasoning-gym as prompts."""

import json
import os
import pickle
import subprocess
import sys

import pytest

from vectorlm.data.prompts import read_prompts
from vectorlm.data.settings import CurriculumSettings, PromptSettings
from vectorlm.data.tasks import BY_HASH
from vectorlm.errors import DatasetError
from vectorlm.report.step_lines import json_text
from vectorlm.rl.rewards.registry import get_reward

reasoning_gym = pytest.importorskip("reasoning_gym", reason="the package reasoning_gym is not installed")
ADD = PromptSettings(reasoning_gym="chain_sum", config={"min_terms": 2, "max_terms": 2}, size=50, seed=7)
MIXED = {"datasets": [{"name": "gcd", "weight": 0.25}, {"name": "chain_sum", "weight": 0.75}]}
ITEMS = """
import json, sys
from vectorlm.data.tasks import Tasks
made = {name: [repr(Tasks(name, 1000, 5)[place].columns["item"]) for place in (999, 0)] for name in sys.argv[1:]}
# Some tasks print without a line's end.
print()
print(json.dumps(made))
"""


def items_in_another_process(names, hash_seed):
    env = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    found = subprocess.run([sys.executable, "-c", ITEMS, *names], env=env, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


def test_the_short_form_is_reasoning_gyms_own_dataset():
    prompts = read_prompts("reasoning_gym:chain_sum", "rl.prompts", is_held_out=False)
    own = reasoning_gym.create_dataset("chain_sum", seed=0, size=10_000)
    assert len(prompts) == 10_000
    for place in (0, 17, 9_999):
        record = prompts[place]
        assert record.prompt == [{"role": "user", "content": own[place]["question"]}]
        assert record.columns == {"item": own[place], "answer": own[place]["answer"]}
    assert prompts[:2] == [prompts[0], prompts[1]]
    assert prompts[-1] == prompts[9_999]
    with pytest.raises(IndexError):
        prompts[10_000]


def test_the_mapping_has_settings_size_seed_and_a_system_message():
    settings = PromptSettings(**{**vars(ADD), "system_prompt": "default"})
    prompts = read_prompts(settings)
    assert (len(prompts), prompts[3].columns["item"]["metadata"]["num_terms"]) == (50, 2)
    system, question = prompts[3].prompt
    assert "<answer>" in system["content"]
    assert question == read_prompts(ADD)[3].prompt[0]
    of_text = read_prompts(PromptSettings(**{**vars(ADD), "system_prompt": "Add.", "form": "text"}))
    assert of_text[3].prompt == f"Add.\n\n{question['content']}"


def test_what_travels_to_the_ranks_is_the_settings_alone():
    prompts = read_prompts("reasoning_gym:chain_sum")
    before = prompts[5]
    sent = pickle.dumps(prompts)
    assert len(sent) < 500
    assert pickle.loads(sent)[5] == before


def test_composite_mixes_tasks_by_weights():
    prompts = read_prompts(PromptSettings(reasoning_gym="composite", config=MIXED, size=400))
    names = [entry.columns["item"]["metadata"]["source_dataset"] for entry in prompts]
    assert set(names) == {"gcd", "chain_sum"}
    assert 0.65 < names.count("chain_sum") / len(names) < 0.85


def test_held_out_items_are_others_than_those_that_are_trained_on():
    train = read_prompts("reasoning_gym:chain_sum", is_held_out=False)
    held_out = read_prompts("reasoning_gym:chain_sum")
    assert len(held_out) == 100
    assert not train.shares_items_with(held_out)
    assert train.shares_items_with(read_prompts(PromptSettings(reasoning_gym="chain_sum", seed=9_999)))
    assert train.shares_items_with(
        read_prompts(PromptSettings(reasoning_gym="composite", config=MIXED, seed=0))
    )
    assert not train.shares_items_with(read_prompts(PromptSettings(reasoning_gym="gcd", seed=0)))


def test_levels_are_those_of_the_curriculum_and_of_equal_size():
    prompts = read_prompts(PromptSettings(reasoning_gym="chain_sum", level=0))
    assert prompts.num_levels == 11
    widths = [prompts.at_level(level)[3].columns["item"]["metadata"]["difficulty"] for level in (0, 4)]
    assert [entry["num_terms"] for entry in widths] == [(2, 2), (2, 6)]
    assert prompts.at_level(4)[3].columns["level"] == 4
    mixed = read_prompts(PromptSettings(reasoning_gym="composite", config=MIXED, level=2))
    assert mixed[0].columns["level"] == 2


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"reasoning_gym": "chain_sun"}, "'chain_sum'"),
        ({"reasoning_gym": "chain_sum", "config": {"max_term": 3}}, "'max_terms'"),
        ({"reasoning_gym": "chain_sum", "config": {"seed": 3}}, "'seed'"),
        ({"reasoning_gym": "chain_sum", "config": {"max_terms": 1}}, "max_terms must be >= min_terms"),
        ({"reasoning_gym": "chain_sum", "level": 11}, "0 to 10"),
        ({"reasoning_gym": "composite"}, "no `datasets`"),
        ({"reasoning_gym": "composite", "config": {"datasets": [{"name": "gdc"}]}}, "'gcd'"),
        (
            {"reasoning_gym": "composite", "config": {"datasets": [{"name": "gcd", "weight": -1}]}},
            "Weight must be",
        ),
        (
            {"reasoning_gym": "chain_sum", "config": {"max_terms": 1}, "curriculum": CurriculumSettings()},
            "max_terms",
        ),
        ({"reasoning_gym": "arc_agi_2"}, "arc_agi_2"),
        ({"path": "p.jsonl", "level": 1}, "rl.prompts.level"),
    ],
    ids=str,
)
def test_what_cannot_be_made_is_refused(settings, text):
    with pytest.raises(DatasetError) as error:
        read_prompts(PromptSettings(**settings), "rl.prompts")
    assert text in str(error.value)


def test_tasks_that_depend_on_the_order_of_sets_need_its_seed(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(DatasetError, match="PYTHONHASHSEED=0"):
        read_prompts("reasoning_gym:ransom_note")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert len(read_prompts("reasoning_gym:ransom_note")) == 100


@pytest.mark.slow
def test_every_process_makes_the_same_items():
    names = ["chain_sum", "gcd", "letter_counting", "spell_backward"]
    assert items_in_another_process(names, 1) == items_in_another_process(names, 2)


@pytest.mark.slow
def test_every_task_but_the_known_makes_the_same_items_in_every_process():
    from reasoning_gym.factory import DATASETS

    # knight_swap takes seconds for an item, and composite combines other tasks.
    names = sorted(DATASETS.keys() - {"composite", "knight_swap"})
    first, second = (items_in_another_process(names, seed) for seed in (1, 2))
    assert {name for name in names if first[name] != second[name]} == set(BY_HASH) - {"knight_swap"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain_sum", "gcd", "letter_counting", "countdown", "zebra_puzzles"])
def test_the_reward_is_the_tasks_own_scorer(name):
    reward = get_reward("reasoning_gym")
    record = read_prompts(f"reasoning_gym:{name}")[0]
    answer, item = record.columns["answer"], record.columns["item"]
    assert reward(f" {answer}\n", item=item) == 1.0
    assert reward(f"So:\n<answer>1 {answer}</answer> or <answer>\n{answer}\n</answer>.", item=item) == 1.0
    own = reasoning_gym.create_dataset(name)
    for other in ("", "no", f"It is {answer}"):
        assert reward(other, item=item) == own.score_answer(other, item)
        assert reward(f"x <answer>{other}</answer>", item=item) == own.score_answer(other, item)
    # rollouts.jsonl stores these columns.
    json_text(record.columns)


def test_answers_are_scored_with_the_settings_of_their_item(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    reward = get_reward("reasoning_gym")
    places = {"min_num_decimal_places": 8, "max_num_decimal_places": 8, "precision": 10}
    mixed = {"datasets": [{"name": "decimal_arithmetic", "config": places}, {"name": "gcd"}]}
    ladders = {"min_word_length": 3, "max_word_length": 3}
    decimals, parts, words = (
        read_prompts(PromptSettings(reasoning_gym=name, config=config, size=20))
        for name, config in (("decimal_arithmetic", places), ("composite", mixed), ("word_ladder", ladders))
    )
    of_parts = [record.columns["item"] for record in parts]
    assert [item["config"] for item in of_parts if "config" in item] == [places] * sum(
        item["metadata"]["source_dataset"] != "gcd" for item in of_parts
    )
    part = next(item for item in of_parts if "config" in item)
    for item in (decimals[0].columns["item"], json.loads(json_text(part))):
        assert reward(item["answer"], item=item) == 1.0
        assert reward(str(float(item["answer"]) + 1e-4), item=item) == 0.0
    item = words[0].columns["item"]
    assert reward(item["answer"], item=item) == 1.0
    assert reward("no", item=item) == 0.0
    for level in (0, 3):
        settings = PromptSettings(reasoning_gym="decimal_arithmetic", level=level)
        made = read_prompts(settings)[0].columns["item"]
        own = reasoning_gym.create_dataset("decimal_arithmetic", **made["config"])
        close = str(float(made["answer"]) + 5e-4)
        assert reward(close, item=made) == own.score_answer(close, made)
    assert own.config.max_num_decimal_places != 3
