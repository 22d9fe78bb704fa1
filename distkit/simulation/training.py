"""Plays whole training steps: data parallel with overlapping buckets, and pipelines. Pure.

The parameter server is in :mod:`~distkit.simulation.serving`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from distkit.events import Op
from distkit.simulation.network import Floats, Network, a_network
from distkit.simulation.simulator import Delay, Player, Schedule, Stragglers, Writer, plan
from distkit.trace.trace import Trace


@dataclass(frozen=True)
class Workload:
    """The work of one rank in one step.

    Args:
        forward: seconds.
        backward: seconds.
        buckets: bytes of the gradients, in the order in which backward makes them, its time
            divided by their size; each is reduced as soon as it is there.
        update: seconds of the optimizer's update.

    Raises:
        ValueError: something is negative.
    """

    forward: float
    backward: float
    buckets: Sequence[int]
    update: float = 0.0

    def __post_init__(self) -> None:
        numbers = [self.forward, self.backward, self.update, *self.buckets]
        if not all(x >= 0 for x in numbers):
            raise ValueError(f"a step of {numbers}: give seconds and bytes that are not negative")

    @classmethod
    def even(cls, compute: float, nbytes: int, buckets: int) -> Workload:
        """A third of the time forward, two thirds backward, in equal buckets of floats.

        >>> Workload.even(0.3, 4000, 4).buckets
        (1000, 1000, 1000, 1000)
        """
        size = round(nbytes / buckets / 4) * 4
        return cls(compute / 3, compute * 2 / 3, (size,) * buckets)

    @property
    def ready(self) -> Floats:
        """The time when each bucket is ready, after backward's begin [s], shape (buckets,)."""
        share = np.cumsum(np.asarray(self.buckets, float))
        return self.backward * (share / share[-1] if len(share) and share[-1] else share)


@dataclass(frozen=True)
class Step:
    """The times of one step, by rank [s]; ``reduced`` has a row for each bucket."""

    begin: Floats
    forward: Floats
    backward: Floats
    ready: Floats  # (buckets, n)
    reduced: Floats  # (buckets, n)
    end: Floats


def steps(
    n: int,
    work: Workload,
    network: Network,
    *,
    algorithm: Schedule = "ring",
    count: int = 1,
    delay: Delay | None = None,
    stragglers: Stragglers | None = None,
    seed: int = 0,
) -> Iterator[Step]:
    """Play ``count`` steps of synchronous data-parallel training; see :func:`data_parallel`."""
    player = Player(n, network, stragglers=stragglers, seed=seed)
    rng, slow = np.random.default_rng([seed, 1]), (stragglers or Stragglers()).factors(n)
    clock = np.zeros(n)
    for _ in range(count):
        late = delay(rng, (n,)) if delay else np.zeros(n)
        forward = clock + slow * work.forward + late
        ready = forward + slow * work.ready[:, None]
        backward = forward + slow * work.backward
        reduced = []
        for nbytes, at in zip(work.buckets, ready, strict=True):
            player.begin(at, nbytes)  # or after the bucket before it
            for _ in player.play(*plan(algorithm, n, nbytes, 4, None)[1:]):
                pass
            reduced.append(player.finish)
        last = np.maximum(backward, reduced[-1]) if reduced else backward
        end = last + slow * work.update
        yield Step(clock, forward, backward, ready, np.array(reduced), end)
        clock = end


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
    """The trace of synchronous data-parallel training, as DDP leaves it.

    Args:
        n: number of ranks.
        work: what each does in a step.
        network: what connects them.
        algorithm: of the all-reduce.
        count: number of steps.
        delay: what each rank's computation lasts longer, drawn anew for each step.
        stragglers: slow ranks, jitter of messages, failures.
        seed: of all draws.

    Example:
        >>> from distkit.simulation.network import Link
        >>> net = Network(Link(1e-6, 1e-9))
        >>> data_parallel(2, Workload.even(0.3, 4000, 2), net).ranks
        [0, 1]
    """
    writer = Writer(n, (stragglers or Stragglers()).deaths(n))
    played = steps(
        n,
        work,
        network,
        algorithm=algorithm,
        count=count,
        delay=delay,
        stragglers=stragglers,
        seed=seed,
    )
    for step in played:
        for r in range(n):
            writer.operation(
                Op.MARK, r, step.begin[r], step.forward[r], attributes={"label": "forward"}
            )
            writer.operation(
                Op.MARK, r, step.forward[r], step.backward[r], attributes={"label": "backward"}
            )
            for i, nbytes in enumerate(work.buckets):
                writer.operation(
                    Op.ALL_REDUCE,
                    r,
                    step.ready[i, r],
                    step.reduced[i, r],
                    nbytes=nbytes,
                    shape=(nbytes // 4,),
                    dtype="float32",
                    attributes={"gradients": True},
                )
            if work.update:
                begin = step.end[r] - work.update
                writer.operation(Op.MARK, r, begin, step.end[r], attributes={"label": "update"})
    return writer.trace("data parallel, simulated")


def gpipe(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """All micro-batches forward, then all backward. Huang et al., 2019.

    >>> gpipe(0, 2, 2)
    [('F', 0), ('F', 1), ('B', 0), ('B', 1)]
    """
    every = range(microbatches)
    return [("F", i) for i in every] + [("B", i) for i in every]


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """Run backward as early as possible: as many micro-batches are held as there are stages.

    Narayanan et al., 2019 (PipeDream-flush).

    >>> one_f_one_b(0, 2, 3)
    [('F', 0), ('F', 1), ('B', 0), ('F', 2), ('B', 1), ('B', 2)]
    """
    ahead = min(stages - stage - 1, microbatches)
    order = [("F", i) for i in range(ahead)]
    for i in range(microbatches - ahead):
        order += [("F", ahead + i), ("B", i)]
    return order + [("B", i) for i in range(microbatches - ahead, microbatches)]


ORDERS = {"gpipe": gpipe, "1f1b": one_f_one_b}


def pipeline(
    stages: int,
    microbatches: int,
    forward: float,
    backward: float,
    nbytes: int,
    network: Network,
    *,
    order: str = "1f1b",
    stragglers: Stragglers | None = None,
) -> Trace:
    """The trace of one step of a pipeline; messages overlap computation.

    With free messages it takes (microbatches + stages - 1)(forward + backward) in either order;
    (stages - 1)/(microbatches + stages - 1) of that is the bubble.

    Args:
        stages: number of ranks, one stage on each.
        microbatches: of one step.
        forward: seconds of one micro-batch on one stage.
        backward: likewise.
        nbytes: activations between two stages, and as many gradients back [bytes].
        network: what connects the stages.
        order: "gpipe" or "1f1b".
        stragglers: slow ranks.

    Example:
        >>> from distkit.simulation.network import Link
        >>> round(pipeline(4, 8, 1.0, 2.0, 0, Network(Link(0, 0))).seconds)
        33
    """
    if order not in ORDERS or microbatches < 1:
        raise ValueError(
            f"order {order!r} of {microbatches} micro-batches: give one of {', '.join(ORDERS)}, "
            "and at least one micro-batch"
        )
    a_network(network, stages)
    slow = (stragglers or Stragglers()).factors(stages)
    seconds = {"F": forward * slow, "B": backward * slow}
    todo = [ORDERS[order](s, stages, microbatches) for s in range(stages)]
    clock, writer = [0.0] * stages, Writer(stages)
    arrived: dict[tuple[str, int, int], float] = {}
    while any(todo):
        for s in range(stages):
            while todo[s] and (at := _input(*todo[s][0], s, stages, arrived)) is not None:
                what, i = todo[s].pop(0)
                clock[s] = _compute(writer, what, i, s, clock[s], at, seconds[what][s], nbytes)
                onward = s + (1 if what == "F" else -1)
                if 0 <= onward < stages:
                    took = float(network.seconds([s], [onward], [nbytes])[0])
                    arrived[what, i, onward] = end = clock[s] + took
                    told = writer.message(onward, nbytes)
                    writer.operation(Op.SEND, s, clock[s], end, **told)
                elif what == "F":
                    arrived["B", i, s] = clock[s]
    return writer.trace(f"pipeline ({order}), simulated")


def _input(
    what: str, i: int, stage: int, stages: int, arrived: dict[tuple[str, int, int], float]
) -> float | None:
    """The time when the input of a computation is there, None if not known yet."""
    return 0.0 if (what, stage) == ("F", 0) else arrived.get((what, i, stage))


def _compute(
    writer: Writer,
    what: str,
    i: int,
    stage: int,
    clock: float,
    at: float,
    took: float,
    nbytes: int,
) -> float:
    """Receive, wait, compute; the end of it."""
    begin = max(clock, at)
    source = stage - 1 if what == "F" else stage + 1
    last = writer.n - 1
    if (what, stage) not in (("F", 0), ("B", last)):
        writer.operation(Op.RECV, stage, clock, begin, **writer.message(source, nbytes))
    writer.operation(Op.MARK, stage, begin, begin + took, attributes={"label": f"{what}{i}"})
    return begin + took
