"""Tokenizers of single letters, and datasets preprocessed with one in the current folder."""

from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vectorlm.data.loader import load_dataset
from vectorlm.data.preprocess import preprocess
from vectorlm.data.settings import PreprocessSettings

BOS, EOS, IGNORE = 1, 2, -100


class Letters:
    """A tokenizer of letters whose template writes one line per message."""

    def encode(self, text, add_special_tokens=True):
        return list(map(ord, text))

    def decode(self, ids):
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages, add_generation_prompt=False, tokenize=True, **how):
        text = "".join(f"<{message['role'][0]}>{message['content']}\n" for message in messages)
        text += "<a>" * add_generation_prompt
        return {"input_ids": self.encode(text)} if tokenize else text


def letter_tokenizer(with_special_tokens=True, template=None):
    """Return a tokenizer of single letters, whose ids are code points."""
    vocabulary = {"<unk>": 0, "<s>": BOS, "</s>": EOS} | {chr(code): code for code in [10, *range(32, 127)]}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    names = {"bos_token": "<s>", "eos_token": "</s>"} if with_special_tokens else {}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **names)
    made.chat_template = template
    return made


def make(max_seq_len=64, tokenizer=None, **options):
    """Preprocess ``raw`` in the current folder; return the dataset and the summary."""
    settings = PreprocessSettings(**{"load_path": "raw", "save_path": "rows"} | options)
    summary = preprocess(settings, tokenizer or letter_tokenizer(), max_seq_len)
    return load_dataset(settings.save_path), summary


def made_of(texts, max_seq_len=6, **options):
    """Preprocess texts; return the dataset and the summary."""
    Dataset.from_dict({"text": texts}).save_to_disk("raw")
    return make(max_seq_len, **options)


def spell(ids, names=None):
    """Write token ids as letters: ``^`` BOS, ``$`` EOS, ``.`` a label outside the loss."""
    names = {BOS: "^", EOS: "$", IGNORE: "."} if names is None else names
    return "".join(names.get(i) or chr(i) for i in ids)
