"""The rank of a process, read from its launcher's environment."""

from __future__ import annotations

import pytest

from distkit.errors import StartError
from distkit_hosts.launched import Launched, detect

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "ROLE_RANK": "5",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "none",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "42",
    "SLURM_JOB_NODELIST": "node[1-2]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, Launched("torchrun", 5, 8)),
        (SLURM, Launched("Slurm", 3, 4)),
        (OPEN_MPI, Launched("Open MPI", 2, 3)),
        (MPICH, Launched("MPICH", 1, 2)),
        ({"RANK": "0", "WORLD_SIZE": "2"}, Launched("environment", 0, 2)),
        ({"SLURM_NTASKS": "4"}, Launched("none", 0, 1)),  # in salloc
        ({}, Launched("none", 0, 1)),
        # the innermost launcher wins: Slurm starts torchrun, or mpiexec within a batch script
        ({**SLURM, **TORCHRUN}, Launched("torchrun", 5, 8)),
        ({**SLURM, **OPEN_MPI}, Launched("Open MPI", 2, 3)),
        # as set by many scripts
        (
            {**SLURM, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"},
            Launched("environment", 3, 4),
        ),
    ],
)
def test_launchers_are_detected(environ: dict[str, str], expected: Launched) -> None:
    assert detect(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "1"}, "WORLD_SIZE is '': expected an integer"),
        ({**TORCHRUN, "RANK": "one"}, "RANK is 'one': expected an integer"),
        ({**SLURM, "SLURM_NTASKS": ""}, "SLURM_NTASKS is '': expected an integer"),
        ({**MPICH, "PMI_RANK": "-1"}, "PMI_RANK is '-1'"),
    ],
)
def test_inconsistent_environment_raises(environ: dict[str, str], message: str) -> None:
    with pytest.raises(StartError, match=message):
        detect(environ)
