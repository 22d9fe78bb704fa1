"""The all-reduces, a file each: schedule, cost formula, reference implementation and entry.

Every file of this folder is imported; its entry is made by
:meth:`~distkit.algorithms.catalogue.Algorithms.register`.
"""

from __future__ import annotations

import importlib
import pkgutil

from distkit.algorithms.catalogue import Algorithms

#: Every all-reduce by name.
ALL_REDUCES = Algorithms()

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
