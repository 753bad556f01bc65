"""The scores of a reward model, packed and padded, of many families."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from kit.families import FAMILIES, save_family
from transformers import AutoModelForSequenceClassification

from vectorlm.errors import ConfigError
from vectorlm.train.load import load_scorer
from vectorlm.train.objective import Scorer
from vectorlm.train.packing import Rows

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
