"""Losses of preference data, compared with slow loops, for any micro-batches and padding."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from kit.families import FAMILIES, save_family
from kit.rank_processes import on_ranks
from transformers import AutoModelForSequenceClassification

from vectorlm.algorithms.preference import PAIR_LOSSES, PairLogprobs, kto_loss, orpo
from vectorlm.algorithms.settings import PreferenceSettings
from vectorlm.data.loader import Collator
from vectorlm.errors import ConfigError
from vectorlm.train.language_model import LanguageModel
from vectorlm.train.load import load_model, load_scorer
from vectorlm.train.objective import Completions, GoodAndBad, PreferencePairs, Scorer, Steps
from vectorlm.train.packing import Rows

ROWS = [
    ([5, 6, 7, 8, 0], [5, 6, 9, 0], 1.0),
    ([10, 11, 12], [10, 13, 14, 15, 16], 0.0),
    ([20, 21, 22, 23], [20, 24, 25, 0], 1.0),
]
"""Two texts of a row, whose first two tokens are the prompt, and the row's label."""
REFERENCES = torch.tensor([[-3.0, -9.5], [-11.0, -15.0], [-8.0, -13.0]])
SETTINGS = {
    "dpo": {"label_smoothing": 0.1},
    "hinge": {"length_normalised": True, "beta": 0.7},
    "ipo": {"beta": 0.3},
    "simpo": {"gamma": 0.6},
    "orpo": {"beta": 0.4},
    "kto": {"beta": 0.6, "desirable_weight": 1.5, "undesirable_weight": 0.8},
}


def batch_of(places, num_rows):
    rows = [
        {
            "id": place,
            "input_ids": [*ROWS[place][0], *ROWS[place][1]],
            "labels": [-100, -100, *ROWS[place][0][2:], -100, -100, *ROWS[place][1][2:]],
            "seq_lengths": [len(ROWS[place][0]), len(ROWS[place][1])],
            "is_good": ROWS[place][2],
        }
        for place in places
    ]
    batch = Collator(0, -100, 16).collate(rows, num_rows)
    return replace(batch, references=REFERENCES[batch.ids.clamp(min=0)])


def losses(topology, folder):
    """Return, for each loss, sum and measurements of a step: as one micro-batch and as two, packed and padded."""
    found = {}
    for name, given in SETTINGS.items():
        settings = PreferenceSettings(loss=name, **given)
        spec = PAIR_LOSSES.get(name)
        averages = name in ("ipo", "simpo", "orpo", "hinge")
        for packs in (True, False):
            model = LanguageModel(load_model(folder).eval(), packs=packs)
            completions = Completions(model, averages)
            objective = GoodAndBad(completions, settings)
            if spec is not None:
                objective = PreferencePairs(completions, spec, settings)
            for parts in ([[0, 1, 2]], [[2], [0, 1]]):
                step = list(objective.prepare([batch_of(places, 4) for places in parts]))
                assert sum(int(objective.num_counted(entry)) for entry in step) == 3
                sums = [objective.sum_loss(entry) for entry in step]
                total = sum(loss.item() for loss, _ in sums), sum(measured for _, measured in sums)
                found.setdefault(name, []).append(total)
    return found


def logprob(model, text):
    """Return the model's log-probability of a text after its prompt, in float64."""
    with torch.no_grad():
        rows = torch.log_softmax(model(input_ids=torch.tensor([text])).logits[0].double(), dim=-1)
    return sum(rows[place - 1, text[place]].item() for place in range(2, len(text)))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def expected_of(name, model):
    """Compute the losses of TRL's DPOTrainer, CPOTrainer, ORPOTrainer and KTOTrainer, pair by pair."""
    texts = [[logprob(model, text) for text in row[:2]] for row in ROWS]
    means = [
        [entry / (len(text) - 2) for entry, text in zip(two, row[:2], strict=True)]
        for two, row in zip(texts, ROWS, strict=True)
    ]
    references = REFERENCES.tolist()
    kl = max(sum(two[1] - reference[1] for two, reference in zip(texts, references, strict=True)) / 3, 0.0)
    total = 0.0
    for two, mean, reference, (_, _, is_good) in zip(texts, means, references, ROWS, strict=True):
        if name == "dpo":
            h = (two[0] - two[1]) - (reference[0] - reference[1])
            total += -0.9 * math.log(sigmoid(0.1 * h)) - 0.1 * math.log(sigmoid(-0.1 * h))
        elif name in ("hinge", "ipo"):
            h = (mean[0] - mean[1]) - (reference[0] - reference[1])
            total += max(0.0, 1 - 0.7 * h) if name == "hinge" else (h - 1 / 0.6) ** 2
        elif name == "simpo":
            total += -math.log(sigmoid(2.0 * (mean[0] - mean[1]) - 0.6))
        elif name == "orpo":
            odds = [math.log(math.exp(entry) / (1 - math.exp(entry))) for entry in mean]
            total += -mean[0] - 0.4 * math.log(sigmoid(odds[0] - odds[1]))
        else:
            ratio = two[0] - reference[0]
            total += (
                1.5 * (1 - sigmoid(0.6 * (ratio - kl)))
                if is_good
                else 0.8 * (1 - sigmoid(0.6 * (kl - ratio)))
            )
    return total, texts, kl


def test_losses_are_those_of_a_slow_loop_however_a_step_is_split_and_laid_out(folder):
    model = load_model(folder).eval()
    (found,) = on_ranks(1, losses, folder)
    for name, entry in found.items():
        expected, texts, kl = expected_of(name, model)
        for total, measured in entry:
            assert total == pytest.approx(expected, rel=1e-5), name
            torch.testing.assert_close(measured, entry[0][1], rtol=1e-4, atol=1e-5)
        means = (entry[0][1][:, 0] / entry[0][1][:, 1]).tolist()
        if name == "dpo":
            rewards = [
                [0.1 * (two[i] - REFERENCES[row, i].item()) for i in (0, 1)] for row, two in enumerate(texts)
            ]
            gaps = [chosen - rejected for chosen, rejected in rewards]
            right = sum(gap > 0 for gap in gaps) / 3
            wanted = [
                right,
                sum(gaps) / 3,
                sum(entry[0] for entry in rewards) / 3,
                sum(entry[1] for entry in rewards) / 3,
            ]
            assert means == pytest.approx(wanted, rel=1e-4)
        if name == "kto":
            assert kl > 1
            good = [0.6 * (texts[row][0] - REFERENCES[row, 0].item()) for row in (0, 2)]
            bad = 0.6 * (texts[1][0] - REFERENCES[1, 0].item())
            assert means == pytest.approx([sum(good) / 2, bad, kl], rel=1e-4)


def test_by_hand_and_at_the_edge():
    one = PreferenceSettings(loss="kto", undesirable_weight=2.0)
    zeros = torch.zeros(2)
    # A policy that equals the reference has probability 1/2; sigmoid(0.1 x 10) is 0.731.
    assert kto_loss(zeros, zeros, torch.tensor([True, False]), 0.0, one, 0.1).tolist() == [0.5, 1.0]
    found = kto_loss(zeros, zeros, torch.tensor([True, False]), 10.0, one, 0.1)
    assert found.tolist() == pytest.approx([0.7310586, 2 * 0.2689414])
    sure = torch.zeros(1, requires_grad=True)
    loss = orpo(PairLogprobs(sure, torch.tensor([-1.0]), zeros, zeros), PreferenceSettings(loss="orpo"), 0.1)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert sure.grad.isfinite().all()


SOLUTIONS = [
    ([5, 6, 7, 27, 8, 27], [-100, -100, -100, 1, -100, 0]),
    ([27, 9, 10, 11, 27], [1, -100, -100, -100, 0]),
    ([12, 13, 27], [-100, -100, 1]),
]
"""Tokens, and a label 1 or 0 at the end of each step; the second row begins with the end of a step."""


def steps_of(places, num_rows):
    rows = [
        {"id": place, "input_ids": SOLUTIONS[place][0], "labels": SOLUTIONS[place][1]} for place in places
    ]
    return Collator(0, -100, 16).collate(rows, num_rows)


def step_losses(topology, folder):
    """Return loss, measurements and gradient of steps: as one micro-batch and as two, packed and padded."""
    found = []
    for packs in (True, False):
        for parts in ([[0, 1, 2]], [[2], [0, 1], []]):
            torch.manual_seed(1)
            model = load_scorer(folder, SimpleNamespace(eos_token_id=0, pad_token_id=None)).eval()
            objective = Steps(Scorer(model, packs=packs))
            step = list(objective.prepare([steps_of(places, 4) for places in parts]))
            assert sum(int(objective.num_counted(entry)) for entry in step) == 5
            sums = [objective.sum_loss(entry) for entry in step]
            total = sum(loss for loss, _ in sums)
            total.backward()
            found.append(
                (total.item(), sum(measured for _, measured in sums), model.score.weight.grad.clone())
            )
    return found


def test_the_loss_of_steps_is_that_of_a_slow_loop_over_what_each_step_ends(folder):
    torch.manual_seed(1)
    model = load_scorer(folder, SimpleNamespace(eos_token_id=0, pad_token_id=None)).double().eval()
    pairs = []
    for ids, labels in SOLUTIONS:
        for place, label in enumerate(labels):
            if label != -100:
                score = model(input_ids=torch.tensor([ids[: place + 1]])).logits[0, 0]
                pairs.append((1 / (1 + torch.exp(-score)), label))
    loss = -sum(torch.log(found if label else 1 - found) for found, label in pairs)
    loss.backward()
    right = [found.item() for found, label in pairs if label]
    wrong = [found.item() for found, label in pairs if not label]
    errors = [found.item() - label for found, label in pairs]
    means = [
        sum(abs(entry) < 0.5 for entry in errors) / 5,
        sum(entry**2 for entry in errors) / 5,
        sum(errors) / 5,
        sum(right) / 3,
        sum(wrong) / 2,
    ]
    (found,) = on_ranks(1, step_losses, folder)
    for total, measured, gradient in found:
        assert total == pytest.approx(loss.item(), rel=1e-5)
        assert (measured[:, 0] / measured[:, 1]).tolist() == pytest.approx(means, abs=1e-5)
        torch.testing.assert_close(gradient.double(), model.score.weight.grad, rtol=1e-4, atol=1e-5)


TEXTS = [[5, 6, 7, 8, 0], [5, 6, 7, 9, 10, 11, 0], [12, 13], [14, 0]]


@pytest.mark.parametrize(
    "family", ["Llama", "Mistral", "Qwen2", "Gemma 2", "Gemma 3", "OPT", "Mixtral", "GPT-NeoX"]
)
def test_scores_are_those_that_transformers_reads_of_each_text(tmp_path, family):
    path = save_family(FAMILIES[family], tmp_path / "model")
    torch.manual_seed(1)
    tokenizer = SimpleNamespace(eos_token_id=0, pad_token_id=None)
    model = load_scorer(path, tokenizer).eval()
    model.save_pretrained(tmp_path / "saved")
    own = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    lengths = torch.tensor([len(text) for text in TEXTS])
    input_ids = torch.tensor([[*text, *[0] * (7 - len(text))] for text in TEXTS])
    mask = (torch.arange(7) < lengths[:, None]).long()
    rows = Rows(input_ids, mask, torch.zeros_like(mask, dtype=torch.bool), (0, 0, 1, 2))
    with torch.no_grad():
        expected = torch.cat([own(input_ids=torch.tensor([text])).logits[:, 0] for text in TEXTS])
        packed, padded = Scorer(model), Scorer(load_scorer(tmp_path / "saved", tokenizer).eval(), packs=False)
        assert packed.why_padded is None
        torch.testing.assert_close(packed(rows), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(padded(rows), expected, rtol=1e-4, atol=1e-5)
    assert expected.unique().numel() == len(TEXTS)


def test_the_cap_on_attention_scores_is_kept_where_rows_are_padded(tmp_path):
    capped = replace(
        FAMILIES["Gemma 2"], settings={**FAMILIES["Gemma 2"].settings, "attn_logit_softcapping": 1e-3}
    )
    path = save_family(capped, tmp_path / "model")
    model = load_scorer(path, SimpleNamespace(eos_token_id=0, pad_token_id=None)).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 50
    model.save_pretrained(tmp_path / "saved")
    own = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "saved", attn_implementation="eager"
    ).eval()
    ids = torch.tensor([TEXTS[1]])
    rows = Rows(ids, torch.ones_like(ids), torch.zeros_like(ids, dtype=torch.bool), (0,))
    with torch.no_grad():
        found = Scorer(model, packs=False)(rows)
        torch.testing.assert_close(found, own(input_ids=ids).logits[:, 0], rtol=1e-4, atol=1e-6)


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    path = save_family(FAMILIES["Llama"], tmp_path / "model")
    with pytest.raises(ConfigError, match="eos_token"):
        load_scorer(path, SimpleNamespace(eos_token_id=None, pad_token_id=None))
