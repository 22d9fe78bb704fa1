"""What workers do to be predicted, and before that, to be measured with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

#: Rounds before any is timed: memory has been touched then. Seconds of a step's computation.
WARM, COMPUTE = 3, 4e-3


def on_ruler(sizes: dict[int, int], server: int) -> dict[str, Any]:
    """What each worker of the ruler does: worker 0 alone, then all at once."""
    from distkit import kvstore

    kv = kvstore.create("dist_async")
    kv.set_optimizer(kvstore.SGD(learning_rate=0.5))
    found: dict[str, Any] = {what: {} for what in ("alone", "crowd", "mine", "served", "compute")}
    for size, calls in sizes.items():
        push, pull = messages(kv, size)

        def trip(push: Any = push, pull: Any = pull) -> None:
            push()
            pull()

        clock(trip, WARM)
        kv.barrier()
        if kv.rank == 0:
            found["alone"][size] = clock(trip, calls)
        kv.barrier()
        mine, served = time.process_time(), processor_seconds(server)
        found["crowd"][size] = clock(trip, calls)
        found["mine"][size] = (time.process_time() - mine) / calls
        kv.barrier()
        found["served"][size] = (processor_seconds(server) - served) / calls
    for what, compute in computations().items():
        kv.barrier()
        found["compute"][what] = each(clock(partial(compute, 1.0), 8))
    return found


def on_worker(
    mode: str, options: dict[str, Any], nbytes: int, steps: int, compute: str, slow: float
) -> list[float]:
    """What each worker does: compute, push, pull; the times between its steps.

    Worker 0 computes so many times more slowly.
    """
    from distkit import kvstore

    kv = kvstore.create(mode, **options)
    kv.set_optimizer(kvstore.SGD(learning_rate=0.5))
    push, pull = messages(kv, nbytes)
    computing = partial(computations()[compute], slow if kv.rank == 0 else 1.0)

    def step() -> None:
        computing()
        push()
        pull()

    clock(step, WARM)
    kv.barrier()
    times = clock(step, steps)
    kv.barrier()
    return times


def messages(kv: Any, nbytes: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """A push and a pull of so many bytes."""
    import torch

    w, g = torch.zeros(nbytes // 4), torch.ones(nbytes // 4)
    kv.init(nbytes, w)
    return lambda: kv.push(nbytes, g), lambda: kv.pull(nbytes, out=w)


def computations() -> dict[str, Callable[[float], None]]:
    """Each kind of a step's computation, so many times longer than usual."""
    import torch

    x = torch.ones(256, 256)

    def processor(factor: float) -> None:
        for _ in range(round(3 * factor)):
            torch.mm(x, x)

    return {
        "none": lambda factor: None,
        "device": lambda factor: time.sleep(COMPUTE * factor),
        "processor": processor,
    }


def clock(action: Callable[[], None], calls: int) -> list[float]:
    """The times before and after each of so many [s]."""
    times = [time.monotonic()]
    for _ in range(calls):
        action()
        times.append(time.monotonic())
    return times


def each(times: Sequence[float]) -> float:
    """Seconds of one."""
    return (times[-1] - times[0]) / (len(times) - 1)


def processor_seconds(process: int) -> float:
    """What a process has taken of processors so far (Linux: the clock of another process)."""
    return time.clock_gettime((~process << 3) | 2)
