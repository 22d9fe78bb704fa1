"""The packages beside distkit, and the names by which distkit imports them.

A companion imports distkit like any program. distkit knows companions by this table alone: ``import
distkit.x`` imports the companion that has the place of ``distkit/x``, so that the public names and
what readers have written stay as they are.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from distkit.errors import OWN, CompanionError

#: Each module of distkit that is a companion, or a part of one.
COMPANIONS = {
    "distkit.experiments": "distkit_experiments",
    "distkit.parallel": "distkit_simulation.parallel",
    "distkit.simulation": "distkit_simulation",
}


def load(module: str) -> ModuleType:
    """Import a companion, or one of its modules.

    Raises:
        CompanionError: it is not installed.

    Example:
        >>> load("distkit_experiments").Experiment.__name__
        'Experiment'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise
        raise CompanionError(
            f"{package} is not installed. It comes with distkit: run 'python -m pip install "
            "--force-reinstall distkit', or in a checkout 'python -m pip install --editable .'."
        ) from None


def home(module: str) -> str:
    """The companion's name for a module of distkit; "" if it is distkit's own.

    >>> home("distkit.experiments.results"), home("distkit.events")
    ('distkit_experiments.results', '')
    """
    for name, companion in COMPANIONS.items():
        if f"{module}.".startswith(f"{name}."):
            return companion + module.removeprefix(name)
    return ""


class Finder:
    """Imports the companion where a module of distkit is asked for, from the same checkout.

    It is a finder and a loader without the base classes of ``importlib.abc``, which would import
    ``tempfile`` before a reader's file of that name can be left out.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Take over the modules that companions have, and find the companions of a checkout."""
        if home(fullname):
            return ModuleSpec(fullname, self)  # type: ignore[arg-type]  # wants load_module
        return PathFinder.find_spec(fullname, OWN[1:]) if fullname in COMPANIONS.values() else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the companion in the place of the empty module."""
        sys.modules[module.__name__] = load(home(module.__name__))
