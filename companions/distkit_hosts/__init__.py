"""Run ranks on several machines and record ranks that other launchers start.

:func:`doctor` checks machines, and :class:`Laboratory` simulates several hosts on one machine.
:func:`record` and :func:`follow` are for ranks that torchrun or another launcher has started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distkit.imports import attributes

if TYPE_CHECKING:
    from distkit_hosts.checkup.examine import doctor
    from distkit_hosts.laboratory import Laboratory
    from distkit_hosts.torchrun.attached import record
    from distkit_hosts.torchrun.following import follow

_module_of = {
    "Laboratory": "distkit_hosts.laboratory",
    "doctor": "distkit_hosts.checkup.examine",
    "follow": "distkit_hosts.torchrun.following",
    "record": "distkit_hosts.torchrun.attached",
}

__all__ = ["Laboratory", "doctor", "follow", "record"]


__getattr__ = attributes(__name__, _module_of)
