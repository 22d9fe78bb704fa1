"""All-reduce algorithms, one per file, with schedule, cost formula and reference implementation.

Every file in this folder is imported and registers its algorithm with
:meth:`~distkit.algorithms.catalog.Algorithms.register`.
"""

from __future__ import annotations

import importlib
import pkgutil

from distkit.algorithms.catalog import Algorithms

#: All-reduce algorithms by name.
ALL_REDUCES = Algorithms()

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
