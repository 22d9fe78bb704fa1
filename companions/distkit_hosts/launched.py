"""Detect the launcher of a process, and its rank. No side effects.

The innermost launcher is detected: if Slurm starts torchrun on each node, the ranks are torchrun's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distkit.errors import StartError


@dataclass(frozen=True)
class Launched:
    """A process that a launcher has started.

    Args:
        launcher: "torchrun", "Open MPI", "MPICH" or "Slurm"; "environment" if RANK is set, but not
            by torchrun; "none" if no rank is set.
        rank, world_size: the rank of the process, and the number of ranks.
    """

    launcher: str
    rank: int = 0
    world_size: int = 1


#: Launchers' environment variables for the rank and the number of ranks, innermost launcher first.
_VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE"),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS"),
}


def detect(environ: Mapping[str, str]) -> Launched:
    """Return the launcher and the rank of a process from its environment variables.

    Raises:
        StartError: a variable is missing or not a number.

    >>> detect({"SLURM_PROCID": "5", "SLURM_NTASKS": "8"})
    Launched(launcher='Slurm', rank=5, world_size=8)
    """
    for launcher, (rank, world_size) in _VARIABLES.items():
        if rank in environ:
            if launcher == "torchrun" and "TORCHELASTIC_RUN_ID" not in environ:
                launcher = "environment"
            return Launched(launcher, _number(rank, environ), _number(world_size, environ))
    return Launched("none")


def _number(variable: str, environ: Mapping[str, str]) -> int:
    value = environ.get(variable, "")
    if not (value.isascii() and value.isdecimal()):
        raise StartError(
            f"{variable} is {value!r}: expected an integer of at least 0. Set the rank and "
            "the number of ranks, as a launcher does, or neither of them."
        )
    return int(value)
