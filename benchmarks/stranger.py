"""Another user of the machine, who tries every door of a run: files, folders, shared memory and ports."""

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
    # As torch's store is greeted, and then asked to set a key.
    b"\0" + struct.pack("<I", 0x3C85F7CE) + b"\1" + struct.pack("<Q", 1 << 40),
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
)


def visit(folders: Sequence[Path], ports: Sequence[int]) -> list[str]:
    """Let a stranger into the folders, and send garbage to the ports; return what it could do to files."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        found = []
        try:
            # The folders above may keep strangers out, and are not what is tried.
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
    """Try to read, rewrite and delete all below the working folder; yield what was possible."""
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
    """Send garbage to every port, and hang up only when all have been sent some."""
    with ExitStack() as opened:
        for port in ports:
            for text in (*KNOCKS, random.randbytes(64)):
                # One that no longer listens, or hangs up at once, is right.
                with suppress(OSError):
                    # Not create_connection, for which Python would load a codec that a stranger may not read.
                    caller = opened.enter_context(socket.socket())
                    caller.settimeout(TIMEOUT_S)
                    caller.connect(("127.0.0.1", port))
                    caller.sendall(text)
