"""Consistency checks before each collective, so that an error on one replica is raised on all.

Before each collective of a strategy, one small all-gather exchanges the replicas' positions (the
``run`` and the call), and their shapes or numbers of rows. If they agree, the values are sent.
Otherwise, no replica waits for values that are never sent:

* A replica that has left the run, for example because its function raised, is ahead. The others
  raise an error with that replica's number, and catch up.
* Replicas in different calls, or with different shapes, all raise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from distkit.errors import StrategyError

#: The calls that send values; their indices are compared.
CALLS = (
    "scope all_gather(parameters) reduce_scatter(gradients) optimizer.step reduce gather all_reduce"
    " all_gather average_loss buffers checkpoint"
).split()
#: Length of the row that each replica sends: position, call, number of values, and the values.
WIDTH = 16


class Agreement:
    """The position of this replica in a strategy's program, compared with the others."""

    def __init__(self) -> None:
        self._position = 0  # even: outside a run; odd: inside a run
        self._exit_reason = ""  # why the last run ended

    @contextmanager
    def inside_run(self) -> Iterator[None]:
        """Track one run of a replica function, and record why it ended."""
        start = self._position = self._position + 1
        reason = "returned without making this call"
        try:
            yield
        except Exception as error:
            reason = f"raised {type(error).__name__}: {error}"
            raise
        finally:
            self._position, self._exit_reason = max(self._position, start + 1), reason

    def compare(self, call: str, values: Sequence[int]) -> list[list[int]]:
        """Exchange values with all replicas once all have reached this call.

        Args:
            call: one of :data:`CALLS`.
            values: at most ``WIDTH - 3`` integers to exchange.

        Raises:
            StrategyError: a replica has left the run, or is in a different call.
        """
        gathered = _all_gather_row([self._position, CALLS.index(call), len(values), *values])
        positions = [s[0] for s in gathered]
        if len({*positions}) > 1:
            self._catch_up(call, positions)
            return self.compare(call, values)  # replicas that were behind will also reach this call
        calls = [CALLS[s[1]] for s in gathered]
        if len({*calls}) > 1:
            locations = ", ".join(f"replica {r} is in {c}" for r, c in enumerate(calls))
            raise StrategyError(
                f"The replicas are in different calls: {locations}. All replicas must make the "
                "same calls in the same order. Look for an `if` that depends on the replica."
            )
        return [s[3 : 3 + s[2]] for s in gathered]

    def _catch_up(self, call: str, positions: list[int]) -> None:
        """Raise StrategyError if this replica is behind another one."""
        reasons, position = all_gather_object(self._exit_reason), self._position
        if position == max(positions):
            return
        self._position += self._position % 2  # leave the run, if inside one
        ahead = [f"replica {r} {reasons[r]}" for r, p in enumerate(positions) if p > position]
        raise StrategyError(
            f"{call} needs all replicas, but some have left the run: {'; '.join(ahead)}. You can "
            "continue to use the strategy."
        )


def group_device() -> torch.device:
    """Return the device on which the default process group communicates."""
    if dist.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def all_gather_object(obj: Any) -> list[Any]:
    """Return the objects of all ranks."""
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, obj)
    return objects


def _all_gather_row(numbers: list[int]) -> list[list[int]]:
    row = torch.tensor(numbers + [0] * (WIDTH - len(numbers)), device=group_device())
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    table: list[list[int]] = torch.stack(rows).tolist()
    return table


def check_shapes(call: str, shapes: Sequence[Sequence[int]], axis: int | None = None) -> None:
    """Compare the shapes of all replicas before their values are sent.

    Args:
        call: the call, for messages.
        shapes: the shape of each replica.
        axis: the dimension that may differ; None if the shapes must be the same.

    Raises:
        StrategyError: the shapes differ in any other dimension, or have no dimension ``axis``.

    >>> check_shapes("gather", [(2, 3), (4, 3)], 0)
    >>> check_shapes("gather", [(2, 3), (2, 4)], 0)
    Traceback (most recent call last):
    ...
    distkit.errors.StrategyError: gather received different shapes: replica 0 has (2, 3) and
    replica 1 has (2, 4), which differ in dimension 1. ...
    """
    first = tuple(shapes[0])
    for replica, shape in enumerate(map(tuple, shapes)):
        if axis is not None and not -len(shape) <= axis < len(shape):
            raise StrategyError(
                f"{call} along dimension {axis}: the value of replica {replica} has shape "
                f"{shape}, which has no such dimension. Reshape a scalar with .reshape(1)."
            )
        ignored = None if axis is None else axis % len(shape)
        pairs = enumerate(zip(first, shape, strict=False))
        differences = [f"dimension {d}" for d, (a, b) in pairs if a != b and d != ignored]
        if len(first) != len(shape) or differences:
            raise StrategyError(
                f"{call} received different shapes: replica 0 has {first} and replica {replica} "
                f"has {shape}, which differ in {[*differences, 'the number of dimensions'][0]}. "
                "All replicas must pass the same shape"
                + ("." if axis is None else f", except for dimension {axis}.")
            )
