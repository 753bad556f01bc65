"""Measure the memory that preprocessing takes, by the size of the text.

    python benchmarks/preprocess.py                    20 and 200 MB
    python benchmarks/preprocess.py --megabytes 1000 --packing_type best_fit --num_proc 2

Prints two peaks over all processes: their own memory, and the total with pages of mapped files. The system can take
these pages back when it needs memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = [f"word{number}" for number in range(1000)]
MAX_SEQ_LEN = 512
CHILD = """
import sys
from transformers import AutoTokenizer
from vectorlm.data.preprocess import preprocess
from vectorlm.data.settings import PreprocessSettings
kind, num_proc, max_seq_len = sys.argv[1:]
how = PreprocessSettings(load_path="text.txt", save_path="rows", packing_type=kind, num_proc=int(num_proc))
preprocess(how, AutoTokenizer.from_pretrained("tokenizer"), int(max_seq_len))
"""


def main() -> None:
    """Measure each size in a separate process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, nargs="+", default=[20, 200])
    parser.add_argument("--packing_type", default="full")
    parser.add_argument("--num_proc", default="1")
    args = parser.parse_args()
    for megabytes in args.megabytes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            save_tokenizer(folder / "tokenizer")
            write_text(folder / "text.txt", megabytes * 10**6)
            start = time.perf_counter()
            command = [sys.executable, "-c", CHILD, args.packing_type, args.num_proc, str(MAX_SEQ_LEN)]
            child = subprocess.Popen(command, cwd=folder)
            own, mapped = peaks(child)
            row = {"MB of text": megabytes, "s": round(time.perf_counter() - start)}
        print(
            json.dumps(row | {"peak MB": round(own / 1e6), "peak MB with mapped files": round(mapped / 1e6)})
        )


def save_tokenizer(path: Path) -> None:
    """Save a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<unk>", "<s>", "</s>", *WORDS]
    words = Tokenizer(
        models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>").save_pretrained(path)


def write_text(path: Path, num_bytes: int) -> None:
    """Write lines of 10 to 1,000 words."""
    chosen, written = random.Random(0), 0
    with path.open("w") as file:
        while written < num_bytes:
            written += file.write(" ".join(chosen.choices(WORDS, k=chosen.randint(10, 1000))) + "\n")


def peaks(child: subprocess.Popen) -> tuple[int, int]:
    """Return the peak bytes of a process and its children, without and with mapped files."""
    own = mapped = 0
    while child.poll() is None:
        found = [memory(pid) for pid in (child.pid, *children(child.pid))]
        own, mapped = max(own, sum(held[0] for held in found)), max(mapped, sum(held[1] for held in found))
        time.sleep(0.05)
    if child.returncode:
        raise SystemExit(f"preprocessing ended with {child.returncode}")
    return own, mapped


def children(pid: int) -> list[int]:
    """Return the ids of the children of a process."""
    try:
        return [int(child_pid) for child_pid in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def memory(pid: int) -> tuple[int, int]:
    """Return the bytes of a process without and with mapped files."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0, 0
    found = {key: 1024 * int(value) for key, value in re.findall(r"(RssAnon|VmRSS):\s+(\d+) kB", status)}
    return found.get("RssAnon", 0), found.get("VmRSS", 0)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
