"""Attacks on a run by another user of the machine, for faults.py: on files, folders, shared memory and ports."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from fault_kinds import NOBODY

TIMEOUT_S = 0.5
KNOCKS = (
    b"",
    b"\0" * 8,
    b"\xff" * 4096,
    # The greeting of torch's store, and then a request to set a key.
    b"\0" + struct.pack("<I", 0x3C85F7CE) + b"\1" + struct.pack("<Q", 1 << 40),
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
)


def visit(folders: Sequence[Path], ports: Sequence[int]) -> list[str]:
    """Attack the folders and send garbage to the ports as another user; return the attacks that succeeded."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        found = []
        try:
            # Opened before, because the folders above may keep strangers out; these are not tested.
            opened = [os.open(folder, os.O_RDONLY) for folder in folders]
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            for folder, descriptor in zip(folders, opened, strict=True):
                os.fchdir(descriptor)
                found += [f"{what} {folder.name}/{path}" for what, path in _broken_into()]
            _knock(ports)
        except BaseException:
            found.append(traceback.format_exc())
        finally:
            os.write(writer, json.dumps(found).encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        answer: list[str] = json.load(file)
    os.waitpid(pid, 0)
    return answer


def _broken_into() -> Iterator[tuple[str, str]]:
    """Try to read, rewrite, open up and delete everything below the working folder; yield successful attempts."""
    for above, folders, files in os.walk("."):
        for name in (*folders, *files):
            path = os.path.join(above, name)
            tries: dict[str, Callable[[], object]] = {
                "read": lambda path=path: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK)),
                "rewrote": lambda path=path: Path(path).write_bytes(b"a stranger was here"),
                "opened": lambda path=path: Path(path).chmod(0o777),
                "deleted": lambda path=path: Path(path).rename(f"{path}.gone"),
            }
            for what, attempt in tries.items():
                with suppress(OSError):
                    attempt()
                    yield what, path


def _knock(ports: Sequence[int]) -> None:
    """Send garbage to every port; close the connections only after the last one."""
    with ExitStack() as opened:
        for port in ports:
            for text in (*KNOCKS, random.randbytes(64)):
                # A port that no longer listens, or closes the connection, is right.
                with suppress(OSError):
                    # create_connection would load a codec, which a stranger may not be able to read.
                    caller = opened.enter_context(socket.socket())
                    caller.settimeout(TIMEOUT_S)
                    caller.connect(("127.0.0.1", port))
                    caller.sendall(text)
