"""Prompts that cannot be encoded, or leave no room for an answer: errors before any model is loaded."""

import json
import pickle
from dataclasses import replace

import pytest
from kit.letters import letter_tokenizer
from kit.rl_runs import config_of, save_files
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFKC
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from vectorlm.data.encoding import asked, encode, length_bound
from vectorlm.data.prompts import LazyPrompts, check_lengths, fit_prompts, read_prompts
from vectorlm.data.tasks import Tasks
from vectorlm.errors import ConfigError, DatasetError
from vectorlm.runs.config.load import load_config, save_config
from vectorlm.runs.preflight import checked
from vectorlm.runs.preflight.checked import _with_steps, preflight
from vectorlm.types import PromptRecord

CHAT = [{"role": "user", "content": "abc"}]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
TEXT = """
model: {files}/model
dataset: {{train_ds: {files}/train, eval_ds: {files}/eval, train_bs: 1, eval_bs: 1}}
train_parameters:
  output_dir: {files}/run
  max_seq_len: 32
  epochs: 1
  optimizer: {{lr: 1.0e-3}}
  sampler: {{prompts: {files}/asked.jsonl}}
"""
RL, SAMPLER = "rl.prompts", "evaluation.prompts"


@pytest.fixture
def files(tmp_path):
    return save_files(tmp_path)


def ask(files, setting, prompts, template):
    """Check a run that has these prompts in one setting, and a tokenizer with this chat template."""
    return check(files, setting, [{"prompt": prompt} for prompt in prompts], template)


def check(files, setting, rows, template, overrides=()):
    path = files / "model" / "chat_template.jinja"
    path.unlink(missing_ok=True)
    if template is not None:
        path.write_text(template)
    (files / "asked.jsonl").write_text("".join(json.dumps({"wanted": "a", **row}) + "\n" for row in rows))
    overrides = [f"{setting}={files / 'asked.jsonl'}", *overrides]
    return preflight(config_of(files, files / "out", overrides=overrides), 1)


@pytest.mark.parametrize("setting", [RL, SAMPLER])
@pytest.mark.parametrize(
    ("template", "cause"),
    [
        (None, "chat_template is not set"),
        ("{{ raise_exception('no system prompt') }}", "no system prompt"),
        ("{{ messages[0].content.missing.more }}", "has no attribute 'missing'"),
        ("{{ 1 + messages[0].content }}", "TypeError"),
        ("{% for m in messages %}", "TemplateSyntaxError"),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused_with_the_tokenizer(files, setting, template, cause):
    assert ask(files, setting, [CHAT], TEMPLATE)
    with pytest.raises(ConfigError) as caught:
        ask(files, setting, ["abc", CHAT], template)
    assert f"prompt 1 of {setting} " in str(caught.value)
    assert cause in str(caught.value)


def test_messages_and_stop_strings_of_fine_tuning_are_checked_too(files):
    for split in ("train", "eval"):
        (files / split).mkdir()
        (files / split / "dataset_info.json").write_text("{}")
    path = files / "text.yaml"
    path.write_text(TEXT.format(files=files))
    (files / "asked.jsonl").write_text(json.dumps({"prompt": "abc"}) + "\n")
    params = "evaluation.sampling_params={max_tokens: 8, ignore_eos: true, stop: %s}"
    preflight(load_config(path, [params % "b"]), 1)
    with pytest.raises(ConfigError, match=r"sampling_params\.stop="):
        preflight(load_config(path, [params % "</s>"]), 1)
    (files / "asked.jsonl").write_text(json.dumps({"prompt": CHAT}) + "\n")
    (files / "model" / "chat_template.jinja").write_text("{{ raise_exception('no user') }}")
    with pytest.raises(ConfigError, match=rf"prompt 0 of {SAMPLER} .*no user"):
        preflight(load_config(path), 1)


@pytest.mark.parametrize("setting", [RL, SAMPLER])
@pytest.mark.parametrize(
    ("prompt", "rule"), [("abc" * 99, r"has \d+ tokens"), ([5, 600, 6], "holds the token 600")]
)
def test_a_prompt_that_leaves_no_room_or_has_unknown_tokens_is_refused(files, setting, prompt, rule):
    with pytest.raises(DatasetError, match=f"prompt 1 of {setting} {rule}"):
        ask(files, setting, ["abc", prompt], None)


def test_columns_that_rewards_do_not_get_are_noted_and_answers_that_cannot_be_so_long_refused(files):
    rows = [{"prompt": "a", "wanted": "a"}, {"prompt": "b", "wanted": "b", "completion": "c", "prompts": 1}]
    (files / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def notes(*overrides):
        found = preflight(config_of(files, files / "out", overrides=overrides), 1).config.notes
        return [note for note in found if not note.startswith(SAMPLER) and "chat template" not in note]

    (about_columns,) = notes(f"{RL}={files / 'asked.jsonl'}", "rl.sampling_params.max_tokens=63")
    assert about_columns.startswith(f"{RL}: rewards do not get the column completion, prompts")
    with pytest.raises(ConfigError, match=r"rl\.sampling_params\.max_tokens=64"):
        notes(f"{RL}={files / 'asked.jsonl'}", "rl.sampling_params.max_tokens=64")


@pytest.mark.parametrize(
    ("parameters", "defaults"),
    [
        ({}, "temperature 1 and max_tokens 16."),
        ({"temperature": 0}, "defaults, max_tokens 16."),
        ({"max_tokens": 8}, None),
    ],
)
def test_the_check_notes_default_sampling_parameters_of_held_out_prompts(files, parameters, defaults):
    row = {"prompt": "abc", "wanted": "a"}
    given = [f"evaluation.sampling_params={json.dumps(parameters)}"]
    notes = [
        note
        for note in check(files, SAMPLER, [row], None, given).config.notes
        if note.startswith("evaluation.sampling_params: answers")
    ]
    assert [defaults in note for note in notes] == ([True] if defaults else [])
    assert ["keeps its seed" in note for note in notes] == ([not parameters] if defaults else [])


# Each letter is a token; of 64 tokens, the prompt has 56 and the answer 8.
LONG = [
    {"prompt": letter * count, "wanted": "a"} for letter, count in (("a", 3), ("b", 60), ("c", 56), ("d", 57))
]


@pytest.mark.parametrize("setting", [RL, SAMPLER])
def test_prompts_that_leave_no_room_for_max_tokens_are_refused_dropped_or_cut(files, setting):
    section = setting.partition(".")[0]

    def prompts(how):
        checked = check(files, setting, LONG, None, [f"{section}.overlong_prompts={how}"])
        return checked, checked.prompts[""] if setting == RL else checked.evaluation_prompts

    with pytest.raises(DatasetError, match=f"prompt 1 of {setting}"):
        prompts("error")
    checked, found = prompts("drop")
    assert [record.prompt[0] for record in found] == ["a", "c"]
    (note,) = [note for note in checked.config.notes if "2 of 4 prompts" in note]
    assert all(part in note for part in (setting, "prompt 1, 60 tokens", "bbb"))
    checked, found = prompts("truncate_left")
    assert any("2 of 4 prompts" in note for note in checked.config.notes)
    assert [len(asked(record)) for record in found] == [3, 56, 56, 56]
    assert [record.prompt for record in found] == [row["prompt"] for row in LONG]
    with pytest.raises(DatasetError, match="none of 4 prompts"):
        check(
            files,
            setting,
            LONG,
            None,
            [f"{section}.overlong_prompts=drop", f"{section}.sampling_params={{max_tokens: 62}}"],
        )


@pytest.mark.parametrize("setting", [RL, SAMPLER])
def test_a_chat_that_is_too_long_is_cut(files, setting):
    section, chat = setting.partition(".")[0], [{"role": "user", "content": "a" * 60}]
    checked = check(
        files, setting, [{"prompt": chat}], TEMPLATE, [f"{section}.overlong_prompts=truncate_left"]
    )
    (found,) = checked.prompts[""] if setting == RL else checked.evaluation_prompts
    assert (found.prompt, len(asked(found))) == (chat, 56)


TASK = PromptRecord("abc", {"wanted": "a", "taskset": "words", "config": {}, "task": {"prompt": "abc"}})


@pytest.fixture
def tasks(monkeypatch):
    """Read any taskset of verifiers as one task; the package is optional."""
    read = checked.read_prompts
    monkeypatch.setattr(
        checked,
        "read_prompts",
        lambda source, path, **how: [TASK] if "verifiers" in str(source) else read(source, path, **how),
    )


WORDS, FILE = "'verifiers:words'", "[abc]"
AGENT = "rl.environment='openai:vectorlm.rl.environments.verifiers:play'"


def of_sources(of_tasks, of_file, evaluated="null"):
    """Return the overrides for two sources, of tasks and of other prompts, with these held-out prompts."""
    tasks, file = (
        f"{{prompts: {given}, held_out: {held_out}}}"
        for given, held_out in ((WORDS, of_tasks), (FILE, of_file))
    )
    return [f"{RL}=null", f"{SAMPLER}={evaluated}", f"rl.sources={{a: {tasks}, b: {file}}}"]


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        ([f"{RL}={WORDS}", f"{SAMPLER}={WORDS}"], None),
        ([f"{RL}={WORDS}", f"{SAMPLER}={FILE}"], f"{SAMPLER}=['abc'] must"),
        ([f"{SAMPLER}={WORDS}"], f"{SAMPLER}={WORDS} needs"),
        ([f"{SAMPLER}={{verifiers: words}}"], f"{SAMPLER}.verifiers='words' needs"),
        ([f"{RL}={WORDS}", f"{SAMPLER}={WORDS}", AGENT], None),
        ([f"{RL}={FILE}", f"{SAMPLER}={WORDS}", AGENT], f"{RL}=['abc'] must"),
        (of_sources(WORDS, FILE, FILE), None),
        (of_sources(WORDS, FILE, WORDS), f"{SAMPLER}={WORDS} needs"),
        (of_sources(FILE, FILE), "rl.sources.a.held_out=['abc'] must"),
        (of_sources(WORDS, WORDS), f"rl.sources.b.held_out={WORDS} needs"),
    ],
)
def test_verifiers_plays_its_tasks_and_nothing_else(files, tasks, overrides, refused):
    how = [f"rl.rewards={{'{files}/rewards.py:vowels': 1.0}}", "evaluation.rewards=null", *overrides]
    config = config_of(files, files / "out", overrides=how)
    if refused is None:
        assert preflight(config, 1).evaluation_prompts
        return
    with pytest.raises(ConfigError) as caught:
        preflight(config, 1)
    assert str(caught.value).startswith(refused)


def test_fine_tuning_plays_no_tasks_of_verifiers(files, tasks):
    path = files / "my.yaml"
    path.write_text(TEXT.format(files=files))
    with pytest.raises(ConfigError, match=rf"{SAMPLER}={WORDS} needs"):
        preflight(load_config(path, [f"{SAMPLER}={WORDS}"]), 1)


class LongTasks(Tasks):
    """A data set that makes tasks on demand, some of them too long."""

    def __getitem__(self, index):
        return PromptRecord(LONG[index]["prompt"], {"wanted": "a"})

    def sample(self):
        return [self[index] for index in range(len(LONG))]


def test_tasks_that_are_too_long_are_dropped_from_their_sample_too(files, monkeypatch):
    tasks = LongTasks("chain_sum", len(LONG), 0)
    read = checked.read_prompts
    monkeypatch.setattr(
        checked,
        "read_prompts",
        lambda source, path, **how: tasks if path == RL else read(source, path, **how),
    )
    found = check(files, RL, [{"prompt": "a"}], None, ["rl.overlong_prompts=drop"]).prompts[""]
    assert [record.prompt[0] for record in found] == ["a", "c"]
    with pytest.raises(DatasetError, match="prompt 1"):
        check(files, RL, [{"prompt": "a"}], None)


@pytest.mark.parametrize(
    ("epochs", "max_steps", "steps"), [(2, "null", 5), (0.2, "null", 1), (2, 4, 4), (1, 4, 3), ("null", 4, 4)]
)
@pytest.mark.parametrize("two_sources", [False, True])
def test_steps_follow_from_epochs_and_the_earlier_of_both_ends_the_run(
    files, epochs, max_steps, steps, two_sources
):
    how = ["rl.prompts=[a, b, c, d, e]"]
    if two_sources:
        how = ["rl.prompts=null", "rl.sources={one: {prompts: [a, b]}, two: {prompts: [c, d, e]}}"]
    how += [f"rl.num_epochs_over_prompts={epochs}", f"rl.max_steps={max_steps}", "rl.prompts_per_step=2"]
    how += [f"rl.rewards={{'{files}/rewards.py:vowels': 1.0}}", "evaluation=null"]
    checked = preflight(config_of(files, files / "out", overrides=how), 1).config
    assert (checked.rl.max_steps, checked.rl.num_steps) == (steps, steps)
    save_config(checked, files / "again.yaml")
    assert preflight(load_config(files / "again.yaml"), 1).config.rl.max_steps == steps


@pytest.mark.parametrize(("share", "steps"), [(0.5, 8), (0.25, 6), (1.0, 4)])
def test_prompts_of_an_epoch_are_those_that_are_sampled(files, share, steps):
    stored = files / "rollouts.jsonl"
    stored.write_text("")
    config = config_of(files, files / "out", overrides=["rl.prompts_per_step=4"])
    rollout = replace(config.rl.rollout, source="file", path=str(stored), replayed_share=share)
    rl = replace(config.rl, max_steps=None, num_epochs_over_prompts=1, rollout=rollout)
    assert _with_steps(rl, 16).max_steps == steps


def test_settings_that_need_more_steps_than_the_epochs_take_are_refused(files):
    how = ["rl.prompts=[a, b, c, d]", "rl.num_epochs_over_prompts=1", "rl.max_steps=null", "evaluation=null"]
    how += ["rl.prompts_per_step=2", f"rl.rewards={{'{files}/rewards.py:vowels': 1.0}}"]
    how += ["rl.critic.warmup_steps=2", "train_parameters.profile_steps=4"]
    with pytest.raises(ConfigError) as caught:
        preflight(config_of(files, files / "out", "ppo", how), 1)
    for name in ("rl.critic.warmup_steps", "train_parameters.profile_steps"):
        assert name in str(caught.value)


def test_prompts_on_the_disk_are_dropped_by_their_numbers_and_read_when_needed(tmp_path, monkeypatch):
    monkeypatch.setattr("vectorlm.data.prompts.MAX_BYTES_IN_MEMORY", 10)
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LONG))
    records = read_prompts(str(tmp_path / "long.jsonl"))
    for how, lengths in (("drop", [3, 56]), ("truncate_left", [3, 56, 56, 56])):
        found, note = fit_prompts(records, letter_tokenizer(), 56, "here", how)
        found = pickle.loads(pickle.dumps(found))
        assert isinstance(found, LazyPrompts)
        assert [len(asked(record)) for record in found] == lengths
        assert "here: 2 of 4 prompts" in note
    assert fit_prompts(records, letter_tokenizer(), 60, "here", "drop") == (records, "")


@pytest.mark.parametrize("setting", ["rl.sampling_params", "evaluation.sampling_params"])
@pytest.mark.parametrize(
    ("parameters", "is_refused"),
    [
        ("stop: <|turn|>", True),
        ("stop: [abc, 'a<|turn|>b']", True),
        ("stop: <|turn|>, stop_token_ids: [3]", True),
        ("stop: <|turn|>, stop_token_ids: [{id}]", False),
        ("stop: <|turn|>, skip_special_tokens: false", False),
        ("stop: [abc, <|plain|>]", False),
        ("stop: </s>", False),
        ("stop: </s>, ignore_eos: true", True),
    ],
)
def test_a_stop_string_that_no_text_holds_is_refused(files, setting, parameters, is_refused):
    tokenizer = AutoTokenizer.from_pretrained(files / "model")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tokenizer.add_tokens(["<|plain|>"])
    tokenizer.save_pretrained(files / "model")
    number = tokenizer.convert_tokens_to_ids("<|turn|>")
    given = [f"{setting}={{max_tokens: 8, {parameters.format(id=number)}}}"]
    if not is_refused:
        check(files, RL, [{"prompt": "a"}], None, given)
        return
    with pytest.raises(ConfigError, match=rf"{setting}\.stop=") as caught:
        check(files, RL, [{"prompt": "a"}], None, given)
    assert f"stop_token_ids: [{0 if '</s>' in parameters else number}]" in str(caught.value)


def test_half_a_character_in_a_list_of_prompts_is_refused_by_its_place(files):
    (files / "plain.py").write_text("def one(completion):\n    return 1.0\n")
    reward = f"rl.rewards={{'{files / 'plain.py'}:one': 1.0}}"
    config = config_of(files, files / "out", overrides=[r'rl.prompts=["abc", "a\ud83d"]', reward])
    with pytest.raises(ConfigError, match=r"prompt 1 of rl\.prompts .*half of a surrogate pair, '\\ud83d'"):
        preflight(config, 1)


TOOLS = '''
class Adds:
    def __init__(self):
        self.tools = [self.add]
    def step(self, message):
        pass
    def add(self, a: int) -> int:
        """Add.

        Args:
            a: A number.
        """

class AddsAlways(Adds):
    tools = (Adds.add,)

class AddsAndTells(AddsAlways):
    def reset(self, row):
        pass

class AddsAsOfTrl(Adds):
    step = None
    def reset(self, **row):
        pass
'''
TELLS = "{% if tools %}{{ tools[0].function.name }}{% endif %}" + TEMPLATE
ROW_TOOLS = [{"type": "function", "function": {"name": "row_tool"}}]
REFUSED, NOTED, FINE = "environment's tools, add", "does not render the tools", ""


@pytest.mark.parametrize(
    ("environment", "template", "row", "outcome"),
    [
        ("AddsAlways", TELLS, {"prompt": CHAT}, FINE),
        ("AddsAsOfTrl", TELLS, {"prompt": CHAT}, FINE),
        ("AddsAlways", TEMPLATE, {"prompt": CHAT}, REFUSED),
        ("AddsAsOfTrl", TEMPLATE, {"prompt": CHAT}, REFUSED),
        ("AddsAndTells", TEMPLATE, {"prompt": CHAT}, NOTED),
        ("AddsAndTells", TELLS, {"prompt": "abc"}, NOTED),
        ("AddsAlways", TEMPLATE, {"prompt": [{"role": "user", "content": "Call add."}]}, NOTED),
        ("AddsAlways", TELLS, {"prompt": "add"}, REFUSED),
        ("AddsAlways", TELLS, {"prompt": [5, 6]}, REFUSED),
        # The check cannot see tools that an instance sets itself.
        ("Adds", TEMPLATE, {"prompt": CHAT}, FINE),
        (None, TEMPLATE, {"prompt": CHAT}, FINE),
        (None, TEMPLATE, {"prompt": CHAT, "tools": ROW_TOOLS}, NOTED),
        (None, TELLS, {"prompt": CHAT, "tools": ROW_TOOLS}, FINE),
        (None, TELLS, {"prompt": "abc", "tools": ROW_TOOLS}, FINE),
    ],
)
@pytest.mark.parametrize("setting", [RL, SAMPLER])
def test_tools_that_the_policy_is_not_told_of_are_refused_or_noted(
    files, setting, environment, template, row, outcome
):
    (files / "tools.py").write_text(TOOLS)
    chosen = [] if environment is None else [f"rl.environment={files}/tools.py:{environment}"]
    # The prompts of the other setting are chats that name the tool.
    other = {"prompt": [{"role": "user", "content": "add"}], "wanted": "a"}
    (files / "other.jsonl").write_text(json.dumps(other) + "\n")
    chosen.append(f"{SAMPLER if setting == RL else RL}={files / 'other.jsonl'}")
    if outcome == REFUSED:
        with pytest.raises(ConfigError, match=f"{setting}.*{outcome}"):
            check(files, setting, [row], template, chosen)
    else:
        notes = check(files, setting, [row], template, chosen).config.notes
        assert any(
            note.startswith(setting) and NOTED in note and "`chat_template`" in note for note in notes
        ) is (outcome == NOTED)


def calling(call, result="{{ m.content }}"):
    """Return a chat template with these forms of a call, `c`, and of its result."""
    return (
        "{% if tools %}{{ tools[0].function.name }}{% endif %}{% for m in messages %}{% if m.tool_calls %}"
        "{% for c in m.tool_calls %}"
        + call
        + "{% endfor %}{% elif m.role == 'tool' %}"
        + result
        + "{% else %}"
        "{{ m.content }}{% endif %}{% endfor %}"
    )


NINE = "{% if it | length != 9 %}{{ raise_exception('ids of 9 characters') }}{% endif %}"
READ = "<tool_call>{{ c.function | tojson }}</tool_call>"
MISTRAL = calling(
    NINE.replace("it", "c.id") + "{{ c.function | tojson }}",
    NINE.replace("it", "m.tool_call_id") + "{{ m.content }}",
)
REFUSES = calling(READ, "{{ raise_exception('roles must alternate') }}")
CODER = calling("<function={{ c.function.name }}><parameter=x>1</parameter></function>")
AGENT = "def asks(url, key, row):\n    return 1.0\n"


@pytest.mark.parametrize(
    ("environment", "template", "refusal", "note"),
    [
        ("tools.py:Adds", calling(READ), None, None),
        ("tools.py:Adds", MISTRAL, None, None),
        ("tools.py:AddsAlways", REFUSES, "roles must alternate", None),
        ("tools.py:Adds", REFUSES, "roles must alternate", None),
        ("tools.py:AddsAlways", CODER, None, "<function=add><parameter=x>1</parameter></function>"),
        ("tools.py:Plain", REFUSES, None, None),
        ("agent.py:asks", calling(READ), None, None),
        ("agent.py:asks", REFUSES, None, "roles must alternate"),
        ("agent.py:asks", CODER, None, "which the run cannot parse"),
        ("agent.py:asks", None, None, "the model has no chat template"),
    ],
)
def test_a_call_and_its_result_are_rendered_before_the_run(files, environment, template, refusal, note):
    (files / "tools.py").write_text(TOOLS + "\nclass Plain:\n    def step(self, message):\n        pass\n")
    (files / "agent.py").write_text(AGENT)
    # The model's default tokenizer cannot encode the marks of calls.
    letter_tokenizer().save_pretrained(files / "model")
    config = files / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 128}))
    prefix = "openai:" if environment.startswith("agent") else ""
    chosen = [f"rl.environment={prefix}{files}/{environment}", f"{SAMPLER}={files / 'other.jsonl'}"]
    rows = [{"prompt": CHAT if template else "abc", "wanted": "a"}]
    (files / "other.jsonl").write_text(json.dumps(rows[0]) + "\n")
    if refusal is not None:
        with pytest.raises(ConfigError, match=f"rl.prompts: .*{refusal}"):
            check(files, RL, rows, template, chosen)
        return
    config = check(files, RL, rows, template, chosen).config
    notes = [found for found in config.notes if "call" in found or "agent" in found]
    assert [note in found for found in notes] == ([True] if note else [])


def test_the_tools_of_an_environment_count_in_the_length_of_a_prompt(files):
    (files / "tools.py").write_text(TOOLS)
    chosen = [f"rl.environment={files}/tools.py:AddsAlways"]
    fits, too_long = ({"prompt": [{"role": "user", "content": "a" * number}]} for number in (53, 54))
    (files / "other.jsonl").write_text(json.dumps({**fits, "wanted": "a"}) + "\n")
    chosen.append(f"{SAMPLER}={files / 'other.jsonl'}")
    check(files, RL, [fits], TELLS, chosen)
    with pytest.raises(DatasetError, match=f"prompt 0 of {RL} has 57 tokens"):
        check(files, RL, [too_long], TELLS, chosen)


@pytest.mark.parametrize("setting", [RL, SAMPLER])
@pytest.mark.parametrize(
    ("end", "named", "is_said"),
    [("</s>", {}, False), ("z", {"eos_token_id": 27}, False), ("z", {}, True), ("", {}, True)],
)
def test_a_template_without_an_end_is_noted_once_and_for_chats_alone(files, setting, end, named, is_said):
    path = files / "model" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 1} | named))
    template = TEMPLATE.replace("}}{% endfor", "}}" + end + "{% endfor")

    def notes(*prompts):
        found = ask(files, setting, prompts, template).config.notes
        return sum("does not end assistant turns" in note for note in found)

    assert (notes("abc", "abd"), notes("abc", CHAT)) == (0, int(is_said))


class CountingTokenizer:
    """A tokenizer that counts its encodings."""

    def __init__(self, tokenizer):
        self._tokenizer, self.num_encoded = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __len__(self):
        return len(self._tokenizer)

    def encode(self, *arguments, **options):
        self.num_encoded += 1
        return self._tokenizer.encode(*arguments, **options)

    def apply_chat_template(self, *arguments, **options):
        self.num_encoded += options.get("tokenize", True)
        return self._tokenizer.apply_chat_template(*arguments, **options)


def test_only_prompts_that_may_be_too_long_are_encoded():
    tokenizer = CountingTokenizer(letter_tokenizer())
    tokenizer._tokenizer.chat_template = "{{ 'b' * 40 }}" + TEMPLATE
    chats = [PromptRecord([{"role": "user", "content": "abc"}]) for _ in range(50)]
    texts = [PromptRecord("abcde") for _ in range(50)]
    ids = [PromptRecord([1, 2, 3])]
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    check_lengths([*chats, *texts, *ids], tokenizer, 100, RL, vocab_size)
    assert tokenizer.num_encoded == 0
    with pytest.raises(DatasetError, match=r"prompt 50 .* 43 tokens"):
        check_lengths([*texts, chats[0]], tokenizer, 42, RL, vocab_size)
    assert tokenizer.num_encoded == 1
    check_lengths([*texts, chats[0]], tokenizer, 43, RL, vocab_size)
    with pytest.raises(DatasetError, match="token 3,"):
        check_lengths(ids, tokenizer, 43, RL, 3)
    with pytest.raises(DatasetError, match="token"):
        check_lengths(texts, tokenizer, 43, RL, 3)


@pytest.mark.parametrize(
    "text", ["plain words", "\ufdfa" * 20, "日本語のテキスト", "e\u0301" * 9, "\U0001f600"]
)
def test_no_tokenizer_exceeds_the_bound(text):
    """The worst case is a byte-level tokenizer that normalises first."""
    tokenizer = Tokenizer(BPE({letter: index for index, letter in enumerate(ByteLevel.alphabet())}, []))
    tokenizer.normalizer = NFKC()
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert len(encode(text, lambda: fast)) <= length_bound(text, lambda: fast)
