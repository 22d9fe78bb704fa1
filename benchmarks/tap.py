"""Overhead of recording DDP steps and single all-reduces on two ranks.

Users notice the ratio of wall times, but it is noisy: with few cores, a step spends most of its
time waiting for threads to wake up. The CPU time of a rank's threads is more stable. It excludes
gloo's polling thread, whose CPU time depends on the other rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.driver import Log, interleave
from benchmarks.figure import Figure, fill

#: Name of the gloo thread that polls the sockets.
POLLING = "gloo_tcp_loop"

#: WARM calls precede the timed ones, which are STEPS DDP steps or CALLS all-reduces of NUMBERS
#: elements.
WARM, STEPS, CALLS, NUMBERS = 50, 300, 1000, 9_000

_PLAIN = "the same without recording"
_STEP = "DDP step on the digits, 2 ranks, recorded"

FIGURES = {
    "step / plain step": Figure(_STEP, "ms", reference=_PLAIN, limit=1.05, target=1.02),
    "step cpu / plain step cpu": Figure(
        f"CPU time of the {_STEP}", "ms", reference=_PLAIN, limit=1.1, target=1.05
    ),
    "call cpu / plain call cpu": Figure(
        "CPU time of a recorded all_reduce of 36 kB", "ms", reference=_PLAIN
    ),
    "added": Figure(
        "CPU time that recording adds to an all_reduce of 36 kB",
        "ms",
        limit=0.1,
        target=0.05,
        absolute=True,
    ),
}


def measure(reps: int, log: Log) -> tuple[list[Figure], dict[str, Any]]:
    """Alternate runs with and without recording, ``reps`` times each."""
    samples = interleave("tap", reps, log, lambda: _run(True), lambda: _run(False))
    pairs = zip(samples["call cpu"], samples["plain call cpu"], strict=True)
    samples["added"] = [recorded - plain for recorded, plain in pairs]
    return fill(FIGURES, samples), samples


def _run(record: bool) -> dict[str, float]:
    """Return the wall time of the slower rank and the mean CPU time of both ranks [ms]."""
    import distkit as dk

    kind = "" if record else "plain "
    times: dict[str, float] = {}
    for name, fn in (("step", train), ("call", reduce)):
        wall, cpu = zip(*dk.run_ranks(fn, 2, record=record).results, strict=True)
        times |= {f"{kind}{name}": 1e3 * max(wall), f"{kind}{name} cpu": 1e3 * sum(cpu) / 2}
    return times


def reduce() -> tuple[float, float]:
    """Return this rank's wall time and CPU time per all-reduce [s]."""
    import torch
    import torch.distributed as dist

    x = torch.zeros(NUMBERS)
    return _time_calls(lambda n: dist.all_reduce(x), CALLS)


def train() -> tuple[float, float]:
    """Return this rank's wall time and CPU time per step [s]."""
    import torch
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel

    import distkit as dk

    size = dk.demos.BATCH
    images, labels = dk.data.shard(*dk.data.digits())
    net = DistributedDataParallel(dk.demos.model())
    optimizer = torch.optim.SGD(net.parameters(), lr=dk.demos.LR)

    def step(n: int) -> None:
        start = n % (len(images) // size) * size
        rows = slice(start, start + size)
        loss = F.cross_entropy(net(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return _time_calls(step, STEPS)


def _time_calls(call: Callable[[int], object], calls: int) -> tuple[float, float]:
    import torch.distributed as dist

    for n in range(WARM):
        call(n)
    dist.barrier()
    start, cpu_start = time.perf_counter(), _cpu_seconds()
    for n in range(calls):
        call(n)
    dist.barrier()
    return (time.perf_counter() - start) / calls, (_cpu_seconds() - cpu_start) / calls


def _cpu_seconds() -> float:
    """Return this process's CPU time [s]; on Linux, without that of gloo's polling thread."""
    if not Path("/proc/self/schedstat").exists():
        return time.process_time()
    nanoseconds = 0
    for thread in Path("/proc/self/task").iterdir():
        try:
            if thread.joinpath("comm").read_text().strip() != POLLING:
                nanoseconds += int(thread.joinpath("schedstat").read_text().split()[0])
        except OSError:  # the thread has just ended
            continue
    return nanoseconds / 1e9
