"""Code of the user: objects by names like ``file.py:NAME`` or ``package.module:NAME``, and calls in limited time."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle

from vectorlm.errors import ConfigError

AGAIN_S = 0.1
LIBRARIES = (__file__, "<", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
"""How the names of files begin that are not the user's; code that is not in a file has a name in brackets."""


class TookTooLong(BaseException):
    """A `time_limit` has passed; not an `Exception`, which the user's code may catch."""


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `TookTooLong` in the block when it takes longer; only in the main thread, and not inside a call of C code.

    A signal interrupts what another thread could not end: a loop, a regular expression, a wait for a server. Code that
    sets an alarm of its own replaces this one.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, end)
    try:
        # Again and again: code may catch the first one, and behind one coroutine that waits there are others.
        signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def is_plugin(name: str) -> bool:
    """Return whether `name` has this form."""
    where, colon, what = name.rpartition(":")
    return bool(colon and where) and what.isidentifier()


def load_plugin(name: str) -> Any:
    """Import a file or module and return one of its attributes.

    Raises:
        ConfigError: One of them does not exist, or raises while it is imported, or would end the process.
    """
    where, _, what = name.rpartition(":")
    try:
        module = _load_file(Path(where), name) if where.endswith(".py") else _load_module(where, name)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        # The user's own line, not that of a library it calls: wandb replaces sys.exit, for example.
        last = next((each for each in frames[::-1] if not each.filename.startswith(LIBRARIES)), frames[-1])
        place = "" if isinstance(error, SyntaxError) else f" ({last.filename}:{last.lineno})"
        raise ConfigError(
            f"{name!r} cannot be imported: {type(error).__name__}: {error}{place}. Correct {where}."
        ) from error
    if not hasattr(module, what):
        raise ConfigError(f"{name!r} does not exist: {where} has no {what!r}.")
    return getattr(module, what)


def _load_file(path: Path, name: str) -> Any:
    if not path.is_file():
        raise ConfigError(f"{name!r} does not exist: {path} is not a file.")
    key = f"vectorlm_plugin_{path.resolve()}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # As for a script, so that it finds its neighbours, now and when it is called; behind what is installed.
        if (folder := str(path.resolve().parent)) not in sys.path:
            sys.path.append(folder)
        sys.modules[key] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[key]
            raise
        # No other process can import it by this name: a config with an algorithm's own settings goes to all ranks.
        cloudpickle.register_pickle_by_value(module)
    return sys.modules[key]


def _load_module(where: str, name: str) -> Any:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        # A module that it imports may be missing: that is its own error.
        if error.name is not None and not f"{where}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"{name!r} does not exist: no module named {where!r}.") from error
