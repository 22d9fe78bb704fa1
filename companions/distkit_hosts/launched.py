"""Recognise the launcher of a process, and its rank. Pure.

The innermost launcher counts: if Slurm starts torchrun on each node, the ranks are torchrun's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distkit.errors import StartError


@dataclass(frozen=True)
class Launched:
    """A process that a launcher has started.

    Args:
        launcher: "torchrun", "Open MPI", "MPICH" or "Slurm"; "environment" if only RANK and
            WORLD_SIZE are set, and "none" if neither is.
        rank, world_size: its rank, and the number of ranks.
        local_rank: its rank on this host; None if the launcher does not set it.
        host: the name of this host.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None
    host: str


#: The environment variables of launchers, the innermost launcher first.
_VARIABLES = {
    "torchrun": {
        "rank": "RANK",
        "world_size": "WORLD_SIZE",
        "local_rank": "LOCAL_RANK",
    },
    "Open MPI": {
        "rank": "OMPI_COMM_WORLD_RANK",
        "world_size": "OMPI_COMM_WORLD_SIZE",
        "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
    },
    "MPICH": {
        "rank": "PMI_RANK",
        "world_size": "PMI_SIZE",
        "local_rank": "MPI_LOCALRANKID",
    },
    "Slurm": {
        "rank": "SLURM_PROCID",
        "world_size": "SLURM_NTASKS",
        "local_rank": "SLURM_LOCALID",
    },
}


def recognise(environ: Mapping[str, str], host: str) -> Launched:
    """Return the launcher and the rank of a process, by its environment variables.

    Args:
        environ: the environment variables.
        host: the name of its host.

    Raises:
        StartError: a variable is missing or not a number.

    >>> slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
    >>> found = recognise(slurm, "node2")
    >>> found.launcher, found.rank, found.world_size, found.local_rank, found.host
    ('Slurm', 5, 8, 1, 'node2')
    """
    launchers = [name for name, variables in _VARIABLES.items() if variables["rank"] in environ]
    if not launchers:
        return Launched("none", 0, 1, 0, host)
    return _read(launchers[0], environ, host)


def _read(launcher: str, environ: Mapping[str, str], host: str) -> Launched:
    variables = _VARIABLES[launcher]
    number = {
        field: _number(variable, environ)
        for field, variable in variables.items()
        if variable in environ
    }
    if "world_size" not in number:
        raise StartError(
            f"{variables['rank']} is set, but {variables['world_size']} is not. A launcher sets "
            "both: set or unset both."
        )
    if launcher == "torchrun" and "TORCHELASTIC_RUN_ID" not in environ:
        launcher = "environment"
    rank, world_size = number["rank"], number["world_size"]
    return Launched(launcher, rank, world_size, number.get("local_rank"), host)


def _number(variable: str, environ: Mapping[str, str]) -> int:
    value = environ[variable]
    if not (value.isascii() and value.isdecimal()):
        raise StartError(f"{variable} is {value!r}: expected an integer of at least 0.")
    return int(value)
