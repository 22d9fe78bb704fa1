"""From events to the keys that ranks have set in a store, and those they wait for. Pure.

A store is shared by all who know its address; behind a prefix a key has another name. Two keys are
taken for one when one of them ends with the other: so nobody is said to wait in vain who does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from distkit.events import Event, Op, Span
from distkit.trace.calls import keys as shown


class Keys:
    """The keys set so far, and the ranks at the barriers of stores."""

    def __init__(self) -> None:
        self.set: dict[str, Event] = {}  # by whom first
        self._came: dict[object, set[int]] = defaultdict(set)  # to barriers

    def feed(self, e: Event) -> None:
        """A rank sets keys, or comes to a barrier."""
        if e.op is Op.STORE_SET:
            for key in _keys(e):
                self.set.setdefault(key, e)
        elif "ranks" in e.attributes:
            self._came[e.attributes].add(e.rank)

    def missing(self, it: Event | Span) -> list[str]:
        """The keys that a call waits for, and that no rank has set."""
        return [key for key in _keys(it) if not self._is_set(key)]

    def has(self, it: Event | Span) -> bool:
        """True if a call has what it waits for."""
        facts = it.attributes
        if "ranks" in facts:
            return len(self._came[facts]) >= int(facts["ranks"])
        return not self.missing(it)

    def came(self, it: Event | Span) -> set[int]:
        """The ranks that have come to a store's barrier."""
        return self._came[it.attributes] if "ranks" in it.attributes else set()

    def why(self, it: Event | Span) -> str:
        """The condition that a call waits for, in words."""
        if "ranks" in it.attributes:
            return f"{len(self.came(it))} have called it"
        return f"no rank has set {shown(self.missing(it))}"

    def _is_set(self, key: str) -> bool:
        return any(_same(key, other) for other in self.set)


def _keys(it: Event | Span) -> tuple[str, ...]:
    keys: tuple[str, ...] = it.attributes.get("keys", ())
    return keys


def _same(one: str, other: str) -> bool:
    return one == other or one.endswith(f"/{other}") or other.endswith(f"/{one}")


def similar(key: str, others: Iterable[str]) -> str:
    """The key that was perhaps meant; "" if none looks like it.

    >>> similar("ready", ["redy", "done"])
    'redy'
    """
    from difflib import get_close_matches

    return next(iter(get_close_matches(key, list(others), 1)), "")
