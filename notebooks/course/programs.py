"""Exercises on scripts and GPUs: a decision shared by all ranks, and staging through the host.

Both are judged on CPU ranks: an answer stages through the host if it reduces a tensor other
than the given one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, partialmethod
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from distkit_course.content.mistakes import in_turn
from distkit_course.judges import Program, read_only, same
from distkit_course.task import Answer, Task, WrongAnswer

# -- solutions ------------------------------------------------------------------------------


def staged(x: Tensor) -> None:
    """All-reduce through host memory, with a backend that does not support x's device."""
    host = x.to("cpu", copy=True)
    dist.all_reduce(host)
    x.copy_(host)


def stop_together(loss: Tensor, limit: float) -> bool:
    """Decides by the mean of all losses, which is equal on every rank."""
    total = loss.clone()
    dist.all_reduce(total)
    return bool(total / dist.get_world_size() < limit)


# -- the judge -------------------------------------------------------------------------------

#: The losses of ranks 0 and 1 in each case. Later ranks have the same loss as rank 1.
LOSSES = ((1.0, 1.0), (4.0, 4.0), (1.0, 18.0), (2.8, 0.0), (2.0, 2.0))
LIMIT = 2.0


def loss_of(rank: int, case: tuple[float, ...]) -> float:
    """Return the loss of a rank in a case."""
    return case[min(rank, len(case) - 1)]


def _run_decisions(answer: Answer, rank: int, n: int) -> list[Any]:
    """Return the decision of a rank in each case."""
    return [
        _to_plain(read_only(answer)(torch.tensor(loss_of(rank, case)), LIMIT)) for case in LOSSES
    ]


def _to_plain(decision: Any) -> Any:
    return bool(decision) if isinstance(decision, Tensor) and decision.numel() == 1 else decision


def _expected_decisions(rank: int, n: int) -> list[Any]:
    return [sum(loss_of(r, case) for r in range(n)) / n < LIMIT for case in LOSSES]


def _explain_decisions(results: list[list[Any]], expected: list[list[Any]]) -> str:
    """Describe the mistake in the ranks' decisions."""
    n = len(results)
    if any(other != results[0] for other in results):
        return "ranks decide differently: the one that continues waits forever for the others"
    sums = [sum(loss_of(r, case) for r in range(n)) < LIMIT for case in LOSSES]
    if results[0] == sums:
        return "it compares the sum of the losses: divide it by the number of ranks"
    case, got = next(
        (case, got)
        for case, got, right in zip(LOSSES, results[0], expected[0], strict=True)
        if not same(got, right)
    )
    return f"with losses {[loss_of(r, case) for r in range(n)]} and limit {LIMIT}, it returns {got}"


# -- through the host ----------------------------------------------------------------------


def _staged(answer: Answer, rank: int, n: int) -> list[float]:
    """Run the answer with a backend that rejects the tensor itself, as if it were on a GPU."""
    x = torch.arange(4) + rank + 1.0
    moves: dict[str, Any] = {
        name: partialmethod(_copied, getattr(Tensor, name)) for name in ("cpu", "to")
    }
    names = "all_reduce all_gather broadcast reduce send isend recv irecv".split()
    calls: dict[str, Any] = {n: partial(_on_the_host, x, getattr(dist, n)) for n in names}
    with patch.multiple(dist, **calls), patch.multiple(Tensor, **moves):
        answer(x)
    return x.tolist()


def _on_the_host(x: Tensor, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a torch.distributed function, but reject x."""
    tensors = [value for value in (*args, *options.values()) if isinstance(value, Tensor)]
    if x.untyped_storage().data_ptr() in [t.untyped_storage().data_ptr() for t in tensors]:
        raise WrongAnswer("gloo works on the host here, and x is on the GPU: reduce a copy")
    return call(*args, **options)


def _copied(x: Tensor, move: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    """Return a copy, as a move to the host does for a GPU tensor and for views of it."""
    return move(x, *args, **options).clone()


def _why_staged(results: list[list[float]], expected: list[list[float]]) -> str:
    unchanged = all(got == [rank + i for i in range(1, 5)] for rank, got in enumerate(results))
    return "x is unchanged: copy the sum back into it" if unchanged else ""


# -- common mistakes -----------------------------------------------------------------------


def by_the_sum(loss: Tensor, limit: float) -> bool:
    """Compares the sum instead of the mean."""
    dist.all_reduce(total := loss.clone())
    return bool(total < limit)


def by_rank_0(loss: Tensor, limit: float) -> bool:
    """Decides by rank 0's loss instead of the mean."""
    dist.broadcast(first := loss.clone(), 0)
    return bool(first < limit)


def by_gathering(loss: Tensor, limit: float) -> bool:
    """Is correct, but takes two calls."""
    losses = [torch.empty(()) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, loss)
    dist.barrier()
    return bool(torch.stack(losses).mean() < limit)


def rebinds_x(x: Tensor) -> None:
    """Rebinds the name to another tensor."""
    host = x.clone()
    dist.all_reduce(host)
    x = host


def gathers_x(x: Tensor) -> None:
    """Gathers x itself, on the GPU."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    x.copy_(torch.stack(parts).sum(0))


#: The exercises.
TASKS: list[Task] = [
    Task(
        "staged",
        "staged(x)",
        "sum x over all ranks, in place, with a backend that cannot access x",
        "The backend can access only tensors on the host. The check treats x as if it were on a "
        "GPU, so x.cpu() returns a copy.",
        staged,
        (
            "Which tensor does the backend get, and which one must contain the sum?",
            "x = host only rebinds the name, whereas copy_ writes into x.",
        ),
        Program(
            _staged,
            lambda rank, n: [n * (n + 1) / 2 + n * i for i in range(4)],
            (2, 3),
            {"calls": (lambda n: 1, "one all-reduce of the copy")},
            _why_staged,
        ),
        (
            (
                lambda x: dist.all_reduce(x),
                "gloo works on the host here, and x is on the GPU: reduce a copy",
            ),
            (lambda x: dist.all_reduce(x.clone()), "x is unchanged: copy the sum back into it"),
            (rebinds_x, "x is unchanged: copy the sum back into it"),
            (
                lambda x: (dist.all_reduce(host := x.clone()), x.add_(host)),
                "rank 0 has [4.0, 7.0, 10.0, 13.0]; expected [3.0, 5.0, 7.0, 9.0]",
            ),
            (gathers_x, "gloo works on the host here, and x is on the GPU: reduce a copy"),
            (
                in_turn(staged, lambda x: x.fill_(x[0].item())),
                "rank 0 has [3.0, 3.0, 3.0, 3.0]; expected [3.0, 5.0, 7.0, 9.0]",
            ),
        ),
        worth=2,
    ),
    Task(
        "stop_together",
        "stop_together(loss, limit)",
        "return on every rank whether the mean of all ranks' losses is below limit",
        "loss is a tensor with one number, the loss of this rank; do not modify it. All ranks call "
        "the\nfunction. One collective is enough.",
        stop_together,
        (
            "Each rank knows its own loss. Which value can all ranks know?",
            "An all-reduce leaves the same sum on every rank. Divide it, and then compare.",
        ),
        Program(
            _run_decisions,
            _expected_decisions,
            (2, 3),
            {"calls": (lambda n: len(LOSSES), "one all-reduce of the loss each time")},
            _explain_decisions,
        ),
        (
            (
                lambda loss, limit: bool(loss < limit),
                "ranks decide differently: the one that continues waits forever",
            ),
            (by_the_sum, "it compares the sum of the losses: divide it by the number of ranks"),
            (by_rank_0, "rank 0 has [True, False, True, False, False]; expected"),
            (by_gathering, "10 collective operations per rank; 5 suffice"),
            (
                lambda loss, limit: stop_together(loss.sub_(1), limit),
                "the arguments must not change",
            ),
            (
                lambda loss, limit: not stop_together(-loss, -limit),
                "[True, False, False, True, True]",
            ),
        ),
        worth=2,
    ),
]
