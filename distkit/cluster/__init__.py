"""Starting ranks, running functions on them, and always cleaning up.

The only package that imports ipyparallel. Its modules, from the bottom: ``channel`` and
``spec`` (shared by all processes) · ``zygote``, ``warm``, ``processes``, ``rank``, ``group``
(in the forked processes) · ``forkserver``, ``plan``, ``limits``, ``pickling``, ``run``,
``report``, ``room``, ``card``, ``cluster``, ``local``, ``launcher`` (in the kernel).
"""

from typing import TYPE_CHECKING

from distkit.companions import attributes
from distkit.shadowing import check

if TYPE_CHECKING:
    from distkit.cluster.runs.run import Run
    from distkit.cluster.runs.stepper import Stepper

__all__ = ["Run", "Stepper"]

check("torch", "numpy", "zmq", "ipyparallel")

__getattr__ = attributes(
    __name__, {"Run": "distkit.cluster.runs.run", "Stepper": "distkit.cluster.runs.stepper"}
)
