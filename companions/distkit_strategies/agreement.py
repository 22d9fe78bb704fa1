"""What replicas tell each other before values travel, so that an error reaches all of them.

Before each collective of a strategy every replica shows where it is: in which ``run``, in which
call, with what shapes or how many rows. That is one small all-gather. If the numbers agree, the
values follow. If they do not, *every* replica knows it, before anybody waits for values that
will never come:

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
#: So many numbers each replica shows: its place, its call, how many facts, and the facts.
WIDTH = 16


class Agreement:
    """Where this replica is in a strategy's program, compared with the others."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
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

    def compare(self, call: str, facts: Sequence[int] = ()) -> list[list[int]]:
        """The facts of all replicas, by replica, once all are in this call.

        Args:
            call: one of :data:`CALLS`.
            facts: numbers that the others should know, at most ``WIDTH`` - 3.

        Raises:
            StrategyError: a replica has left the run, or is in another call.
        """
        while True:
            shown = self._show([self._place, CALLS.index(call), len(facts), *facts])
            places = [s[0] for s in shown]
            if len(set(places)) == 1:
                break
            self._catch_up(call, places)
        calls = [CALLS[s[1]] for s in shown]
        if len(set(calls)) > 1:
            where = ", ".join(f"replica {r} is in {c}" for r, c in enumerate(calls))
            raise StrategyError(
                f"The replicas are in different calls: {where}. All replicas must make the same "
                "calls in the same order: look for an `if` that depends on the replica."
            )
        return [s[3 : 3 + s[2]] for s in shown]

    def failures(self, call: str, error: Exception | None) -> list[str]:
        """What has kept replicas from completing a call, once all have tried.

        Args:
            call: one of :data:`CALLS`.
            error: of this replica; None for none.

        Raises:
            StrategyError: as :meth:`compare`.
        """
        mine = [] if error is None else [f"{type(error).__name__}: {error}"]
        if not any(n for (n,) in self.compare(call, [len(mine)])):
            return []
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, mine)
        return [f"replica {r}: {text}" for r, texts in enumerate(told) for text in texts]

    def _show(self, numbers: list[int]) -> list[list[int]]:
        row = torch.zeros(WIDTH, dtype=torch.int64)
        row[: len(numbers)] = torch.tensor(numbers)
        rows = [torch.empty_like(row, device=self.device) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row.to(self.device))
        found: list[list[int]] = torch.stack(rows).tolist()
        return found

    def _catch_up(self, call: str, places: list[int]) -> None:
        """Raise on the replicas that others have left behind; those come to this call again."""
        reasons: list[Any] = [None] * len(places)
        dist.all_gather_object(reasons, self._left)
        here = self._place
        if here == max(places):
            return
        self._place += self._place % 2  # out of the run, if it was in one
        gone = [f"replica {r}: {reasons[r]}" for r, p in enumerate(places) if p > here]
        raise StrategyError(
            f"This replica is in {call}, which others have left: {'; '.join(gone)}. The strategy "
            "can be used again on all replicas."
        )


def check_shapes(call: str, shapes: Sequence[Sequence[int]], axis: int | None = None) -> None:
    """Compare the shapes of all replicas, before their values travel.

    Args:
        call: for the message.
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
    for replica, other in enumerate(map(tuple, shapes)):
        if axis is not None and not -len(other) <= axis < len(other):
            raise StrategyError(
                f"{call} along dimension {axis}: the value of replica {replica} has shape "
                f"{other}, which has no such dimension. Reshape a scalar with .reshape(1)."
            )
        free = None if axis is None else axis % len(other)
        differ = [
            d for d, (a, b) in enumerate(zip(first, other, strict=False)) if a != b and d != free
        ]
        if len(first) != len(other) or differ:
            where = f"in dimension {differ[0]}" if differ else "in the number of dimensions"
            raise StrategyError(
                f"{call} of unequal shapes: replica 0 has {first} and replica {replica} has "
                f"{other}, which differ {where}. All replicas must give the same shape"
                + ("." if axis is None else f" but for dimension {axis}.")
            )
