"""Simulation of data-parallel training with overlapping buckets, and of pipelines. Pure.

:mod:`~distkit_simulation.parameter_servers` simulates parameter servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distkit.algorithms.catalogue import PIPELINES
from distkit.algorithms.pipeline_schedules import Action, Orders, played
from distkit.events import Op
from distkit.trace.trace import Trace
from distkit_simulation.network import Floats, Network, check_network
from distkit_simulation.simulator import Delay, RankClocks, Schedule, Stragglers, Writer, plan


@dataclass(frozen=True)
class Workload:
    """The work of one rank in one step.

    Args:
        forward: the seconds of forward.
        backward: the seconds of backward.
        buckets: the sizes of the gradient buckets [bytes], in the order of backward. They share its
            time in proportion to size; each is reduced as soon as it is ready.
        update: the seconds of the optimizer's update.

    Raises:
        ValueError: a number is negative.
    """

    forward: float
    backward: float
    buckets: Sequence[int]
    update: float = 0.0

    def __post_init__(self) -> None:
        numbers = [self.forward, self.backward, self.update, *self.buckets]
        if not all(x >= 0 for x in numbers):
            raise ValueError(f"seconds and bytes of a step must not be negative; got {numbers}")

    @property
    def ready(self) -> Floats:
        """The seconds from the start of backward until each bucket is ready, shape (buckets,)."""
        share = np.cumsum(np.asarray(self.buckets, float))
        return self.backward * (share / share[-1] if len(share) and share[-1] else share)


def data_parallel(
    n: int,
    work: Workload,
    network: Network,
    *,
    algorithm: Schedule = "ring",
    count: int = 1,
    delay: Delay | None = None,
    stragglers: Stragglers | None = None,
    seed: int = 0,
) -> Trace:
    """Simulate synchronous data-parallel training, and return the trace that DDP would record.

    Args:
        n: the number of ranks.
        work: the work of each rank in a step.
        network: the network of the ranks.
        algorithm: the algorithm of the all-reduce.
        count: the number of steps.
        delay: the random delay of each rank's computation in each step.
        stragglers: slow ranks and jitter of messages.
        seed: the seed of all random draws.

    Example:
        >>> from distkit_simulation.network import Link
        >>> net = Network(Link(1e-6, 1e-9))
        >>> data_parallel(2, Workload(0.1, 0.2, [2000, 2000]), net).ranks
        [0, 1]
    """
    faults = stragglers or Stragglers()
    player, writer = RankClocks(n, network, stragglers=faults, seed=seed), Writer(n)
    rng, slow = np.random.default_rng([seed, 1]), faults.factors(n)
    clock = np.zeros(n)
    for _ in range(count):
        lateness = delay(rng, (n,)) if delay else np.zeros(n)
        forward = clock + slow * work.forward + lateness
        last = backward = forward + slow * work.backward
        writer.add_operations(Op.MARK, clock, forward, attributes={"label": "forward"})
        writer.add_operations(Op.MARK, forward, backward, attributes={"label": "backward"})
        for nbytes, ready in zip(work.buckets, work.ready, strict=True):
            start = forward + slow * ready
            player.begin(start, nbytes)  # or after the previous bucket
            for _ in player.play(*plan(algorithm, n, nbytes)[1:]):
                pass
            fields = {"dtype": "float32", "attributes": {"gradients": True}}
            shape = (nbytes // 4,)
            writer.add_operations(
                Op.ALL_REDUCE, start, player.finish, nbytes=nbytes, shape=shape, **fields
            )
            last = np.maximum(backward, player.finish)
        clock = last + slow * work.update
        if work.update:
            writer.add_operations(Op.MARK, last, clock, attributes={"label": "update"})
    return writer.trace("data parallel")


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
    """Simulate one step of a pipeline, and return its trace.

    With free messages, GPipe and 1F1B need (microbatches + ranks - 1)(forward + backward). The
    bubble is (ranks - 1)/(microbatches + ranks - 1) of this time.

    Args:
        ranks: the number of ranks.
        microbatches: the number of micro-batches in a step.
        forward: the seconds of a micro-batch's forward on one rank, for all its stages.
        backward: the seconds of its backward, with gradients of inputs and weights.
        nbytes: the size of the activations between two stages, and of their gradients [bytes].
        network: the network of the ranks.
        order: the name of a schedule in ``dk.algorithms.PIPELINES``, or the actions of each rank.
        chunks: the number of stages on each rank, if the schedule has several.
        weights: the part of ``backward`` for gradients of weights [s], which zero-bubble schedules
            separate; half of ``backward`` by default.
        overlap: whether a rank computes while it sends.
        stragglers: slow ranks.

    Raises:
        ValueError: the schedule is unknown, does not fit these numbers, or deadlocks.

    Example:
        >>> from distkit_simulation.network import Link
        >>> round(pipeline(4, 8, 1.0, 2.0, 0, Network(Link(0, 0))).seconds)
        33
    """
    check_network(network, ranks)
    writer, orders = Writer(ranks), _orders(order, ranks, microbatches, chunks)
    play_pipeline(
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
    return writer.trace(f"pipeline ({order if isinstance(order, str) else 'own'})")


def play_pipeline(
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
    """Add the actions of a pipeline, as in :func:`pipeline`; return each rank's end time [s]."""
    ranks = len(orders)
    weights = backward / 2 if weights is None else weights
    seconds = {"F": forward, "B": backward, "I": backward - weights, "W": weights}
    stages, slow = ranks * chunks, (stragglers or Stragglers()).factors(ranks).tolist()
    clock = [0.0] * ranks
    arrived: dict[Action, float] = {}  # arrival time of each action's result at the next rank
    for rank, action in played(orders):
        needed, begin = action.needs(stages), clock[rank]
        if needed in arrived and needed.stage % ranks != rank:
            begin = max(begin, arrived[needed])
            received = writer.message_fields(needed.stage % ranks, nbytes)
            writer.add_operation(Op.RECV, rank, clock[rank], begin, **received)
        clock[rank] = end = begin + seconds[action.kind] / chunks * slow[rank]
        label = str(action) if chunks > 1 else f"{action.kind}{action.microbatch}"
        writer.add_operation(Op.MARK, rank, begin, end, attributes={"label": label})
        target = action.next(stages)
        if target is not None and target % ranks != rank:
            duration = float(network.seconds([rank], [target % ranks], [nbytes])[0])
            arrived[action] = end + duration
            writer.add_operation(
                Op.SEND, rank, end, end + duration, **writer.message_fields(target % ranks, nbytes)
            )
            clock[rank] = end if overlap else end + duration
    return clock


def _orders(order: str | Orders, ranks: int, microbatches: int, chunks: int) -> Orders:
    """Return the actions of each rank."""
    if not isinstance(order, str):
        return order
    if order not in PIPELINES:
        raise ValueError(f"unknown order {order!r}: use one of {', '.join(PIPELINES)}")
    return PIPELINES[order].orders(ranks, microbatches, chunks)
