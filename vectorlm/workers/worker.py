"""What a worker does: it calls functions that it is sent the names of, and sends back what they yield."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import socket
import struct
import sys
from typing import Any

from vectorlm.errors import VectorLMError
from vectorlm.plugin import load_plugin, raised_at

HEADER = struct.Struct(">Q")
STACK_SIGNAL = signal.SIGUSR1
VALUE, END, ERROR = "value", "end", "error"


def frame(value: Any) -> bytes:
    """Return a message as bytes, its length in front."""
    data = pickle.dumps(value)
    return HEADER.pack(len(data)) + data


def serve(connection: socket.socket) -> None:
    """Answer requests until the pool is gone; what is sent first for each is a number, which comes with each answer."""
    faulthandler.register(STACK_SIGNAL, all_threads=False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    pid, requests = os.getpid(), connection.makefile("rb")

    def send(number: int, kind: str, value: Any = None) -> None:
        if os.getpid() != pid:
            os._exit(0)  # The user's code has forked, and this is not the process that was asked.
        connection.sendall(frame((number, kind, value)))

    while header := requests.read(HEADER.size):
        number, name, arguments = pickle.loads(requests.read(*HEADER.unpack(header)))
        try:
            for value in load_plugin(name)(*pickle.loads(arguments)):
                send(number, VALUE, value)
            send(number, END)
        except ConnectionError:
            return
        except VectorLMError as error:
            send(number, ERROR, error)
        except BaseException as error:
            send(number, ERROR, RuntimeError(raised_at(error)))
