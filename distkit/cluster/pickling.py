"""Functions travel to the ranks by cloudpickle; what cannot travel is named."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle

from distkit.errors import NotPicklableError


def pack(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call, or the path of a script with its arguments.

    Raises:
        TypeError: ``fn`` is not callable.
        NotPicklableError: it cannot travel; the message names the object that cannot.
    """
    if isinstance(fn, (str, Path)):
        fn = _script(Path(fn))
        args = tuple(map(str, args))
    elif not callable(fn):
        raise TypeError(f"run() wants a function or the path of a script, not {fn!r}")
    try:
        return cloudpickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise NotPicklableError(_blame(fn, args, kwargs, error)) from None


def _script(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such script. Name a .py file.")
    return path.resolve()


def _blame(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> str:
    name = getattr(fn, "__name__", type(fn).__name__)
    for what, value in _suspects(fn, args, kwargs):
        if not _travels(value):
            return (
                f"{name}() cannot travel to the ranks: {what} is a "
                f"{type(value).__module__}.{type(value).__qualname__}, which cannot be pickled. "
                f"Create it inside {name}(), or pass plain data and tensors."
            )
    return (
        f"{name}() cannot travel to the ranks ({type(error).__name__}: {error}). "
        f"Create what cannot be pickled inside {name}()."
    )


def _suspects(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
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


