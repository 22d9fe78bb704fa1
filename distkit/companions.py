"""Companion packages, which distkit imports lazily for some of its public names.

Companions import distkit like any program; distkit imports companions only by :func:`load`.
"""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from distkit.errors import CompanionError
from distkit.gone import GONE

#: Modules of distkit that have moved.
MOVED = {
    "distkit.algorithms.zero": "distkit_simulation.parallel.zero",
    "distkit.checkup": "distkit_hosts.checkup",
    "distkit.cluster.rank.line": "distkit_hosts.torchrun.line",
    "distkit.cluster.rank.attached": "distkit_hosts.torchrun.attached",
    "distkit.cluster.runs.others": "distkit_hosts.torchrun.others",
    "distkit.exercises": "distkit_course",
    "distkit.experiments": "distkit_experiments",
    "distkit.following": "distkit_hosts.torchrun.following",
    "distkit.laboratory": "distkit_hosts.laboratory",
    "distkit.launching": "distkit_hosts.torchrun.launching",
    "distkit.parallel": "distkit_simulation.parallel",
    "distkit.probe": "distkit_hosts.checkup.probe",
    "distkit.lazy": "distkit.companions",
    "distkit.recording.launched": "distkit_hosts.launched",
    "distkit.recording.merge": "distkit_hosts.torchrun.merge",
    "distkit.recording.rankfile": "distkit_hosts.torchrun.rankfile",
    "distkit.simulation": "distkit_simulation",
    "distkit.strategies": "distkit_strategies",
    "distkit.trace.causality": "distkit_hosts.causality",
    "distkit.algorithms.all_reduces": "distkit.algorithms.all_reduce",
    "distkit.algorithms.schedules": "distkit.algorithms.all_reduce",
    "distkit.trace.clocks": "distkit_hosts.clocks",
    "distkit.trace.flight_recorder": "distkit_hosts.foreign.flight_recorder",
    "distkit.trace.foreign": "distkit_hosts.foreign.files",
    "distkit.trace.kineto": "distkit_hosts.foreign.kineto",
    "distkit.trace.naming": "distkit_hosts.foreign.files",
    "distkit.trace.nccl_log": "distkit_hosts.foreign.nccl_log",
    "distkit.views.shards": "distkit_simulation.shard_map",
}


def load(module: str) -> ModuleType:
    """Import a module of distkit or of a companion.

    Raises:
        CompanionError: the companion is not installed.

    Example:
        >>> load("distkit_experiments").Experiment.__name__
        'Experiment'
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if package == "distkit" or error.name != package:
            raise
        raise CompanionError(
            f"{package} is not installed. It comes with distkit: run 'python -m pip install "
            "--force-reinstall distkit', or in a checkout 'python -m pip install --editable .'."
        ) from None


class MovedFinder:
    """Raises ModuleNotFoundError with the new name of a module that has moved."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        """Raise ModuleNotFoundError for a module that has moved or was removed."""
        if name in MOVED:
            where = MOVED[name]
            raise ModuleNotFoundError(f"{name} has moved: import {where} instead.", name=name)
        if name in GONE:
            raise ModuleNotFoundError(GONE[name], name=name)
        return None


def attributes(
    package: str,
    homes: Mapping[str, str],
    modules: Mapping[str, str] | None = None,
    former: Mapping[str, str] | None = None,
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package that imports its public names on first use.

    Args:
        package: the name of the package.
        homes: the module of each public name.
        modules: the full name of each public name that is a module.
        former: the new module of each name that has moved; using it warns.
    """
    modules, former = modules or {}, former or {}

    def get(name: str) -> Any:
        if name in homes:
            return getattr(load(homes[name]), name)
        if name in modules:
            return load(modules[name])
        if name in former:
            now = f"{former[name]}.{name}"
            warnings.warn(
                f"{package}.{name} has moved: write {now} instead.", DeprecationWarning, 2
            )
            return pkgutil.resolve_name(now)
        raise AttributeError(
            GONE.get(f"{package}.{name}", f"module {package!r} has no attribute {name!r}")
        )

    return get
