"""Time per sample of synchronous SGD, compared with DDP under torchrun and MXNet's dist_sync.

MXNet needs a separate Python, set in ``DISTKIT_MXNET_PYTHON`` (see kvstore.py). The figures are
microseconds per sample; lower is better.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import kvstore_peers
from benchmarks.driver import Log, interleave
from benchmarks.figure import Figure, fill

#: BATCH is the batch size per rank, STEPS is the number of steps per repetition, and RATE is the
#: learning rate.
RANKS, BATCH, STEPS, RATE = 4, 32, 300, 0.2

_NAME = f"sync-SGD, digits MLP, {RANKS} ranks: time per sample"

FIGURES = {
    "auto / ddp": Figure(_NAME, "us", reference="DDP, torchrun, gloo", limit=1 / 3, target=1 / 6),
    "auto / no reduce": Figure(_NAME, "us", reference="no communication", target=1 / 0.8),
    "auto / mxnet": Figure(
        _NAME,
        "us",
        reference="MXNet's dist_sync (DISTKIT_MXNET_PYTHON)",
        limit=1 / 1.5,
        target=1 / 2.5,
    ),
}


def measure(reps: int, log: Log) -> tuple[list[Figure], dict[str, Any]]:
    """Run each contender ``reps`` times on the same machine."""
    contenders: list[Callable[[], dict[str, float]]] = [_measure_distkit, _measure_ddp]
    with ExitStack() as stack:
        if python := os.environ.get("DISTKIT_MXNET_PYTHON"):
            data = kvstore_peers.digits()
            mxnet = stack.enter_context(
                kvstore_peers.reference(python, RANKS, RANKS, "dist_sync", data)
            )
            contenders.append(
                lambda: {"mxnet": max(r["step"] for r in mxnet.run(("steps", STEPS)))}
            )
        seconds = interleave("train", reps, log, *contenders)
    samples = {name: [1e6 * s / (RANKS * BATCH) for s in times] for name, times in seconds.items()}
    return fill(FIGURES, samples), samples


def _measure_distkit() -> dict[str, float]:
    import distkit as dk

    results = dk.run_ranks(steps_on_rank, RANKS, record=False).results
    return {variant: max(result[variant] for result in results) for variant in results[0]}


def steps_on_rank() -> dict[str, float]:
    """Return this rank's time per step with distkit's all-reduce, and without communication [s]."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    import distkit as dk

    torch.set_num_threads(1)
    images, labels = dk.data.shard(*dk.data.digits())
    batches = list(zip(images.split(BATCH), labels.split(BATCH), strict=True))[:-1]
    seconds = {}
    with dk.algorithms.use_algorithm("auto"):
        for variant, all_reduce in (
            ("auto", dist.all_reduce),
            ("no reduce", lambda tensor: None),
        ):
            net = dk.demos.model()
            for step in range(STEPS + 20):
                if step == 20:
                    dist.barrier()
                    start = time.perf_counter()
                batch = batches[step % len(batches)]
                dk.algorithms.sync_sgd_step(
                    net, batch, F.cross_entropy, RATE, all_reduce=all_reduce
                )
            seconds[variant] = (time.perf_counter() - start) / STEPS
    return seconds


#: Trains the same model with DDP, as PyTorch's tutorial does, and prints the seconds per step.
DDP = """
import sys, time
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks, (batch, steps, rate) = dist.get_rank(), dist.get_world_size(), map(float, sys.argv[1:])
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x[rank::ranks] / 16, dtype=torch.float32), torch.tensor(y[rank::ranks])
batches = list(zip(x.split(int(batch)), y.split(int(batch))))[:-1]
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
net = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=rate)
for step in range(int(steps) + 20):
    if step == 20:
        dist.barrier()
        start = time.perf_counter()
    images, labels = batches[step % len(batches)]
    optimizer.zero_grad()
    F.cross_entropy(net(images), labels).backward()
    optimizer.step()
# the ranks share the output: write each line at once
sys.stdout.write(f"seconds {(time.perf_counter() - start) / steps}\\n")
dist.barrier()  # gloo may abort a rank whose peers have exited
dist.destroy_process_group()
"""


def _measure_ddp() -> dict[str, float]:
    lines = torchrun(DDP, RANKS, BATCH, STEPS, RATE).splitlines()
    return {"ddp": max(float(line.split()[1]) for line in lines if line.startswith("seconds "))}


def torchrun(program: str, ranks: int, *arguments: object) -> str:
    """Run a program under torchrun and return its output."""
    with tempfile.TemporaryDirectory(prefix="distkit-bench-") as folder:
        script = Path(folder, "program.py")
        script.write_text(program, "utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={ranks}", str(script), *map(str, arguments)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return subprocess.check_output(command, env=environ, text=True, timeout=300)
