"""Ranks on several machines: what will run there, and a laboratory of hosts on one machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distkit.lazy import attributes

if TYPE_CHECKING:
    from distkit_hosts.checkup.doctor import doctor
    from distkit_hosts.laboratory import Laboratory

_HOMES = {
    "distkit_hosts.checkup.doctor": ["doctor"],
    "distkit_hosts.laboratory": ["Laboratory"],
}
_home = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["Laboratory", "doctor"]


__getattr__ = attributes(__name__, _home)
