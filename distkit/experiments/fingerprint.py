"""A function's identity across sessions: what it does, and with what data. Pure.

It is that of the bytecode, so comments and blank lines do not matter, and covers what the
function refers to: the user's own functions and classes, globals, defaults and closures.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any

from distkit.cluster.pickling import dumps, is_users


def fingerprint(fn: Callable[..., Any]) -> str:
    """A name for the function as it is now: equal for equal code and data.

    >>> one, same, other = eval("lambda x: x + 1"), eval("lambda x: x + 1"), lambda x: x + 2
    >>> fingerprint(one) == fingerprint(same), fingerprint(one) == fingerprint(other)
    (True, False)
    """
    digest = hashlib.sha256()
    for part in _parts(fn, {}):
        digest.update(part)
    return digest.hexdigest()[:16]


def global_names(code: CodeType) -> list[str]:
    """The global names that a code object reads, those of the functions inside it included.

    >>> global_names((lambda x: [len(y) for y in sorted(x)]).__code__)
    ['len', 'sorted']
    """
    found = {i.argval for i in dis.get_instructions(code) if i.opname in _READ}
    for inner in filter(_is_code, code.co_consts):
        found.update(global_names(inner))
    return sorted(found)


_READ = {"LOAD_GLOBAL", "LOAD_NAME"}
#: What a class knows of itself that tells where it is, not what it does.
_OF_PLACE = {"__dict__", "__weakref__", "__firstlineno__", "__module__", "__doc__"}
#: What has been looked at; it is held, so that nothing else gets its id.
Seen = dict[int, Any]


def _is_code(value: Any) -> bool:
    return isinstance(value, CodeType)


def _parts(value: Any, seen: Seen) -> Iterator[bytes]:
    """What makes a value what it is, as bytes."""
    yield f"\n{type(value).__name__} ".encode()
    if id(value) in seen:  # a function that calls itself, a list in itself
        return
    if isinstance(value, (FunctionType, type, list, dict)):
        seen[id(value)] = value
    if isinstance(value, FunctionType) and _is_own(value):
        yield from _of_function(value, seen)
    elif isinstance(value, type) and _is_own(value):
        yield from _parts({k: v for k, v in vars(value).items() if k not in _OF_PLACE}, seen)
    elif isinstance(value, CodeType):
        yield value.co_code
        yield from _parts((value.co_names, value.co_varnames, value.co_consts), seen)
    elif isinstance(value, Mapping):
        yield from _parts([(key, value[key]) for key in sorted(value, key=repr)], seen)
    elif isinstance(value, (set, frozenset)):
        yield repr(sorted(map(repr, value))).encode()
    elif isinstance(value, (list, tuple)):
        yield str(len(value)).encode()
        for one in value:
            yield from _parts(one, seen)
    else:
        yield _plain(value)


def _of_function(fn: FunctionType, seen: Seen) -> Iterator[bytes]:
    known = {n: fn.__globals__[n] for n in global_names(fn.__code__) if n in fn.__globals__}
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    for name, cell in cells:
        with suppress(ValueError):  # it has no value yet
            known[name] = cell.cell_contents
    yield from _parts(fn.__code__, seen)
    yield from _parts((fn.__defaults__, fn.__kwdefaults__, known), seen)


def _is_own(thing: Any) -> bool:
    """True if its code is the user's, which may change, and not that of an installed package."""
    if isinstance(thing, FunctionType):
        return is_users(thing.__code__.co_filename)
    return is_users(getattr(inspect.getmodule(thing), "__file__", None)) or (
        thing.__module__ == "__main__"
    )


def _plain(value: Any) -> bytes:
    if isinstance(value, (ModuleType, FunctionType, type)) or inspect.isroutine(value):
        return f"{getattr(value, '__module__', '')}.{value.__name__}".encode()
    if hasattr(value, "detach"):  # a tensor, whose pickle has an address in it
        value = value.detach().cpu().numpy()
    if hasattr(value, "tobytes"):
        return f"{value.dtype}{value.shape}".encode() + bytes(value.tobytes())
    try:
        return dumps(value)
    except Exception:
        return b""  # of such a type; its value does not travel either
