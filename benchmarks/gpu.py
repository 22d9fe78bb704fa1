"""GPU ranks compared with references. Without a GPU, figures are marked as not measured.

A stand-in runs the same code on the CPU, to test the benchmark itself. The results do not apply to
GPUs, so the name of each figure states that it was measured on a stand-in.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.driver import Driver, Log, interleave, torch_timeout
from benchmarks.figure import Figure
from benchmarks.memory import pss
from benchmarks.train import torchrun
from distkit.errors import DistkitError

#: RANKS ranks share a GPU. SIZE is the size of the all-reduce [bytes], and FREE_TIMEOUT is the time
#: within which memory must be freed [s].
RANKS, SIZE, FREE_TIMEOUT = 4, 64 << 20, 5.0

#: WARM training steps precede the STEPS timed ones. CALLS all-reduces are timed together.
WARM, STEPS, CALLS = 3, 30, 3

#: The samples of distkit and of the reference.
Pair = tuple[list[float], list[float]]


class Row(NamedTuple):
    """A figure, and the function that measures it, given a device and a number of repetitions."""

    figure: Figure
    measure: Callable[[str, int], Pair]


def measure(reps: int, log: Log, stand_in: str = "") -> tuple[list[Figure], dict[str, Any]]:
    """Measure all :data:`ROWS`, with ``stand_in="cpu"`` on the CPU."""
    figures, present = [], bool(stand_in or gpus())
    for row in ROWS:
        log(f"gpu: {row.figure.name}")
        figures.append(
            measure_row(row, reps, stand_in)
            if present
            else row.figure.of([], note="not measured: no GPU")
        )
    return figures, {"stand_in": stand_in, **environment()}


def measure_row(row: Row, reps: int, stand_in: str = "") -> Figure:
    """Measure a figure; if that fails, the figure's note contains the error."""
    figure = row.figure
    if stand_in:
        name = f"{figure.name} [stand-in: {stand_in}]"
        figure = replace(figure, name=name, limit=None, target=None)
    try:
        return figure.of(*row.measure(stand_in or "cuda:0", reps))
    except Exception as error:
        return figure.of([], note=f"failed: {type(error).__name__}: {error}")


def gpus() -> int:
    """Return the number of GPUs without initializing CUDA, because this process forks ranks."""
    import torch

    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def environment() -> dict[str, Any]:
    """Return the date, GPUs, driver, and versions of torch, CUDA and NCCL."""
    import torch

    command = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,driver_version",
        "--format=csv,noheader",
    ]
    listed = ""
    with suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.check_output(command, text=True, timeout=60)
    has_nccl = hasattr(torch._C, "_nccl_version")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "gpus": listed.splitlines(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
    }


# -- starting and ending -------------------------------------------------------------------------

#: Replies with the time to the first all_reduce [s], and the pids of ranks that hold 64 MiB each.
_CLUSTER = """
def first(device):
    import torch, torch.distributed as dist
    dist.all_reduce(torch.ones(1, device=device))

def hold(device):
    import torch, torch.distributed as dist
    held = torch.ones(1 << 24, device=device)
    dist.barrier()
    time.sleep(3600)

import distkit
device = sys.stdin.readline().strip()
start = time.monotonic()
cluster = distkit.Cluster(4, device=device)
cluster.run(first, device)
seconds = time.monotonic() - start
run = cluster.submit(hold, device, wait_forever=True)
while sum(event.state == "completed" for event in run.trace) < 4:
    time.sleep(0.01)
reply([seconds, [pid for _, _, pid, *_ in cluster.status().rows]])
request()
cluster.stop()
reply(0)
request()
"""

_TORCHRUN = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1, device=sys.argv[1]))
sys.stdout.write(f"done {time.monotonic()}\\n")
dist.destroy_process_group()
"""


def _measure_start(device: str, reps: int) -> Pair:
    def ours() -> dict[str, float]:
        with Driver(_CLUSTER) as driver:
            return {"ours": driver.request(device)[0]}

    def run_torchrun() -> dict[str, float]:
        began = time.monotonic()
        lines = torchrun(_TORCHRUN, RANKS, device).splitlines()
        times = [float(line.split()[1]) for line in lines if line.startswith("done ")]
        return {"theirs": max(times) - began}

    samples = interleave("gpu", reps, lambda line: None, ours, run_torchrun)
    return samples["ours"], samples["theirs"]


def _measure_leftover_memory(killed: bool, device: str, reps: int) -> Pair:
    return [max(_leftover_memory(device, killed) for _ in range(reps))], []


def _leftover_memory(device: str, killed: bool) -> float:
    """Return the memory still in use 5 s after the cluster or its kernel was stopped [MiB]."""
    before = _memory_in_use(device, [])
    with Driver(_CLUSTER) as driver:
        _, ranks = driver.request(device)
        if killed:
            driver.process.kill()
            driver.process.wait()
        else:
            driver.request()  # stops the cluster, but not its kernel
        end = time.monotonic() + FREE_TIMEOUT
        while (remaining := _memory_in_use(device, ranks) - before) > 0 and time.monotonic() < end:
            time.sleep(0.05)
    return max(0.0, remaining) / (1 << 20)


def _memory_in_use(device: str, ranks: list[int]) -> float:
    """Return the memory in use on all GPUs or, with ``device="cpu"``, by these ranks [bytes]."""
    if device == "cpu":
        return float(sum(map(_pss, ranks)))
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    listed = subprocess.check_output(command, text=True, timeout=60)
    return float(sum(int(used) << 20 for used in listed.split()))


def _pss(pid: int) -> int:
    try:
        return pss(pid)
    except (OSError, DistkitError):  # the process has exited
        return 0


# -- running -------------------------------------------------------------------------------------


def _measure_training(ranks: int, device: str, reps: int) -> Pair:
    from distkit import Cluster

    with Cluster(ranks, device=device) as cluster:

        def run(record: bool) -> dict[str, float]:
            run = cluster._submit(train, (device, STEPS), {}, record=record).wait()
            return {str(record): 1e3 * max(run.results)}

        samples = interleave("gpu", reps, lambda line: None, lambda: run(True), lambda: run(False))
    return samples["True"], samples["False"]


def train(device: str, steps: int) -> float:
    """Return this rank's time per DDP step of a small convolutional network [s]."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    convolutions = nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU()
    net = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32 * 24 * 24, 10)).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(32, 1, 28, 28, device=device)
    y = torch.randint(10, (32,), device=device)
    for step in range(WARM + steps):
        if step == WARM:
            _synchronize(device)
            began = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    _synchronize(device)
    return (time.perf_counter() - began) / steps


def _synchronize(device: str) -> None:
    """Wait until all ranks and their GPUs have finished."""
    import torch
    import torch.distributed as dist

    if device != "cpu":
        torch.cuda.synchronize()
    dist.barrier()


def _measure_all_reduce(device: str, reps: int) -> Pair:
    from distkit import Cluster

    with Cluster(RANKS, device=device) as cluster:
        repetitions = [
            cluster._submit(reduce, (device, SIZE), {}, record=False).wait().results
            for _ in range(reps)
        ]
    ours, gloo = ([1e3 * max(rank[i] for rank in ranks) for ranks in repetitions] for i in range(2))
    return ours, gloo


def reduce(device: str, size: int) -> tuple[float, float]:
    """Return this rank's time per all-reduce of ``size`` bytes, with shared memory and gloo [s]."""
    import torch
    import torch.distributed as dist

    import distkit as dk

    x = torch.ones(size // 4, device=device)

    def seconds(call: Callable[..., Any]) -> float:
        call(x)
        _synchronize(device)
        began = time.perf_counter()
        for _ in range(CALLS):
            call(x)
        _synchronize(device)
        return (time.perf_counter() - began) / CALLS

    return seconds(dk.algorithms.shared_memory_all_reduce), seconds(dist.all_reduce)


def receive(device: str) -> None:
    """Receive from the other of two ranks; reading the value synchronizes with the GPU."""
    import torch
    import torch.distributed as dist

    x = torch.zeros(4, device=device)
    dist.recv(x, src=1 - dist.get_rank())
    x.sum().item()


def _measure_diagnosis(device: str, reps: int) -> Pair:
    from distkit import Cluster
    from distkit.errors import DeadlockError

    times = []
    with Cluster(2, device=device) as cluster:
        for _ in range(reps):
            run = cluster.submit(receive, device)
            try:
                run.wait(60)
            except DeadlockError:
                blocked = [e.time for e in run.trace if e.state == "blocked"]
                times.append(time.monotonic() - max(blocked))
    return times, [torch_timeout(nccl=True)]


def _measure_interrupt(device: str, reps: int) -> Pair:
    from distkit import Cluster

    times = []
    with Cluster(2, device=device) as cluster:
        for _ in range(reps):
            cluster.submit(receive, device, wait_forever=True)
            while not cluster.diagnose():
                time.sleep(0.02)
            began = time.perf_counter()
            cluster.interrupt()
            cluster.submit(abs, -1).wait()
            times.append(time.perf_counter() - began)
    return times, [torch_timeout(nccl=True)]


# -- traces --------------------------------------------------------------------------------------


def record(folder: Path, device: str) -> list[str]:
    """Record GPU runs, which can then be viewed without a GPU; return the names of the files.

    The runs are four ranks that train on one GPU, one rank with NCCL, a hang, and one rank per GPU
    if there are several.
    """
    from distkit import Cluster

    programs: list[tuple[str, int, str, Callable[..., Any], tuple[Any, ...]]] = [
        ("shared", RANKS, device, train, (device, 5)),
        ("one", 1, device, train, (device, 5)),
        ("hang", 2, device, receive, (device,)),
    ]
    if device != "cpu" and (n := gpus()) > 1:
        programs.append(("each", n, "cuda", train, ("cuda", 5)))
    folder.mkdir(parents=True, exist_ok=True)
    saved = []
    for name, ranks, target, program, arguments in programs:
        with Cluster(ranks, device=target) as cluster:
            run = cluster.submit(program, *arguments)
            with suppress(DistkitError):
                run.wait(60)
            saved.append(run.trace.save(folder / f"{name}.trace").name)
    return saved


_PLAIN = "the same without recording"

#: The figures, used by the measurements, the report and docs/measured/README.md.
ROWS = [
    Row(
        Figure(
            f"Cluster({RANKS}) on one GPU to its first all_reduce",
            "s",
            reference=f"{RANKS} processes by torchrun, with gloo",
            limit=0.5,
            target=0.3,
        ),
        _measure_start,
    ),
    Row(
        Figure(
            f"step of DDP (small CNN, {RANKS} ranks on one GPU), recorded",
            "ms",
            reference=_PLAIN,
            limit=1.05,
            target=1.02,
        ),
        partial(_measure_training, RANKS),
    ),
    Row(
        Figure(
            f"all-reduce of {SIZE >> 20} MB, {RANKS} ranks on one GPU, shared_memory",
            "ms",
            reference="gloo on CUDA tensors",
            limit=0.5,
            target=0.2,
        ),
        _measure_all_reduce,
    ),
    Row(
        Figure("step of DDP, one rank with NCCL, recorded", "ms", reference=_PLAIN, limit=1.02),
        partial(_measure_training, 1),
    ),
    Row(
        Figure(
            "hang of GPU ranks to the error",
            "s",
            reference="torch's timeout, which names no rank",
            limit=2.0,
            absolute=True,
        ),
        _measure_diagnosis,
    ),
    Row(
        Figure(
            "interrupt of hung GPU ranks to a usable cluster",
            "s",
            reference="torch's timeout",
            limit=3.0,
            absolute=True,
        ),
        _measure_interrupt,
    ),
    *(
        Row(
            Figure(
                f"GPU memory left {FREE_TIMEOUT:.0f} s after {end}", "MiB", limit=0, absolute=True
            ),
            partial(_measure_leftover_memory, killed),
        )
        for end, killed in (("stop()", False), ("SIGKILL of the kernel", True))
    ),
]
