"""Training with parameter servers: null steps, and unsplit tensors on up to 128 workers."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist

from benchmarks.published import tables
from benchmarks.published.rows import Row
from benchmarks.published.workloads import inception_v3
from distkit._format import count
from distkit_simulation import cost
from distkit_simulation.network import Link
from distkit_simulation.parameter_servers import assign_tensors

BATCH = 64


def rows() -> list[Row]:
    """Return every row of the tables of parameter servers."""
    return [*_null_steps(), *_piz_daint(), *_p2()]


def _null_steps() -> list[Row]:
    """Add a constant, a time per additional worker, and the busiest machine's transfer time.

    The constant and the time per worker are fitted on the scalar rows, and the bandwidth on one
    worker that transfers 1 GB.
    """
    start = tables.NULL_STEPS[0, 1]
    each = (tables.NULL_STEPS[0, 100] - start) / 99
    beta = (tables.NULL_STEPS[1e9, 1] - start) / 2e9
    fitted = {(0, 1), (0, 100), (1e9, 1)}
    return [
        Row(
            "null steps, 16 servers",
            f"{nbytes / 1e6:g} MB, {count(workers, 'worker')}",
            "s",
            published,
            start
            + each * (workers - 1)
            + float(cost.parameter_server(workers, 16, nbytes, Link(0, beta))),
            (nbytes, workers) in fitted,
        )
        for (nbytes, workers), published in tables.NULL_STEPS.items()
    ]


def slowest(workers: int) -> float:
    """Return the expected delay of the slowest worker, in standard deviations (Blom, 1958).

    >>> round(slowest(1), 2), round(slowest(100), 2)
    (0.0, 2.5)
    """
    return NormalDist().inv_cdf((workers - 0.375) / (workers + 0.25))


def step_seconds(compute: float, sigma: float, beta: float, workers: int, servers: int) -> float:
    """Return the time of a synchronous step of Inception-v3 with unsplit tensors [s].

    The server with the most bytes sends its tensors to every worker during the forward pass, a
    third of the compute time, and receives the gradients during the backward pass. Each pass takes
    as long as its computation or its transfer, whichever is longer. ``sigma`` is the standard
    deviation of the workers' steps [s].
    """
    busy = workers * float(assign_tensors(inception_v3(), servers).max()) * beta
    return max(compute / 3, busy) + max(compute * 2 / 3, busy) + sigma * slowest(workers)


def _piz_daint() -> list[Row]:
    """Fit the step time on one worker, its variation on 16, and the bandwidth on 128."""
    table = tables.PIZ_DAINT
    fitted = [(1, 1), (16, 4), (128, 116)]
    step = {key: BATCH * key[0] / x for key, x in table.items()}
    compute, sigma, beta = step[1, 1], 0.0, 0.0
    for _ in range(20):  # fixed point of sigma and beta, which converges quickly
        sigma = (step[16, 4] - step_seconds(compute, 0, beta, 16, 4)) / slowest(16)
        queued = (step[128, 116] - sigma * slowest(128)) / 2
        beta = queued / (128 * float(assign_tensors(inception_v3(), 116).max()))
    return [
        Row(
            "Piz Daint, Inception-v3",
            f"{count(w, 'worker')}, {count(s, 'server')}",
            "images/s",
            x,
            BATCH * w / step_seconds(compute, sigma, beta, w, s),
            (w, s) in fitted,
            w * table[1, 1],
        )
        for (w, s), x in table.items()
    ]


def _p2() -> list[Row]:
    """Assume that workers wait only for the slowest GPU; fit its delay on 128 GPUs."""
    table: Mapping[tuple[int, int], float] = tables.P2_SERVED
    compute = BATCH / table[1, 1]
    sigma = (BATCH * 128 / table[128, 16] - compute) / slowest(128)
    return [
        Row(
            "p2.8xlarge, Inception-v3",
            f"{gpus} GPUs, {count(servers, 'server')}",
            "images/s",
            x,
            BATCH * gpus / (compute + sigma * slowest(gpus)),
            gpus in (1, 128),
            gpus * table[1, 1],
        )
        for (gpus, servers), x in table.items()
    ]
