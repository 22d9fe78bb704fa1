"""What recording costs: steps of DDP and single all-reduces on two ranks, recorded and not.

The ratio of the times is what a user feels, and it is noisy: on few cores a step mostly waits for
threads to be woken. The processor time of the rank's threads is quieter. It leaves out gloo's
polling thread, which spins while its rank is late: it measures the other rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.driver import Say, take_turns
from benchmarks.figure import Figure, fill

#: The thread of gloo that polls the sockets.
POLLING = "gloo_tcp_loop"

#: Calls before the clock starts; while it runs, steps of DDP and all-reduces; an all-reduce's size.
WARM, STEPS, CALLS, NUMBERS = 50, 300, 1000, 9_000

_PLAIN = "the same not recorded"
_STEP = "step of DDP on the digits, 2 ranks, recorded"

FIGURES = {
    "step / plain step": Figure(_STEP, "ms", reference=_PLAIN, must=1.05, aim=1.02),
    "step cpu / plain step cpu": Figure(
        f"processor time of the {_STEP}", "ms", reference=_PLAIN, must=1.1, aim=1.05
    ),
    "call cpu / plain call cpu": Figure(
        "processor time of a recorded all_reduce of 36 kB", "ms", reference=_PLAIN
    ),
    "added": Figure(
        "processor time that recording adds to an all_reduce of 36 kB",
        "ms",
        must=0.1,
        aim=0.05,
        absolute=True,
    ),
}


def measure(reps: int, say: Say) -> tuple[list[Figure], dict[str, Any]]:
    """``reps`` runs of each kind, recorded and not in turn."""
    samples = take_turns("tap", reps, say, lambda: _run(True), lambda: _run(False))
    pairs = zip(samples["call cpu"], samples["plain call cpu"], strict=True)
    samples["added"] = [recorded - plain for recorded, plain in pairs]
    return fill(FIGURES, samples), samples


def _run(record: bool) -> dict[str, float]:
    """Milliseconds of the slower rank, and processor milliseconds of both in the mean."""
    import distkit as dk

    kind = "" if record else "plain "
    found: dict[str, float] = {}
    for name, fn in (("step", train), ("call", reduce)):
        wall, busy = zip(*dk.run_ranks(fn, 2, record=record).results, strict=True)
        found |= {f"{kind}{name}": 1e3 * max(wall), f"{kind}{name} cpu": 1e3 * sum(busy) / 2}
    return found


def reduce() -> tuple[float, float]:
    """On each rank: seconds and processor seconds of one all-reduce."""
    import torch
    import torch.distributed as dist

    x = torch.zeros(NUMBERS)
    return _timed(lambda n: dist.all_reduce(x), CALLS)


def train() -> tuple[float, float]:
    """On each rank: seconds and processor seconds of one step."""
    import torch
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel

    import distkit as dk

    size = dk.demos.BATCH
    images, labels = dk.data.shard(*dk.demos.digits())
    net = DistributedDataParallel(dk.demos.model())
    optimizer = torch.optim.SGD(net.parameters(), lr=dk.demos.LR)

    def step(n: int) -> None:
        start = n % (len(images) // size) * size
        rows = slice(start, start + size)
        loss = F.cross_entropy(net(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return _timed(step, STEPS)


def _timed(call: Callable[[int], object], calls: int) -> tuple[float, float]:
    import torch.distributed as dist

    for n in range(WARM):
        call(n)
    dist.barrier()
    started, busy = time.perf_counter(), _busy()
    for n in range(calls):
        call(n)
    dist.barrier()
    return (time.perf_counter() - started) / calls, (_busy() - busy) / calls


def _busy() -> float:
    """Processor seconds of this process's threads so far; of all but gloo's polling on Linux."""
    if not Path("/proc/self/schedstat").exists():
        return time.process_time()
    nanoseconds = 0
    for thread in Path("/proc/self/task").iterdir():
        try:
            if thread.joinpath("comm").read_text().strip() != POLLING:
                nanoseconds += int(thread.joinpath("schedstat").read_text().split()[0])
        except OSError:  # it has just ended
            continue
    return nanoseconds / 1e9
