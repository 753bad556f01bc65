"""Make data for a first run: Countdown questions, their tokenizer and a tiny random Llama.

Run ``python examples/make_countdown.py --output_dir data/countdown --seed 0``; the same arguments write the same
files again. The folder then holds

- ``model/``: random weights and the tokenizer, for ``AutoModelForCausalLM`` and ``AutoTokenizer``;
- ``student/``: a model of a seventh of the size with the same tokenizer, for distillation;
- ``train/`` and ``eval/``: tokenised datasets whose labels leave the prompt out of the loss;
- ``eval.jsonl``: held-out questions to sample answers for, scored by the ``countdown`` reward;
- ``train.jsonl`` and ``held_out.jsonl``: the questions of ``train/`` and all of ``eval/``, for reinforcement learning;
- ``pairs.jsonl``: the questions of ``train/`` with a right answer and the answer to another question.
"""

from __future__ import annotations

import argparse
import json
import re
import string
from collections.abc import Sequence
from pathlib import Path

import torch
from countdown_problems import CountdownProblem, CountdownRules, generate_problems
from datasets import Dataset, disable_progress_bars
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
PHRASES = ("Using the numbers ", " make ", " <answer>", "<answer>", "</answer>", ", ")
CHARACTERS = (*string.printable[:95], "\n")
NUMBERS = tuple(str(number) for number in range(10, 100))
# The template joins the contents of a chat: a question as a message has the same tokens as a question as text.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
IGNORE_INDEX = -100


def build_tokenizer(
    phrases: Sequence[str] = PHRASES, chat_template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """Build a lossless tokenizer: whole phrases, numbers up to 99 and single ASCII characters.

    With one token per number, a tiny model need not learn to read digits, and sequences are short.
    """
    vocabulary = {
        token: index for index, token in enumerate((*SPECIAL_TOKENS, *phrases, *CHARACTERS, *NUMBERS))
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex("|".join((*map(re.escape, phrases), r"[1-9]\d", r"[\s\S]"))), "isolated"
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, num_heads: int = 4, num_layers: int = 4
) -> LlamaForCausalLM:
    """Return a random Llama, of 0.9 million parameters by default; vLLM's CPU attention needs heads of at least 32."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32 * num_heads,
            intermediate_size=96 * num_heads,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads,
            head_dim=32,
            max_position_embeddings=128,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def tokenise(problems: Sequence[CountdownProblem], tokenizer: PreTrainedTokenizerFast) -> Dataset:
    """Turn problems into rows whose labels are only the answer and the end token."""
    prompts = tokenizer([problem.prompt for problem in problems])["input_ids"]
    answers = tokenizer([problem.completion for problem in problems], add_special_tokens=False)["input_ids"]
    rows = []
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        target = [*answer, tokenizer.eos_token_id]
        rows.append(
            {
                "input_ids": prompt + target,
                "labels": [IGNORE_INDEX] * len(prompt) + target,
                "attention_mask": [1] * (len(prompt) + len(target)),
                "id": index,
            }
        )
    return Dataset.from_list(rows)


def write_questions(problems: Sequence[CountdownProblem], path: Path) -> None:
    """Write one JSON object per line: the prompt and the columns that the reward reads."""
    rows = [{"prompt": p.prompt, "numbers": list(p.numbers), "target": p.target} for p in problems]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_pairs(problems: Sequence[CountdownProblem], path: Path) -> None:
    """Write a pair for each problem; its rejected text is the answer to the next problem."""
    rows = [
        {"prompt": mine.prompt, "chosen": mine.completion, "rejected": following.completion}
        for mine, following in zip(problems, [*problems[1:], problems[0]], strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Parse the arguments and write the folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, default=Path("data/countdown"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_train", type=int, default=16_384, help="training problems")
    parser.add_argument("--num_eval", type=int, default=512, help="held-out problems")
    parser.add_argument(
        "--num_questions", type=int, default=128, help="those of them that fine-tuning samples answers for"
    )
    parser.add_argument("--num_numbers", type=int, default=CountdownRules.num_numbers)
    parser.add_argument(
        "--highest", type=int, default=CountdownRules.highest, help="largest number of a problem"
    )
    parser.add_argument("--operators", default=CountdownRules.operators, help="some of +-*/")
    arguments = parser.parse_args()

    rules = CountdownRules(arguments.num_numbers, highest=arguments.highest, operators=arguments.operators)
    training, held_out = generate_problems(
        arguments.num_train, arguments.num_eval, rules=rules, seed=arguments.seed
    )
    tokenizer = build_tokenizer()
    disable_progress_bars()
    folder: Path = arguments.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    build_model(tokenizer, arguments.seed).save_pretrained(folder / "model")
    build_model(tokenizer, arguments.seed, num_heads=2, num_layers=2).save_pretrained(folder / "student")
    for name in ("model", "student"):
        tokenizer.save_pretrained(folder / name)
    tokenise(training, tokenizer).save_to_disk(folder / "train")
    tokenise(held_out, tokenizer).save_to_disk(folder / "eval")
    write_questions(held_out[: arguments.num_questions], folder / "eval.jsonl")
    write_questions(training, folder / "train.jsonl")
    write_questions(held_out, folder / "held_out.jsonl")
    write_pairs(training, folder / "pairs.jsonl")
    print(f"{folder}: {len(training)} problems to learn from, {len(held_out)} held out, for example")
    print(f"  {held_out[0].prompt}{held_out[0].completion}")


if __name__ == "__main__":
    main()
