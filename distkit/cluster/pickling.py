"""Functions travel to the ranks by cloudpickle; what cannot travel is named."""

from __future__ import annotations

import inspect
import reprlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import Any

import cloudpickle

from distkit.errors import OWN, NotPicklableError
from distkit.recording.recorder import make_users

#: The standard library, and distkit itself: both are on the ranks already.
_LIBRARIES = (str(Path(threading.__file__).parent), *OWN)


def dumps(value: Any) -> bytes:
    """Pickle a value, functions of notebooks included."""
    packed: bytes = cloudpickle.dumps(value)
    return packed


def pack(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call, or the path of a script with its arguments.

    Raises:
        TypeError: ``fn`` is not callable.
        NotPicklableError: it cannot travel; the message names the object that cannot.
    """
    if isinstance(fn, (str, Path)):
        if kwargs:
            raise TypeError("a script's arguments are words: run('train.py', '--steps', '10')")
        fn = _script(Path(fn))
        make_users(str(fn))  # its lines are shown, wherever it is
        args = tuple(map(str, args))
    elif not callable(fn):
        raise TypeError(
            f"run() needs a function or the path of a script, got {reprlib.repr(fn)}. Give the "
            "function itself, without parentheses: cluster.run(hello), not cluster.run(hello())."
        )
    try:
        with _users_modules_by_value():
            return dumps((fn, args, kwargs))
    except Exception:
        with suppress(Exception):  # something at the top of a module cannot travel: import it there
            return dumps((fn, args, kwargs))
        raise NotPicklableError(_blame(fn, args, kwargs)) from None


@lru_cache(4096)
def is_users(file: str | None) -> bool:
    """True if a module's file is the user's: of no installed package, nor of distkit."""
    return file is not None and not file.startswith(_LIBRARIES) and "-packages" not in file


@contextmanager
def _users_modules_by_value() -> Iterator[None]:
    """Meanwhile the user's modules, which change while ranks live, are pickled by value."""
    users = [m for m in list(sys.modules.values()) if is_users(getattr(m, "__file__", None))]
    named = [m for m in users if sys.modules.get(m.__name__) is m and m.__name__ != "__main__"]
    for module in named:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in named:
            cloudpickle.unregister_pickle_by_value(module)


def _script(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such script. Name a .py file.")
    return path.resolve()


def _blame(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    name = getattr(fn, "__name__", type(fn).__name__)
    for what, value in _suspects(fn, args, kwargs):
        if not _travels(value):
            if type(value).__module__ == "IPython.core.autocall":
                key = what.partition("'")[2].rstrip("'")
                return (
                    f"{name}() calls {key}(), which in a notebook stops the kernel. A rank has no "
                    "kernel to stop: it ends when its function ends. Use `return` instead."
                )
            return (
                f"{name}() cannot travel to the ranks: {what} is a "
                f"{type(value).__module__}.{type(value).__qualname__}, which cannot be pickled. "
                f"Create it inside {name}(), or pass plain data and tensors."
            )
    return f"{name}() cannot travel to the ranks. Create what cannot be pickled inside {name}()."


def captured(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, list[Any] | dict[Any, Any] | set[Any]]]:
    """The lists, dicts and sets that travel with a call, by the caller's names for them."""
    if inspect.isfunction(fn):
        found = dict(zip(fn.__code__.co_varnames, args, strict=False)) | kwargs | _outside(fn)
        yield from ((name, one) for name, one in found.items() if type(one) in (list, dict, set))


def _outside(fn: FunctionType) -> dict[str, Any]:
    """The variables of a function that are not its own, by name."""
    with suppress(ValueError):  # one has no value yet
        used = inspect.getclosurevars(fn)
        return {**used.globals, **used.nonlocals}
    return {}


def _suspects(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Everything that travels with the call, each with words for it."""
    for i, value in enumerate(args):
        yield f"argument {i}", value
    for key, value in kwargs.items():
        yield f"argument {key!r}", value
    if inspect.isfunction(fn):
        for key, value in _outside(fn).items():
            yield f"the captured variable {key!r}", value
    elif hasattr(fn, "__self__"):
        yield "the object whose method it is", fn.__self__


def _travels(value: Any) -> bool:
    try:
        dumps(value)
    except Exception:
        return False
    return True
