"""Ranks on several machines, and ranks that others start.

:func:`doctor` says what will run on machines, :class:`Laboratory` makes several hosts on one;
:func:`record` and :func:`follow` are for ranks that torchrun or another launcher has started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distkit.companions import attributes

if TYPE_CHECKING:
    from distkit_hosts.checkup.examine import doctor
    from distkit_hosts.laboratory import Laboratory
    from distkit_hosts.torchrun.attached import record
    from distkit_hosts.torchrun.following import follow

_HOMES = {
    "distkit_hosts.checkup.examine": ["doctor"],
    "distkit_hosts.laboratory": ["Laboratory"],
    "distkit_hosts.torchrun.attached": ["record"],
    "distkit_hosts.torchrun.following": ["follow"],
}
_home = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["Laboratory", "doctor", "follow", "record"]


__getattr__ = attributes(__name__, _home)
