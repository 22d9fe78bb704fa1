"""The default group of the past, wherever a program still holds it, becomes that of today.

A module that is imported while there is a group may keep it: ``def f(x, group=group.WORLD)``,
as ``torch.distributed.nn.functional`` does, a constant, a class attribute. The module outlives
the group: ranks live on, and after an interrupt or a failure they meet in a new one.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from types import CellType, FunctionType
from typing import Any

#: Of so many objects the collector is asked at once: its answer is a list.
AT_ONCE = 10_000


def renew(old: list[Any], new: Any, kept: Sequence[Any] = ()) -> None:
    """Put ``new`` into every module, class, object, closure and default argument that holds one.

    What is only local to a running function stays, and so do lists and sets.

    Args:
        old: the groups of the past.
        new: the group of today.
        kept: what the caller itself holds: a group that is held there alone is not looked for.
    """
    if not _held(old, kept):
        return
    stale = {id(group) for group in old}
    holders = sorted(
        _holders(old, stale), key=lambda holder: not _is_class(holder)
    )  # before its dict
    # frozen objects are not among those of the collector; modules are all that programs write to
    for holder in [*holders, *sys.modules.values()]:
        if type(holder) is FunctionType:
            given = holder.__defaults__ or ()
            holder.__defaults__ = tuple(new if id(value) in stale else value for value in given)
        elif type(holder) is CellType and _any(gc.get_referents(holder), stale):
            holder.cell_contents = new
        if _is_class(holder):
            for name in _names(dict(vars(holder)), stale):
                setattr(holder, name, new)  # its cache has to know
            continue
        for space in _spaces(holder):
            space.update(dict.fromkeys(_names(space, stale), new))


def _held(old: list[Any], kept: Sequence[Any] = ()) -> bool:
    """True if anybody but these lists refers to one of the old ones."""
    nobodys = object()
    held = {id(group): group for group in [*old, nobodys]}
    *counts, alone = [sys.getrefcount(group) for group in held.values()]
    lists = [sum(one is group for one in (*old, *kept)) for group in held.values()]
    return any(count - n > alone - 1 for count, n in zip(counts, lists, strict=False))


def _holders(old: list[Any], stale: set[int]) -> list[Any]:
    """What the collector knows that holds one, also in a dict or tuple that it does not follow.

    After an import of torch's compiler it knows a million objects: loops over them are C's.
    """
    known = gc.get_objects()
    parts = [
        held
        for n in range(0, len(known), AT_ONCE)
        for held in gc.get_referents(*known[n : n + AT_ONCE])
        if type(held) in (dict, tuple) and not gc.is_tracked(held) and _any(held, stale)
    ]
    direct = gc.get_referrers(*old)
    parts += [holder for holder in direct if type(holder) in (dict, tuple)]
    return [*direct, *gc.get_referrers(*parts)]


def _is_class(holder: Any) -> bool:
    return issubclass(type(holder), type)  # isinstance would ask objects that pretend


def _any(held: Any, stale: set[int]) -> bool:
    values: Iterable[Any] = held.values() if type(held) is dict else held
    return any(id(value) in stale for value in values)


def _spaces(holder: Any) -> list[dict[str, Any]]:
    """The dictionaries in which something keeps what it refers to by name."""
    if type(holder) is dict:
        return [holder]
    found = [held for held in gc.get_referents(holder) if type(held) is dict]
    try:  # an object's own may not exist before one asks
        found.append(object.__getattribute__(holder, "__dict__"))
    except AttributeError:
        return found
    return found


def _names(space: dict[str, Any], stale: set[int]) -> list[str]:
    return [name for name, value in space.items() if id(value) in stale]
