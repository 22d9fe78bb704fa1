"""Whoever holds the group of the past holds that of today."""

from __future__ import annotations

import gc
import sys
from functools import partial
from types import ModuleType

from distkit.cluster.rank.process_group import _held, renew

#: Stands for a process group: an object that the collector does not follow, either.
Group = object


old, older, new, other = Group(), Group(), Group(), Group()


def positional(x, group=old, again=other, *, named=older): ...


def closure(group):
    return lambda: group


class Base:
    group = old

    def method(self, group=old): ...


class Derived(Base):
    other = other


def test_all_holders_are_renewed() -> None:
    module = ModuleType("renewed")
    module.GROUP, module.OTHER = older, other
    sys.modules["renewed"] = module
    kept, closed, bound = Base(), closure(old), partial(positional, group=older)
    kept.mine, before = old, Derived().group
    assert before is old, "the class caches it"
    stale = [old, older]
    try:
        renew(stale, new)
    finally:
        del sys.modules["renewed"]
    assert (module.GROUP, module.OTHER) == (new, other)
    assert positional.__defaults__ == (new, other)
    assert positional.__kwdefaults__ == {"named": new}
    assert (Base.group, Derived().group, Derived.other) == (new, new, other)
    assert Base.method.__defaults__ == (new,)
    assert (kept.mine, closed(), bound.keywords["group"]) == (new, new, new)
    assert globals()["old"] is globals()["older"] is new
    assert len({*map(id, stale)}) == 2, "the caller's own list stays"


def test_what_the_collector_does_not_follow_is_found() -> None:
    def function(group=old, *, named=old): ...

    object_of_it = Base()
    object_of_it.mine = stale = Group()
    function.__defaults__, function.__kwdefaults__ = (stale,), {"named": stale}
    gc.collect()
    assert not gc.is_tracked(function.__defaults__)
    renew([stale], new)
    assert (function.__defaults__, function.__kwdefaults__) == ((new,), {"named": new})
    assert object_of_it.mine is new


def test_who_is_held_is_known() -> None:
    alone, held = [Group()], [Group(), Group()]
    keep = held[1]
    assert not _held(alone)
    assert not _held([*alone, *alone][:0])
    assert _held(held)
    del keep
    assert not _held(held)


def test_nothing_to_renew() -> None:
    renew([], new)
