"""Starts ranks, runs functions on them, and cleans up.

``cluster`` is the user's interface, and ``supervisor`` manages a cluster's processes. ``processes``
forks, connects and kills processes, ``rank`` is the code of a rank, and ``runs`` controls a run
from the kernel. Within distkit, only this package imports ipyparallel.
"""

from typing import TYPE_CHECKING

from distkit.imports import attributes, check

if TYPE_CHECKING:
    from distkit.cluster.runs.run import Run
    from distkit.cluster.runs.stepper import Stepper

__all__ = ["Run", "Stepper"]

check("torch", "numpy", "zmq", "ipyparallel")

__getattr__ = attributes(
    __name__, {"Run": "distkit.cluster.runs.run", "Stepper": "distkit.cluster.runs.stepper"}
)
