"""Functions travel to the ranks by cloudpickle; what cannot travel is named."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from distkit.errors import NotPicklableError

#: The standard library, and distkit itself: both are on the ranks already.
_LIBRARIES = (str(Path(threading.__file__).parent), str(Path(__file__).parents[1]))


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
        args = tuple(map(str, args))
    elif not callable(fn):
        raise TypeError(f"run() wants a function or the path of a script, not {fn!r}")
    try:
        with _by_value(_users_modules()):
            return bytes(cloudpickle.dumps((fn, args, kwargs)))
    except Exception:
        with suppress(Exception):  # something at the top of a module cannot travel: import it there
            return bytes(cloudpickle.dumps((fn, args, kwargs)))
        raise NotPicklableError(_blame(fn, args, kwargs)) from None


def _users_modules() -> list[ModuleType]:
    """The modules that the user wrote: they change while ranks live, and travel as cells do."""
    return [m for m in list(sys.modules.values()) if _is_users(getattr(m, "__file__", None))]


@lru_cache(4096)
def _is_users(file: str | None) -> bool:
    return file is not None and not file.startswith(_LIBRARIES) and "-packages" not in file


@contextmanager
def _by_value(modules: list[ModuleType]) -> Iterator[None]:
    named = [m for m in modules if sys.modules.get(m.__name__) is m and m.__name__ != "__main__"]
    for module in named:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in named:
            cloudpickle.unregister_pickle_by_value(module)


def _script(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such script. Name a .py file.")
    return path.resolve()


def _blame(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    name = getattr(fn, "__name__", type(fn).__name__)
    for what, value in _suspects(fn, args, kwargs):
        if not _travels(value):
            return (
                f"{name}() cannot travel to the ranks: {what} is a "
                f"{type(value).__module__}.{type(value).__qualname__}, which cannot be pickled. "
                f"Create it inside {name}(), or pass plain data and tensors."
            )
    return f"{name}() cannot travel to the ranks. Create what cannot be pickled inside {name}()."


def _suspects(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Everything that travels with the call, each with words for it."""
    for i, value in enumerate(args):
        yield f"argument {i}", value
    for key, value in kwargs.items():
        yield f"argument {key!r}", value
    if inspect.isfunction(fn):
        captured = inspect.getclosurevars(fn)
        for key, value in {**captured.globals, **captured.nonlocals}.items():
            yield f"the captured variable {key!r}", value
    elif hasattr(fn, "__self__"):
        yield "the object whose method it is", fn.__self__


def _travels(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True
