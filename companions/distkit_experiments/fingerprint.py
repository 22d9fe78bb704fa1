"""A function's identity across sessions: what it does, and with what data. Pure.

It is that of the bytecode, so comments and blank lines do not matter, and covers what the
function refers to: the user's own functions, classes and modules, globals, defaults and closures.
"""

from __future__ import annotations

import copyreg
import dis
import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any

from distkit.cluster.pickling import is_users, path


def fingerprint(fn: Callable[..., Any]) -> str:
    """A name for the function as it is now: equal for equal code and data.

    >>> one, same, other = eval("lambda x: x + 1"), eval("lambda x: x + 1"), lambda x: x + 2
    >>> fingerprint(one) == fingerprint(same), fingerprint(one) == fingerprint(other)
    (True, False)
    """
    digest = hashlib.sha256()
    for part in _Walk().parts(fn):
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
#: What a class or a module knows of itself that tells where it is, not what it does.
_OF_PLACE = {
    *("__dict__", "__weakref__", "__firstlineno__", "__static_attributes__", "__doc__"),
    *("__module__", "__builtins__", "__cached__", "__file__", "__loader__", "__path__", "__spec__"),
}
#: Values whose text says all.
_TEXT = (type(None), type(...), bool, int, float, complex, str, bytes)
#: Where decorated functions, methods and properties have the function that they are made of.
_INSIDE = ("__wrapped__", "__func__", "__self__", "fget", "fset", "fdel")


def _is_code(value: Any) -> bool:
    return isinstance(value, CodeType)


class _Walk:
    """All that a value refers to, each object once and then by its number.

    Numbers, and not addresses, make it the same in every session; the next objects wait in a list,
    so that neither a cycle nor a long chain of calls is too deep.
    """

    def __init__(self) -> None:
        self._met: list[Any] = []  # it holds them, so that nothing else gets their ids
        self._numbers: dict[int, int] = {}

    def parts(self, first: Any) -> Iterator[bytes]:
        """What makes a value what it is, as bytes."""
        self._met.append(first)
        self._numbers[id(first)] = 0
        for thing in self._met:  # which grows meanwhile
            yield from self._told((_name(type(thing)), *_content(thing)))

    def _told(self, value: Any) -> Iterator[bytes]:
        yield f"\n{type(value).__name__} ".encode()
        if type(value) in _TEXT:
            yield repr(value).encode()
        elif type(value) is tuple:
            yield str(len(value)).encode()
            for one in value:
                yield from self._told(one)
        elif type(value) is frozenset:
            yield from self._told(tuple(sorted(value, key=repr)))
        elif isinstance(value, CodeType):
            names = value.co_names, value.co_varnames, value.co_freevars
            yield from self._told((value.co_code, *names, value.co_consts))
        else:
            yield str(self._number(value)).encode()

    def _number(self, thing: Any) -> int:
        if id(thing) not in self._numbers:
            self._numbers[id(thing)] = len(self._met)
            self._met.append(thing)
        return self._numbers[id(thing)]


def _content(thing: Any) -> tuple[Any, ...]:
    """What an object consists of."""
    if _is_own(thing):
        return _of_own(thing)
    if isinstance(thing, (ModuleType, type)):
        return (thing.__name__,) if isinstance(thing, ModuleType) else (_name(thing),)
    if isinstance(thing, property) or _is_routine(thing):
        inside = tuple(getattr(thing, name, None) for name in _INSIDE)
        return _name(thing), inside, tuple(_cells(thing).items())
    if type(thing) in (dict, MappingProxyType):
        return tuple(thing.items())
    if type(thing) is list:
        return tuple(thing)
    if type(thing) is set:
        return tuple(sorted(thing, key=repr))
    return path(thing) or _of_array(thing) or _of_instance(thing)


def _is_own(thing: Any) -> bool:
    """True if its code is the user's, which may change, and not that of an installed package."""
    if isinstance(thing, FunctionType):
        return is_users(thing.__code__.co_filename)
    if isinstance(thing, type):
        return thing.__module__ == "__main__" or _is_own(inspect.getmodule(thing))
    return isinstance(thing, ModuleType) and is_users(getattr(thing, "__file__", None))


def _of_own(thing: Any) -> tuple[Any, ...]:
    if not isinstance(thing, FunctionType):
        held = {name: value for name, value in vars(thing).items() if name not in _OF_PLACE}
        order = sorted if isinstance(thing, ModuleType) else tuple  # imports add to a module
        return *getattr(thing, "__bases__", ()), *order(held), *map(held.get, order(held))
    space = thing.__globals__
    known = {n: space[n] for n in global_names(thing.__code__) if n in space} | _cells(thing)
    defaults = thing.__defaults__, thing.__kwdefaults__, thing.__dict__
    return thing.__code__, defaults, tuple(known.items())


def _cells(fn: Any) -> dict[str, Any]:
    """The variables of the functions around a function that it uses."""
    found = {}
    if isinstance(fn, FunctionType):
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            with suppress(ValueError):  # it has no value yet
                found[name] = cell.cell_contents
    return found


def _is_routine(thing: Any) -> bool:
    return inspect.isroutine(thing) and hasattr(thing, "__name__") and not _is_own(type(thing))


def _name(thing: Any) -> str:
    own = getattr(thing, "__qualname__", getattr(thing, "__name__", ""))
    return f"{getattr(thing, '__module__', '')}.{own}"


def _of_array(value: Any) -> tuple[Any, ...]:
    """A tensor's or an array's numbers, () for others; a tensor's pickle has an address in it."""
    with suppress(Exception):  # a sparse one, or one of objects, is told by its parts
        told = type(value), str(value.dtype), *value.shape
        if hasattr(value, "detach"):
            plain = value.detach().cpu().resolve_conj().resolve_neg()
            return *told, value.requires_grad, _bytes(plain)
        if not value.dtype.hasobject:
            return *told, value.tobytes()
    return ()


def _bytes(tensor: Any) -> bytes:
    """A tensor's numbers; numpy has not all of their types."""
    import torch

    return bytes(tensor.flatten().contiguous().view(torch.uint8).numpy().tobytes())


def _of_instance(thing: Any) -> tuple[Any, ...]:
    """A class, and what pickle would keep of an instance, by value."""
    try:
        reduce = copyreg.dispatch_table.get(type(thing))
        kept = reduce(thing) if reduce else thing.__reduce_ex__(4)
    except Exception:
        return (type(thing),)  # it does not travel either
    if isinstance(kept, str):  # the name of what its module has
        return type(thing), kept
    made, arguments, state, items, pairs = (*kept, None, None, None)[:5]
    return type(thing), made, arguments, state, *(items or ()), *(pairs or ())
