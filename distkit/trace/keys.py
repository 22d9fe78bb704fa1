"""From events to the keys that ranks have set in a store, and those they wait for. Pure.

A store is shared by all who know its address; behind a prefix a key has another name. Two keys are
taken for one when one of them ends with the other: so nobody is said to wait in vain who does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from distkit.events import Event, Op, Span
from distkit.trace.calls import keys as shown


def of(label: str) -> list[str]:
    """The keys of a call.

    >>> of("wait a, b"), of("barrier done, 4")
    (['a', 'b'], ['done'])
    """
    method, _, rest = label.partition(" ")
    return rest.split(", ")[: -1 if method == "barrier" else None]


class Keys:
    """What has been set so far, and who has come to the barriers of stores."""

    def __init__(self) -> None:
        self.set: dict[str, Event] = {}  # by whom first
        self._came: dict[str, set[int]] = defaultdict(set)  # by the label of a barrier

    def feed(self, e: Event) -> None:
        """A rank sets keys, or comes to a barrier."""
        if e.op is Op.STORE_SET:
            for key in of(e.label):
                self.set.setdefault(key, e)
        elif e.label.startswith("barrier "):
            self._came[e.label].add(e.rank)

    def missing(self, it: Event | Span) -> list[str]:
        """The keys that a call waits for, and that no rank has set."""
        return [key for key in of(it.label) if not self._is_set(key)]

    def has(self, it: Event | Span) -> bool:
        """Whether a call has what it waits for."""
        if it.label.startswith("barrier "):
            return len(self._came[it.label]) >= int(it.label.rpartition(", ")[2])
        return not self.missing(it)

    def came(self, it: Event | Span) -> set[int]:
        """The ranks that have come to a store's barrier."""
        return self._came[it.label] if it.label.startswith("barrier ") else set()

    def why(self, it: Event | Span) -> str:
        """What a call waits for, in words."""
        if it.label.startswith("barrier "):
            return f"{len(self._came[it.label])} have called it"
        return f"no rank has set {shown(', '.join(self.missing(it)))}"

    def _is_set(self, key: str) -> bool:
        return any(_same(key, other) for other in self.set)


def _same(one: str, other: str) -> bool:
    return one == other or one.endswith(f"/{other}") or other.endswith(f"/{one}")


def similar(key: str, others: Iterable[str]) -> str:
    """The key that was perhaps meant; "" if none looks like it.

    >>> similar("ready", ["redy", "done"])
    'redy'
    """
    from difflib import get_close_matches

    return next(iter(get_close_matches(key, list(others), 1)), "")
