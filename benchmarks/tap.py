"""What recording costs: steps of DDP on two ranks, recorded and not, in turn on one cluster.

The ratio of the times is what a user feels, and it is noisy: on few cores a step mostly waits for
threads to be woken. The processor time of the rank's threads is the second, quieter witness. It
leaves out gloo's polling thread, which spins while its rank is late: it measures the other rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figure import Figure, figure

#: The thread of gloo that polls the sockets.
POLLING = "gloo_tcp_loop"

#: Steps of one run before the clock starts, and while it runs.
WARM, STEPS = 50, 300


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Seconds per step; ``reps`` pairs of runs, one recorded and one not, in changing order."""
    from distkit.cluster.cluster import Cluster

    wall: dict[bool, list[float]] = {True: [], False: []}
    cpu: dict[bool, list[float]] = {True: [], False: []}
    with Cluster(2) as cluster:
        for rep in range(reps):
            say(f"tap: {rep + 1} of {reps}")
            for record in (rep % 2 == 0, rep % 2 == 1):
                run = cluster._submit(train, (WARM, STEPS), {}, record=record).wait()
                wall[record].append(max(seconds for seconds, _ in run.results))
                cpu[record].append(sum(busy for _, busy in run.results) / len(run.results))
    pairs = [on / off for on, off in zip(wall[True], wall[False], strict=True)]
    name = "step of DDP on the digits, 2 ranks, recorded"
    return [
        figure(
            name,
            "ms",
            _ms(wall[True]),
            "the same not recorded",
            _ms(wall[False]),
            must=1.05,
            aim=1.02,
        ),
        figure(
            f"processor time of the {name}",
            "ms",
            _ms(cpu[True]),
            "the same not recorded",
            _ms(cpu[False]),
        ),
    ], {
        "median_of_paired_ratios": median(pairs),
        "recorded": {"wall_ms": _ms(wall[True]), "cpu_ms": _ms(cpu[True])},
        "not_recorded": {"wall_ms": _ms(wall[False]), "cpu_ms": _ms(cpu[False])},
    }


def train(warm: int, steps: int) -> tuple[float, float]:
    """On each rank: seconds and processor seconds (see :func:`_busy`) for one step."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel

    from distkit import demos
    from distkit.data.shards import shard

    images, labels = shard(*demos.digits())
    net = DistributedDataParallel(demos.model())
    optimizer = torch.optim.SGD(net.parameters(), lr=demos.LR)
    batches = len(images) // demos.BATCH

    def run(steps: int) -> None:
        for step in range(steps):
            rows = slice(step % batches * demos.BATCH, (step % batches + 1) * demos.BATCH)
            loss = F.cross_entropy(net(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        dist.barrier()

    run(warm)
    started, busy = time.perf_counter(), _busy()
    run(steps)
    return (time.perf_counter() - started) / steps, (_busy() - busy) / steps


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


def _ms(seconds: list[float]) -> list[float]:
    return [1e3 * s for s in seconds]
