"""Throughput of synchronous training, from one GPU's step plus the exposed all-reduce.

Most series are fitted on the row of one GPU and on one or two larger rows. The constants include
the fraction of communication that is not hidden by overlap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from benchmarks.published import tables
from benchmarks.published.rows import Row, solve
from distkit_simulation import cost
from distkit_simulation.network import Link

Term = Callable[[int], float]


def rows() -> list[Row]:
    """Return every row of the tables of synchronous training."""
    return [*_horovod(), *_dlperf(), *_mxnet(), *_dgx1(), *_p2(), *_facebook()]


def _series(
    table: str,
    name: str,
    batch: int,
    gpus: Sequence[int],
    throughput: Sequence[float],
    terms: Sequence[Term],
    fit: Sequence[int],
) -> list[Row]:
    """Predict step times as one GPU's plus Σ constant · term, with constants fitted on ``fit``."""
    step = {n: batch * n / x for n, x in zip(gpus, throughput, strict=True)}
    constants = solve([[f(n) for f in terms] for n in fit], [step[n] - step[1] for n in fit])
    predictions = []
    for n, x in zip(gpus, throughput, strict=True):
        predicted = step[1] + sum(c * f(n) for c, f in zip(constants, terms, strict=True))
        predictions.append(
            Row(
                table,
                f"{name}, {n} GPUs",
                "samples/s",
                x,
                batch * n / predicted,
                n in (1, *fit),
                n * throughput[0],
            )
        )
    return predictions


def between(per_node: int) -> Term:
    """Return the term of a hierarchical all-reduce's traffic between m nodes, 2(m-1)/m tensors.

    >>> between(8)(8), between(8)(32)
    (0.0, 1.5)
    """
    return lambda n: float(cost.ring(math.ceil(n / per_node), 1.0, Link(0, 1)))


def bus(per_node: int) -> Term:
    """Return the term for a node's GPU bus, which carries a tensor for each GPU but one.

    >>> bus(16)(4), bus(16)(64)
    (3.0, 15.0)
    """
    return lambda n: float(min(n, per_node) - 1)


def _dlperf() -> list[Row]:
    """Assume that NVLink inside a node is free; fit the network between nodes on 32 GPUs."""
    gpus = (1, 8, 16, 32)
    return [
        row
        for name, (batch, *x) in tables.DLPERF.items()
        for row in _series("DLPerf, V100, 100 Gb/s", name, batch, gpus, x, [between(8)], [32])
    ]


def _mxnet() -> list[Row]:
    """Fit the bus inside a node on one node, and the network between nodes on sixteen."""
    gpus = [2**i for i in range(9)]
    return [
        row
        for name, (batch, *x) in tables.MXNET.items()
        for row in _series("MXNet, K80", name, batch, gpus, x, [bus(16), between(16)], [16, 256])
    ]


def _dgx1() -> list[Row]:
    """Fit the bus of a single node on all eight GPUs."""
    return [
        row
        for name, (batch, *x) in tables.DGX1.items()
        for row in _series("TensorFlow, DGX-1", name, batch, (1, 2, 4, 8), x, [bus(8)], [8])
    ]


def _p2() -> list[Row]:
    """Fit the network between nodes on all eight nodes."""
    return [
        row
        for name, (batch, *x) in tables.P2.items()
        for row in _series(
            "TensorFlow, p2.8xlarge", name, batch, (1, 8, 16, 32, 64), x, [between(8)], [64]
        )
    ]


def _horovod() -> list[Row]:
    """Assume that only latency grows from 128 to 512 GPUs; NCCL's constants determine how much."""
    predictions = []
    for name, (nbytes, rate, few, many) in tables.HOROVOD.items():
        step = 64 / rate
        buffers = math.ceil(nbytes / tables.HOROVOD_FUSION)
        added = buffers * (_latency(512) - _latency(128))
        predicted = step / (step / few + added)
        table = "Horovod, RoCE"
        predictions += [
            Row(table, f"{name}, 128 GPUs", "efficiency", few, few, True),
            Row(table, f"{name}, 512 GPUs", "efficiency", many, predicted),
        ]
    return predictions


def _latency(n: int) -> float:
    """Return the latency of NCCL's ring over servers of four GPUs [s]."""
    network = 2 * (n // 4 - 1)
    pcie = 2 * (n - 1) - network
    return 1e-6 * tables.NCCL_PLATEAU * (network * tables.NCCL_NET + pcie * tables.NCCL_PCIE)


def _facebook() -> list[Row]:
    """Assume an all-reduce at wire speed; only its last bucket does not overlap with backward."""
    backward, step, nbytes = 0.120, 0.180, 100e6
    sync = float(cost.ring(32, nbytes, Link.of(0, 50e9 / 8)))
    predicted = step / (step + float(cost.exposed(sync, backward, buckets=nbytes / 25e6)))
    return [Row("Goyal et al.", "8 to 256 GPUs", "efficiency", tables.FACEBOOK, predicted)]
