"""The faults of a laboratory that are there now, and how each is undone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Faults:
    """Faults by what they are, each with the hosts that take part in it.

    >>> faults = Faults()
    >>> faults.add("cold", {"beta"}, lambda: print("freeze"), lambda: print("thaw"))
    freeze
    >>> faults.mend({"alpha"})
    >>> faults.mend()
    thaw
    """

    _there: dict[str, tuple[set[str], Callable[[], None]]] = field(default_factory=dict)

    def add(
        self, what: str, hosts: set[str], make: Callable[[], None], undo: Callable[[], None]
    ) -> None:
        """Make a fault, in place of the one that is the same but for its degree."""
        if what in self._there:
            self._there.pop(what)[1]()
        make()
        self._there[what] = (hosts, undo)

    def mend(self, hosts: set[str] | None = None) -> None:
        """Undo the faults in which one of these hosts takes part; all for None."""
        for what, (ends, undo) in list(self._there.items()):
            if hosts is None or ends & hosts:
                del self._there[what]
                undo()

    def forget(self, host: str) -> None:
        """Leave the faults of a host as they are: it has gone."""
        self._there = {w: fault for w, fault in self._there.items() if host not in fault[0]}
