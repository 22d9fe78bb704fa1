"""Simulate pipelines. No side effects."""

from __future__ import annotations

import numpy as np

from distkit.events import Op
from distkit.trace.trace import Trace
from distkit_parallel.schedules import PIPELINES, Action, Orders, execution_order
from distkit_simulation.network import Network, check_network
from distkit_simulation.simulator import Stragglers, Writer


def pipeline(
    ranks: int,
    microbatches: int,
    forward: float,
    backward: float,
    nbytes: int,
    network: Network,
    *,
    order: str | Orders = "1f1b",
    chunks: int = 1,
    weights: float | None = None,
    overlap: bool = True,
    stragglers: Stragglers | None = None,
) -> Trace:
    """Simulate one step of a pipeline and return the trace, which ends with a barrier.

    If messages take no time, GPipe and 1F1B need (microbatches + ranks - 1)(forward + backward).
    The bubble is (ranks - 1)/(microbatches + ranks - 1) of this time.

    Args:
        ranks: the number of ranks.
        microbatches: the number of micro-batches in a step.
        forward: the time of a micro-batch's forward pass on one rank [s], for all its stages.
        backward: the time of a micro-batch's backward pass on one rank [s], including the
            gradients of inputs and weights.
        nbytes: the size of the activations that a stage sends, and of their gradients [bytes].
        network: the network that connects the ranks.
        order: the name of a schedule in ``dk.algorithms.PIPELINES``, or the actions of each rank.
        chunks: the number of stages on each rank, if the schedule has several.
        weights: the part of ``backward`` for weight gradients [s], which zero-bubble schedules
            compute separately; half of ``backward`` by default.
        overlap: whether a rank computes while it is sending.
        stragglers: ranks whose computation is slower; jitter is ignored.

    Raises:
        ValueError: the schedule is unknown, does not fit these numbers, or deadlocks.

    Example:
        >>> from distkit_simulation.network import Link
        >>> round(pipeline(4, 8, 1.0, 2.0, 0, Network(Link(0, 0))).seconds)
        33
    """
    check_network(network, ranks)
    writer, orders = Writer(ranks), _orders(order, ranks, microbatches, chunks)
    ends = simulate_pipeline(
        writer,
        orders,
        forward,
        backward,
        nbytes,
        network,
        chunks=chunks,
        weights=weights,
        overlap=overlap,
        stragglers=stragglers,
    )
    writer.add_operations(Op.BARRIER, np.array(ends), np.full(ranks, max(ends)))
    return writer.trace(f"pipeline ({order if isinstance(order, str) else 'custom'})")


def simulate_pipeline(
    writer: Writer,
    orders: Orders,
    forward: float,
    backward: float,
    nbytes: int,
    network: Network,
    *,
    chunks: int = 1,
    weights: float | None = None,
    overlap: bool = True,
    stragglers: Stragglers | None = None,
) -> list[float]:
    """Add the actions of a pipeline to ``writer``; return the end time of each rank [s]."""
    ranks = len(orders)
    weights = backward / 2 if weights is None else weights
    seconds = {"F": forward, "B": backward, "I": backward - weights, "W": weights}
    stages, slow = ranks * chunks, (stragglers or Stragglers()).factors(ranks).tolist()
    clock = [0.0] * ranks
    arrivals: dict[Action, float] = {}  # arrival time of each action's result at its receiver
    for rank, action in execution_order(orders):
        needed, begin = action.needs(stages), clock[rank]
        if needed in arrivals and needed.stage % ranks != rank:
            begin = max(begin, arrivals[needed])
            received = writer.message_fields(needed.stage % ranks, nbytes)
            writer.add_operation(Op.RECV, rank, clock[rank], begin, **received)
        clock[rank] = end = begin + seconds[action.kind] / chunks * slow[rank]
        label = {"label": str(action) if chunks > 1 else f"{action.kind}{action.microbatch}"}
        writer.add_operation(Op.MARK, rank, begin, end, attributes=label)
        if (target := action.receiving_stage(stages)) is not None and target % ranks != rank:
            duration = float(network.seconds([rank], [target % ranks], [nbytes])[0])
            arrivals[action] = end + duration
            writer.add_operation(
                Op.SEND, rank, end, end + duration, **writer.message_fields(target % ranks, nbytes)
            )
            clock[rank] = end if overlap else end + duration
    return clock


def _orders(order: str | Orders, ranks: int, microbatches: int, chunks: int) -> Orders:
    """Return the actions of each rank."""
    if isinstance(order, str) and order not in PIPELINES:
        raise ValueError(f"unknown order {order!r}: use one of {', '.join(PIPELINES)}")
    return PIPELINES[order].orders(ranks, microbatches, chunks) if isinstance(order, str) else order
