"""Starting ranks, running functions on them, and always cleaning up.

The only package that imports ipyparallel. ``processes`` forks, reaches and ends processes, ``rank``
is what runs in a rank, ``runs`` follows a run from the kernel, ``hosts`` reaches other machines;
``cluster`` is what users see, and ``supervisor`` what keeps its processes.
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
