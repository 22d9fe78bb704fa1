"""All-reduce microbenchmarks, from small to large messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from benchmarks.published import tables
from benchmarks.published.rows import Row, solve
from benchmarks.published.tables import GB, KB, MB
from distkit_simulation import cost
from distkit_simulation.network import Link

#: The terms of the time for K bytes in one regime: 1, K, and √K. The last term is for pipelined
#: chunks: the time with the best number of chunks is (√(latency) + √(K·beta))².
_TERMS: list[Callable[[float], float]] = [lambda k: 1.0, lambda k: k, math.sqrt]


def rows() -> list[Row]:
    """Return every row of the tables of collectives."""
    h200 = {k: 1e-3 * 2 * 7 / 8 * k / busbw for k, busbw in tables.H200.items()}  # µs
    return [
        *_regimes(
            "8 A100, nccl-tests",
            tables.A100,
            [[32 * KB, MB], [4 * MB, 8 * MB], [16 * MB, 64 * MB, 16 * GB]],
        ),
        *_regimes("8 H200, nccl-tests", h200, [[32 * KB, MB], [4 * MB, 64 * MB, 16 * GB]]),
        *_latency(),
        *_infiniband(),
        *_roce(),
    ]


def _regimes(table: str, times: Mapping[int, float], regimes: Sequence[Sequence[int]]) -> list[Row]:
    """Fit each protocol on its sizes, and predict up to the smallest size of the next one."""
    predictions = []
    ends = [*(sizes[0] for sizes in regimes[1:]), math.inf]
    for fit, end in zip(regimes, ends, strict=True):
        terms = _TERMS[: len(fit)]
        constants = solve([[f(k) for f in terms] for k in fit], [times[k] for k in fit])
        for k in (k for k in times if fit[0] <= k < end):
            predicted = sum(c * f(k) for c, f in zip(constants, terms, strict=True))
            predictions.append(Row(table, f"{k:,} bytes", "µs", times[k], predicted, k in fit))
    return predictions


def _latency() -> list[Row]:
    """Predict a ring's latency as a constant plus 2(nodes - 1) network hops."""
    nodes = list(tables.P3DN)
    base, hop = solve([[1, 2 * (m - 1)] for m in nodes[:2]], [tables.P3DN[m] for m in nodes[:2]])
    return [
        Row(
            "p3dn, 8 bytes",
            f"{m} nodes",
            "µs",
            tables.P3DN[m],
            base + float(cost.ring(m, 0, Link(hop, 0))),
            m in nodes[:2],
        )
        for m in nodes
    ]


def _infiniband() -> list[Row]:
    """Predict a ring over n workers, with alpha and beta fitted on eight workers."""
    a, b = tables.INFINIBAND[8]
    link = Link(a / cost.ring(8, 0, Link(1, 0)), b / cost.ring(8, 1, Link(0, 1)))
    predictions = []
    for n, (alpha, beta) in tables.INFINIBAND.items():
        start, large = cost.ring(n, 0, link), cost.ring(n, 1e9, link)
        slope = (large - start) / 1e9
        predictions += [
            Row("56 Gb/s InfiniBand, lines", f"latency, {n} workers", "s", alpha, start, n == 8),
            Row("56 Gb/s InfiniBand, lines", f"s/byte, {n} workers", "s", beta, slope, n == 8),
        ]
    return predictions


def _roce() -> list[Row]:
    """Assume that a ring saturates the NICs, and a tree has NCCL_TREE times this bandwidth."""
    bandwidth = 4 * 400 / 8
    predicted = {"ring": bandwidth, "tree": tables.NCCL_TREE * bandwidth}
    return [
        Row("40 H100, RoCE", name, "GB/s", busbw, predicted[name])
        for name, busbw in tables.ROCE.items()
    ]
