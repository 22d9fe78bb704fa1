"""Pickles functions for the ranks with cloudpickle and identifies unpicklable objects."""

from __future__ import annotations

import inspect
import reprlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import cloudpickle

from distkit.errors import PACKAGE_PATHS, NotPicklableError
from distkit.recording.recorder import add_user_file, is_user_file


def dumps(value: Any) -> bytes:
    """Pickle a value, including functions that are defined in a notebook."""
    pickled: bytes = cloudpickle.dumps(value)
    return pickled


def pack(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call, or the path of a script with its arguments.

    Raises:
        TypeError: ``fn`` is neither a function nor a path, or a script got keyword arguments.
        FileNotFoundError: the script does not exist.
        NotPicklableError: the call cannot be pickled; the message names the object.
    """
    if isinstance(fn, (str, Path)):
        if kwargs:
            raise TypeError(
                "a script accepts only positional arguments: run('train.py', '--steps', '10')"
            )
        if not Path(fn).is_file():
            raise FileNotFoundError(f"{fn}: script not found. Pass the path of a .py file.")
        fn = Path(fn).resolve()
        add_user_file(str(fn))  # the script is user code, regardless of its folder
        args = tuple(map(str, args))
    elif not callable(fn):
        raise TypeError(
            f"run() needs a function or the path of a script, got {reprlib.repr(fn)}. Pass the "
            "function itself, without parentheses: cluster.run(hello), not cluster.run(hello())."
        )
    try:
        with _pickle_user_modules_by_value():
            return dumps((fn, args, kwargs))
    except Exception:
        # a user module may have unpicklable globals, so retry with modules pickled by reference
        with suppress(Exception):
            return dumps((fn, args, kwargs))
        raise NotPicklableError(_explain_failure(fn, args, kwargs)) from None


@contextmanager
def _pickle_user_modules_by_value() -> Iterator[None]:
    """Pickle the user's modules by value in the block, since they may change between runs."""
    files = [(m, getattr(m, "__file__", None)) for m in list(sys.modules.values())]
    user_modules = [
        m for m, file in files if file and not file.startswith(PACKAGE_PATHS) and is_user_file(file)
    ]
    # by name: a module that sys.modules lists twice can be registered only once
    by_name = {m.__name__: m for m in user_modules if sys.modules.get(m.__name__) is m}
    by_name.pop("__main__", None)
    for module in by_name.values():
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in by_name.values():
            cloudpickle.unregister_pickle_by_value(module)


def _explain_failure(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    name = getattr(fn, "__name__", type(fn).__name__)
    for description, value in _candidates(fn, args, kwargs):
        if not _is_picklable(value):
            return (
                f"{name}() cannot be sent to the ranks: {description} has "
                f"type {type(value).__module__}.{type(value).__qualname__} and cannot be pickled. "
                f"Create it inside {name}(), or pass plain data and tensors."
            )
    return f"{name}() cannot be sent to the ranks. Create unpicklable objects inside {name}()."


def _candidates(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield a description and the value of each argument and captured variable of a call."""
    for i, value in enumerate(args):
        yield f"argument {i}", value
    for key, value in kwargs.items():
        yield f"argument {key!r}", value
    with suppress(TypeError, ValueError):  # not a function, or a captured variable has no value yet
        captured = inspect.getclosurevars(fn)
        for key, value in {**captured.globals, **captured.nonlocals}.items():
            yield f"the captured variable {key!r}", value


def _is_picklable(value: Any) -> bool:
    try:
        dumps(value)
    except Exception:
        return False
    return True
