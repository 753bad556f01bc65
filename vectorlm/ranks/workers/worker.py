"""What a worker does: it calls functions that it is sent the names of, and sends back what they yield."""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
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
    """Answer requests until the pool is gone; what is sent first for each is a number, which comes with each answer.

    Generators are carried out one after the other, asynchronous ones all at once. A request without a name gives up the
    one with its number.
    """
    faulthandler.register(STACK_SIGNAL, all_threads=False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    pid, loop = os.getpid(), asyncio.new_event_loop()
    loop.add_reader(connection, loop.stop)
    tasks: dict[int, asyncio.Task[None]] = {}

    def send(number: int, kind: str, value: Any = None) -> None:
        if os.getpid() != pid:
            os._exit(0)  # The user's code has forked, and this is not the process that was asked.
        try:
            connection.sendall(frame((number, kind, value)))
        except ConnectionError:
            os._exit(0)  # The pool is gone.

    @contextmanager
    def reported(number: int) -> Iterator[None]:
        try:
            yield
        except VectorLMError as error:
            send(number, ERROR, error)
        except BaseException as error:
            send(number, ERROR, RuntimeError(raised_at(error)))

    async def carry_out(number: int, values: AsyncIterator[Any]) -> None:
        with reported(number):
            async for value in values:
                send(number, VALUE, value)
            send(number, END)
        del tasks[number]

    def read(size: int) -> bytes:
        data = b""
        # A signal may cut a read short.
        while len(data) < size and (more := connection.recv(size - len(data), socket.MSG_WAITALL)):
            data += more
        return data

    while True:
        if tasks:
            # Until there is a request: functions that are no coroutines may run a loop of their own.
            loop.run_forever()
        if not (header := read(HEADER.size)):
            return
        number, name, arguments = pickle.loads(read(*HEADER.unpack(header)))
        if not name:
            if number in tasks:
                tasks[number].cancel()
            continue
        with reported(number):
            function, given = load_plugin(name), pickle.loads(arguments)
            if inspect.isasyncgenfunction(function):
                tasks[number] = loop.create_task(carry_out(number, function(*given)))
                continue
            for value in function(*given):
                send(number, VALUE, value)
            send(number, END)
