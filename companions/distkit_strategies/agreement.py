"""What replicas show each other before values travel, so that an error reaches all of them.

Before each collective of a strategy every replica shows where it is: in which ``run``, in which
call, with which shapes or how many rows. That takes one small all-gather. If the numbers agree,
the values follow. If they do not, *every* replica knows it before any of them waits for values
that never come:

* A replica whose function raised is ahead, in a later place. The others raise, too, name it, and
  are then where it is.
* Replicas in different calls, or with different shapes, all raise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from distkit.errors import StrategyError

#: The calls that move values, by their number in the agreement.
CALLS = (
    "scope all_gather(parameters) reduce_scatter(gradients) optimizer.step reduce gather all_reduce"
    " all_gather average_loss buffers checkpoint"
).split()
#: How many numbers each replica shows: its place, its call, how many facts, and the facts.
WIDTH = 16


class Agreement:
    """Where this replica is in a strategy's program, compared with the others."""

    def __init__(self) -> None:
        self._place = 0  # even: after a run; odd: inside one
        self._left = ""  # how it left its last run

    @contextmanager
    def inside_run(self) -> Iterator[None]:
        """One run of a replica function, which an exception may end early."""
        inside = self._place = self._place + 1
        left = "its function ended without this call"
        try:
            yield
        except Exception as error:
            left = f"its function raised {type(error).__name__}: {error}"
            raise
        finally:
            self._place, self._left = max(self._place, inside + 1), left

    def compare(self, call: str, facts: Sequence[int]) -> list[list[int]]:
        """The facts of all replicas, by replica, once all are in this call.

        Args:
            call: one of :data:`CALLS`.
            facts: numbers for the others, at most ``WIDTH`` - 3.

        Raises:
            StrategyError: a replica has left the run, or is in another call.
        """
        shown = _show([self._place, CALLS.index(call), len(facts), *facts])
        places = [s[0] for s in shown]
        if len({*places}) > 1:
            self._catch_up(call, places)
            return self.compare(call, facts)  # those that were behind come to this call, too
        calls = [CALLS[s[1]] for s in shown]
        if len({*calls}) > 1:
            where = ", ".join(f"replica {r} is in {c}" for r, c in enumerate(calls))
            raise StrategyError(
                f"The replicas are in different calls: {where}. All replicas must make the same "
                "calls in the same order: look for an `if` that depends on the replica."
            )
        return [s[3 : 3 + s[2]] for s in shown]

    def _catch_up(self, call: str, places: list[int]) -> None:
        """Raise on the replicas that others have left behind."""
        reasons, here = of_all(self._left), self._place
        if here == max(places):
            return
        self._place += self._place % 2  # out of the run, if it was in one
        gone = [f"replica {r}: {reasons[r]}" for r, p in enumerate(places) if p > here]
        raise StrategyError(
            f"This replica is in {call}, which others have left: {'; '.join(gone)}. The strategy "
            "can be used again on all replicas."
        )


def group_device() -> torch.device:
    """The device that the default process group sends from."""
    if dist.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def of_all(mine: Any) -> list[Any]:
    """An object of each rank, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _show(numbers: list[int]) -> list[list[int]]:
    row = torch.tensor(numbers + [0] * (WIDTH - len(numbers)), device=group_device())
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    shown: list[list[int]] = torch.stack(rows).tolist()
    return shown


def check_shapes(call: str, shapes: Sequence[Sequence[int]], axis: int | None = None) -> None:
    """Compare the shapes of all replicas, before their values travel.

    Args:
        call: named in the message.
        shapes: by replica.
        axis: a dimension that may differ; None for none.

    Raises:
        StrategyError: they differ otherwise, or have no such dimension.

    >>> check_shapes("gather", [(2, 3), (4, 3)], 0)
    >>> check_shapes("gather", [(2, 3), (2, 4)], 0)
    Traceback (most recent call last):
    ...
    distkit.errors.StrategyError: gather of unequal shapes: replica 0 has (2, 3) and replica 1
    has (2, 4), which differ in dimension 1. ...
    """
    first = tuple(shapes[0])
    for replica, shape in enumerate(map(tuple, shapes)):
        if axis is not None and not -len(shape) <= axis < len(shape):
            raise StrategyError(
                f"{call} along dimension {axis}: the value of replica {replica} has shape "
                f"{shape}, which has no such dimension. Reshape a scalar with .reshape(1)."
            )
        free = None if axis is None else axis % len(shape)
        pairs = enumerate(zip(first, shape, strict=False))
        differ = [f"dimension {d}" for d, (a, b) in pairs if a != b and d != free]
        if len(first) != len(shape) or differ:
            raise StrategyError(
                f"{call} of unequal shapes: replica 0 has {first} and replica {replica} has "
                f"{shape}, which differ in {[*differ, 'the number of dimensions'][0]}. All "
                "replicas must give the same shape"
                + ("." if axis is None else f" but for dimension {axis}.")
            )
