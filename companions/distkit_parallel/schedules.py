"""Pipeline schedules as data: the actions of each rank in order. No side effects.

A model of p·v stages runs on p ranks, stage s on rank s mod p; a batch is split into m
micro-batches. Each rank has a list of actions, which :mod:`~distkit_parallel.pipeline` executes
and :func:`~distkit_simulation.training.pipeline` simulates. If ``torch.distributed.pipelining`` has
the same schedule, the lists match its order. All schedules except GPipe follow one pattern::

    F F F   F B F B F B   B B B
    warm-up one each      drain

A rank farther from the last stage has a longer warm-up. The idle time is called the *bubble*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, zip_longest
from typing import NamedTuple

from distkit.algorithms.catalog import Catalog, CatalogEntry


class Action(NamedTuple):
    """The computation of a stage on one micro-batch, printed as in torch.

    Args:
        stage: counted from 0; stage 0 receives the inputs.
        kind: "F" for forward and "B" for backward. Backward may be split into "I", the gradient of
            the input, and "W", the gradient of the weights, which no other rank waits for.
        microbatch: counted from 0.

    Example:
        >>> Action(1, "F", 0)
        1F0
    """

    stage: int
    kind: str
    microbatch: int

    def __repr__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    def needs(self, stages: int) -> Action | None:
        """Return the action that this action depends on, or None for a forward on stage 0.

        >>> Action(1, "F", 0).needs(stages=2), Action(1, "B", 0).needs(stages=2)
        (0F0, 1F0)
        """
        stage, kind, microbatch = self
        if kind == "F":
            return Action(stage - 1, "F", microbatch) if stage else None
        if kind == "W":
            return Action(stage, "I", microbatch)
        last = stage == stages - 1
        return Action(stage, "F", microbatch) if last else Action(stage + 1, kind, microbatch)

    def receiving_stage(self, stages: int) -> int | None:
        """Return the stage that receives the result; None at both ends and for weight gradients.

        >>> Action(1, "F", 0).receiving_stage(2), Action(1, "B", 0).receiving_stage(2)
        (None, 0)
        """
        stage = self.stage + {"F": 1, "B": -1, "I": -1, "W": stages}[self.kind]
        return stage if 0 <= stage < stages else None


Orders = list[list[Action]]


def gpipe(ranks: int, microbatches: int) -> Orders:
    """Run all micro-batches forward, then all backward. Huang et al., 2019.

    >>> gpipe(2, 2)[0]
    [0F0, 0F1, 0B0, 0B1]
    """
    return _orders(ranks, microbatches, 1, lambda rank: microbatches)


def one_f_one_b(ranks: int, microbatches: int) -> Orders:
    """Run backward as early as possible, so that a rank stores at most p - rank micro-batches.

    Harlap et al., 2018; Narayanan et al., 2021.

    >>> one_f_one_b(2, 3)
    [[0F0, 0F1, 0B0, 0F2, 0B1, 0B2], [1F0, 1B0, 1F1, 1B1, 1F2, 1B2]]
    """
    return _orders(ranks, microbatches, 1, lambda rank: ranks - 1 - rank)


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Orders:
    """Run 1F1B with v stages per rank: 1/v of the bubble, v times the messages.

    Groups of about p micro-batches alternate between a rank's stages. Narayanan et al., 2021.

    Raises:
        ValueError: The micro-batches cannot be divided into groups of equal size.

    >>> interleaved(2, 2)[1]
    [1F0, 1F1, 3F0, 3B0, 3F1, 3B1, 1B0, 1B1]
    """
    return _orders(
        ranks,
        microbatches,
        chunks,
        lambda rank: (chunks - 1) * _group_size(ranks, microbatches) + 2 * (ranks - 1 - rank),
    )


def zero_bubble(ranks: int, microbatches: int, chunks: int = 1) -> Orders:
    """Run ZB-H1, which delays weight gradients until the rank would be idle.

    With one chunk, no rank stores more micro-batches than rank 0 in 1F1B; with more chunks, this is
    torch's InterleavedZeroBubble. Qi et al., 2024.

    Raises:
        ValueError: The micro-batches cannot be divided into groups of equal size.

    >>> zero_bubble(2, 2)
    [[0F0, 0F1, 0I0, 0W0, 0I1, 0W1], [1F0, 1I0, 1F1, 1I1, 1W0, 1W1]]
    """
    return _orders(
        ranks,
        microbatches,
        chunks,
        lambda rank: (chunks - 1) * _group_size(ranks, microbatches) + ranks - 1 - rank,
        split=True,
    )


def zero_bubble_h2(ranks: int, microbatches: int) -> Orders:
    """Run ZB-H2: longer warm-up and later weight gradients, so that no rank waits.

    A rank starts its next step as soon as it has finished the current one, without waiting for the
    last rank's update. Qi et al., 2024, find such an order by search and call it ZB-2P.

    >>> zero_bubble_h2(2, 3)
    [[0F0, 0F1, 0F2, 0I0, 0W0, 0I1, 0W1, 0I2, 0W2], [1F0, 1I0, 1F1, 1I1, 1F2, 1I2, 1W0, 1W1, 1W2]]
    """
    return _orders(ranks, microbatches, 1, lambda rank: 2 * (ranks - 1 - rank), split=True, delay=2)


def _orders(
    ranks: int,
    microbatches: int,
    chunks: int,
    warm_up: Callable[[int], int],
    *,
    split: bool = False,
    delay: int = 1,
) -> Orders:
    if min(ranks, microbatches, chunks) < 1:
        raise ValueError(
            "a pipeline needs at least one rank, one stage per rank and one micro-batch; got "
            f"ranks={ranks}, chunks={chunks} and microbatches={microbatches}"
        )
    order = list(_forward_order(ranks, microbatches, chunks))
    return [_order(rank, ranks, order, warm_up(rank), split, delay * rank) for rank in range(ranks)]


def _group_size(ranks: int, microbatches: int) -> int:
    """Return the number of micro-batches that a stage runs before the rank's next stage."""
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds:
        raise ValueError(
            f"{microbatches} micro-batches on {ranks} ranks would form {rounds} groups of "
            f"different sizes: use a multiple of {rounds}, ideally of {ranks}"
        )
    return microbatches // rounds


def _forward_order(ranks: int, microbatches: int, chunks: int) -> Iterator[tuple[int, int]]:
    """Yield the chunk and the micro-batch of each forward, in execution order."""
    size = microbatches if chunks == 1 else _group_size(ranks, microbatches)
    for first in range(0, microbatches, size):
        for chunk in range(chunks):
            yield from ((chunk, i) for i in range(first, first + size))


def _order(
    rank: int,
    ranks: int,
    forwards: Sequence[tuple[int, int]],
    warm_up: int,
    split: bool,
    delay: int,
) -> list[Action]:
    """Return warm-up forwards, alternating forwards and backwards, and the remaining backwards.

    Each weight gradient follows ``delay`` backwards later.
    """
    last = forwards[-1][0]
    forward = [Action(chunk * ranks + rank, "F", i) for chunk, i in forwards]
    backward = [Action((last - chunk) * ranks + rank, "BI"[split], i) for chunk, i in forwards]
    weights = [action._replace(kind="W") for action in backward] if split else []
    order = forward[:warm_up]
    for n, pair in enumerate(zip_longest(forward[warm_up:], backward)):
        order += [action for action in pair if action]
        order += weights[n - delay : n - delay + 1] if n >= delay else []
    return order + weights[max(0, len(backward) - delay) :]


# -- evaluation of schedules -----------------------------------------------------------


def execution_order(orders: Orders) -> Iterator[tuple[int, Action]]:
    """Yield every action with its rank, each after its dependencies.

    Raises:
        ValueError: Ranks wait for each other, or for an action that is not in any list.

    Example:
        >>> [action for _, action in execution_order(gpipe(2, 1))]
        [0F0, 1F0, 1B0, 0B0]
    """
    stages = 1 + max(action.stage for order in orders for action in order)
    completed: set[Action | None] = {None}
    remaining = [list(reversed(order)) for order in orders]
    while any(remaining):
        num_before = len(completed)
        for rank, order in enumerate(remaining):
            while order and order[-1].needs(stages) in completed:
                completed.add(action := order.pop())
                yield rank, action
        if len(completed) == num_before:
            stuck = {
                rank: f"{order[-1]} (needs {order[-1].needs(stages)})"
                for rank, order in enumerate(remaining)
                if order
            }
            raise ValueError(
                "this schedule never ends: "
                + ", ".join(f"rank {rank} is stuck at {action}" for rank, action in stuck.items())
            )


def peak_activations(orders: Orders) -> list[int]:
    """Return each rank's peak number of activations, in micro-batches of one stage.

    Activations exist from F to B, or to W if backward is split.

    >>> peak_activations(gpipe(4, 8)), peak_activations(one_f_one_b(4, 8))
    ([8, 8, 8, 8], [4, 3, 2, 1])
    """
    return [max(accumulate((a.kind == "F") - (a.kind in "BW") for a in order)) for order in orders]


@dataclass(frozen=True, repr=False)
class PipelineSchedule(CatalogEntry):
    """A schedule for a pipeline of p ranks with m micro-batches and v stages per rank.

    Args:
        schedule: returns the actions of each rank for p, m, and v if it is looped.
        bubble_ratio: returns idle time over compute time for p, m and v, if messages are free and
            backward takes twice as long as forward.
        looped: whether a rank may have several stages.

    Example:
        >>> a = PIPELINES["1f1b"]
        >>> a.bubble_ratio(4, 8), a.bubble_fraction(4, 8), a.activations(0, 4, 8)
        (0.375, 0.2727272727272727, 4)
    """

    schedule: Callable[..., Orders]
    bubble_ratio: Callable[..., float]
    looped: bool = False

    def check(self, ranks: int, microbatches: int, chunks: int = 1) -> None:
        """Check that the schedule supports these numbers.

        Raises:
            ValueError: The schedule does not support them.
        """
        if self.looped:
            _group_size(ranks, microbatches)
        elif chunks != 1:
            raise ValueError(
                f"{self.title} has one stage per rank, not {chunks}: use interleaved or zero_bubble"
            )

    def orders(self, ranks: int, microbatches: int, chunks: int = 1) -> Orders:
        """Return the actions of each rank.

        Raises:
            ValueError: The schedule does not support these numbers.
        """
        self.check(ranks, microbatches, chunks)
        return self.schedule(ranks, microbatches, *([chunks] if self.looped else []))

    def bubble_fraction(self, ranks: int, microbatches: int, chunks: int = 1) -> float:
        """Return the fraction of a step during which a rank is idle."""
        bubble = self.bubble_ratio(ranks, microbatches, chunks)
        return bubble / (1 + bubble)

    def activations(self, rank: int, ranks: int, microbatches: int, chunks: int = 1) -> int:
        """Return the peak number of micro-batches that a rank stores."""
        return _peak_activations(self, ranks, microbatches, chunks)[rank]


@cache  # Job calls this for every rank
def _peak_activations(
    schedule: PipelineSchedule, ranks: int, microbatches: int, chunks: int
) -> list[int]:
    return peak_activations(schedule.orders(ranks, microbatches, chunks))


def _bubble(ranks: int, microbatches: int, chunks: int = 1) -> float:
    """Return (p-1)/(m·v)."""
    return (ranks - 1) / (microbatches * chunks)


def _interleaved_bubble(ranks: int, microbatches: int, chunks: int = 2) -> float:
    """Return (p-1)/(m·v), or more if m < p: a rank then also waits before each later stage."""
    return (ranks - 1 + (chunks - 1) * max(0, ranks - microbatches)) / (microbatches * chunks)


def _zero_bubble(ranks: int, microbatches: int, chunks: int = 1) -> float:
    """Return (p-1)/(3·m·v), or more if m < p: weight gradients then cannot fill the bubble."""
    late = max(0, ranks - microbatches)
    extra = late + (chunks - 1) * max(late, 2 * late - microbatches)
    return (ranks - 1 + extra) / (3 * microbatches * chunks)


#: All schedules, by year of publication.
_SCHEDULES = (
    PipelineSchedule(
        "gpipe",
        "GPipe",
        "all micro-batches forward, then all backward",
        "Huang et al., 2019",
        "bubble (p-1)/m of the work, m micro-batches stored",
        gpipe,
        _bubble,
    ),
    PipelineSchedule(
        "1f1b",
        "1F1B",
        "forward and backward alternate, each as early as possible",
        "Harlap et al., 2018; Narayanan et al., 2021",
        "bubble (p-1)/m of the work, p micro-batches stored",
        one_f_one_b,
        _bubble,
    ),
    PipelineSchedule(
        "interleaved",
        "Interleaved 1F1B",
        "1F1B with v stages per rank, which alternate after several micro-batches",
        "Narayanan et al., 2021",
        "bubble (p-1)/(mv) of the work, v times the messages",
        interleaved,
        _interleaved_bubble,
        looped=True,
    ),
    PipelineSchedule(
        "zero_bubble",
        "Zero bubble, ZB-H1",
        "1F1B that computes weight gradients in idle time",
        "Qi et al., 2024",
        "bubble (p-1)/(3m) of the work, p micro-batches stored",
        zero_bubble,
        _zero_bubble,
        looped=True,
    ),
    PipelineSchedule(
        "zero_bubble_h2",
        "Zero bubble, ZB-H2",
        "ZB-H1 with a longer warm-up, so that no rank waits within a step",
        "Qi et al., 2024",
        "no bubble if 2p-1 or more micro-batches are stored",
        zero_bubble_h2,
        lambda ranks, microbatches, chunks=1: (
            max(0, 2 * ranks - 1 - microbatches) / (3 * microbatches)
        ),
    ),
)

#: All schedules by name.
PIPELINES = Catalog({schedule.name: schedule for schedule in _SCHEDULES})
