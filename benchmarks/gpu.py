"""GPU ranks beside their references. Without a GPU every figure says so, or the CPU stands in.

A stand-in runs the same code on the CPU, so that it works when somebody has a GPU; its numbers say
nothing about one, and their names say that it was the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import starters
from benchmarks.figure import Figure, figure

#: Ranks that share a GPU; bytes of the large all-reduce; how long memory may take to go [s].
RANKS, SIZE, WITHIN = 4, 64 << 20, 5.0

#: Steps of training before the clock starts, and while it runs; calls of the all-reduce.
WARM, STEPS, CALLS = 3, 30, 3

#: How long torch waits before it ends a call of NCCL, and names nobody [s].
STOCK = 600.0

Samples = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Row:
    """A figure: ``measure(device, reps)`` returns the samples, ours and the reference's."""

    name: str
    unit: str
    reference: str
    measure: Callable[[str, int], Samples]
    limits: dict[str, Any] = field(default_factory=dict)


def measure(
    reps: int, say: Callable[[str], None], stand_in: str = ""
) -> tuple[list[Figure], dict[str, Any]]:
    """All of :data:`ROWS`; with ``stand_in="cpu"`` on the CPU."""
    found, there = [], bool(stand_in or gpus())
    for row in ROWS:
        say(f"gpu: {row.name}")
        none = Figure(row.name, row.unit, None, note="unproven: no GPU", **row.limits)
        found.append(measured(row, reps, stand_in) if there else none)
    return found, {"stand_in": stand_in, **surroundings()}


def measured(row: Row, reps: int, stand_in: str = "") -> Figure:
    """A figure; one that fails says why, and does not keep the others from being measured."""
    name, limits = (
        (f"{row.name} [stand-in: {stand_in}]", {}) if stand_in else (row.name, row.limits)
    )
    try:
        samples, against = row.measure(stand_in or "cuda:0", reps)
    except Exception as error:
        note = f"failed: {type(error).__name__}: {error}"
        return Figure(name, row.unit, None, reference=row.reference, note=note, **limits)
    return figure(name, row.unit, samples, row.reference, against or None, **limits)


def gpus() -> int:
    """GPUs that torch counts by NVML: CUDA stays untouched in this process, which starts ranks."""
    import torch

    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def surroundings() -> dict[str, Any]:
    """Date, GPUs, driver, and torch with its CUDA and NCCL."""
    import torch

    nccl = torch.cuda.nccl.version() if hasattr(torch._C, "_nccl_version") else ()
    asked = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        smi = subprocess.run(asked, capture_output=True, text=True, timeout=60)
        there = smi.stdout.split("\n")[:-1] if smi.returncode == 0 else []
    except (OSError, subprocess.TimeoutExpired):
        there = []
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "gpus": there,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
    }


# -- starting ----------------------------------------------------------------------------------

_FIRST = """
import os, sys, time, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1, device=sys.argv[1]))
with open(os.path.join(sys.argv[2], str(rank)), "w") as file:
    file.write(repr(time.monotonic()))
dist.destroy_process_group()
"""


def _start(device: str, reps: int) -> Samples:
    from benchmarks.driver import Driver

    ours, torchrun = [], []
    for _ in range(reps):
        with Driver(starters.on_device(device)) as driver:
            ours.append(driver.ask()[0])
        torchrun.append(_torchrun(device))
    return ours, torchrun


def _torchrun(device: str) -> float:
    """Seconds from the command to the first all_reduce done on the last of its processes."""
    with tempfile.TemporaryDirectory(prefix="distkit-bench-") as folder:
        script = Path(folder, "first.py")
        script.write_text(_FIRST)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={RANKS}", str(script), device, folder]
        begun, environ = time.monotonic(), {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(command, env=environ, check=True, capture_output=True, timeout=300)
        return max(float(Path(folder, str(r)).read_text()) for r in range(RANKS)) - begun


# -- training ----------------------------------------------------------------------------------


def _training(ranks: int) -> Callable[[str, int], Samples]:
    def measured(device: str, reps: int) -> Samples:
        from distkit.cluster.cluster import Cluster

        times: dict[bool, list[float]] = {True: [], False: []}
        with Cluster(ranks, device=device) as cluster:
            for rep in range(reps):
                for record in (rep % 2 == 0, rep % 2 == 1):
                    run = cluster._submit(train, (device, STEPS), {}, record=record).wait()
                    times[record].append(1e3 * max(run.results))
        return times[True], times[False]

    return measured


def train(device: str, steps: int) -> float:
    """On each rank: seconds for one step of DDP with a small convolutional network."""
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
            _done(device)
            begun = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    _done(device)
    return (time.perf_counter() - begun) / steps


def _done(device: str) -> None:
    """Wait until the GPU has done all that it was told, on all ranks."""
    import torch
    import torch.distributed as dist

    if device != "cpu":
        torch.cuda.synchronize()
    dist.barrier()


# -- all-reduce --------------------------------------------------------------------------------


def _reducing(device: str, reps: int) -> Samples:
    from distkit.cluster.cluster import Cluster

    found: dict[str, list[float]] = {"shared_memory": [], "gloo": []}
    with Cluster(RANKS, device=device) as cluster:
        for _ in range(reps):
            for name, times in found.items():
                run = cluster._submit(reduce, (device, SIZE, name), {}, record=False).wait()
                times.append(1e3 * max(run.results))
    return found["shared_memory"], found["gloo"]


def reduce(device: str, size: int, by: str) -> float:
    """On each rank: seconds for one all-reduce of ``size`` bytes, by gloo or by shared memory."""
    import torch
    import torch.distributed as dist

    from distkit.algorithms.shared_memory import shared_memory_all_reduce

    x = torch.ones(size // 4, device=device)
    call: Callable[..., Any] = dist.all_reduce if by == "gloo" else shared_memory_all_reduce
    call(x)
    _done(device)
    begun = time.perf_counter()
    for _ in range(CALLS):
        call(x)
    _done(device)
    return (time.perf_counter() - begun) / CALLS


# -- hangs -------------------------------------------------------------------------------------


def receive(device: str) -> None:
    """Each of two ranks waits for the other's message; the value is used, so that it waits."""
    import torch
    import torch.distributed as dist

    x = torch.zeros(4, device=device)
    dist.recv(x, src=1 - dist.get_rank())
    x.sum().item()


def _finding(device: str, reps: int) -> Samples:
    from distkit.cluster.cluster import Cluster
    from distkit.errors import DeadlockError
    from distkit.events import State

    found = []
    with Cluster(2, device=device) as cluster:
        for _ in range(reps):
            run = cluster.submit(receive, device)
            try:
                run.wait(60)
            except DeadlockError:
                blocked = [e.time for e in run.trace if e.state is State.BLOCKED]
                found.append(run._conductor.explained - max(blocked))
    return found, [STOCK]


def _interrupting(device: str, reps: int) -> Samples:
    from distkit.cluster.cluster import Cluster

    found = []
    with Cluster(2, device=device) as cluster:
        for _ in range(reps):
            cluster.submit(receive, device, wait_forever=True)
            while not cluster.diagnose():
                time.sleep(0.02)
            begun = time.perf_counter()
            cluster.interrupt()
            cluster.submit(abs, -1).wait()
            found.append(time.perf_counter() - begun)
    return found, [STOCK]


# -- traces ------------------------------------------------------------------------------------


def record(folder: Path, device: str) -> list[str]:
    """Record runs for those who have no GPU; the names of the files.

    Four ranks that train on one GPU, one rank with NCCL, a hang, and ranks with a GPU each where
    there are several.
    """
    from distkit.cluster.cluster import Cluster
    from distkit.errors import DistkitError

    programs: list[tuple[str, int, str, Callable[..., Any], tuple[Any, ...]]] = [
        ("shared", RANKS, device, train, (device, 5)),
        ("one", 1, device, train, (device, 5)),
        ("hang", 2, device, receive, (device,)),
    ]
    if device != "cpu" and (n := gpus()) > 1:
        programs.append(("each", n, "cuda", train, ("cuda", 5)))
    folder.mkdir(parents=True, exist_ok=True)
    saved = []
    for name, ranks, where, program, arguments in programs:
        with Cluster(ranks, device=where) as cluster:
            run = cluster.submit(program, *arguments)
            with suppress(DistkitError):
                run.wait(60)
            saved.append(run.trace.save(folder / f"{name}.trace").name)
    return saved


# -- memory ------------------------------------------------------------------------------------


def _leaving(killed: bool, device: str, reps: int) -> Samples:
    return [_left(device, killed) for _ in range(reps)], []


def _left(device: str, killed: bool) -> float:
    """MiB in use that were not before, within 5 s after the cluster's end or its kernel's."""
    from benchmarks.driver import Driver

    before = _used(device, [])
    with Driver(starters.on_device(device, then="cluster.stop()")) as driver:
        _, ranks = driver.ask()
        if killed:
            driver.process.kill()
            driver.process.wait()
        else:
            driver.ask()  # it has stopped the cluster, and waits
        end = time.monotonic() + WITHIN
        while (left := _used(device, ranks) - before) > 0 and time.monotonic() < end:
            time.sleep(0.05)
    return max(0.0, left) / (1 << 20)


def _used(device: str, ranks: list[int]) -> float:
    """Bytes in use on the GPUs; for the CPU those of these processes."""
    if device == "cpu":
        return sum(map(_resident, ranks))
    from distkit.cluster import machine

    there = [gpu for gpu in machine.gpus()["found"] if "error" not in gpu]  # not one that is lost
    return float(sum(gpu["total"] - gpu["free"] for gpu in there))


def _resident(pid: int) -> float:
    import psutil

    try:
        return float(psutil.Process(pid).memory_info().rss)
    except psutil.Error:  # it has ended
        return 0.0


#: The figures: one table for the measurements, the report and docs/measured/README.md.
ROWS = [
    Row(
        f"Cluster({RANKS}) on one GPU to its first all_reduce",
        "s",
        f"{RANKS} processes by torchrun, with gloo",
        _start,
        {"must": 0.5, "aim": 0.3},
    ),
    Row(
        f"step of DDP (small CNN, {RANKS} ranks on one GPU), recorded",
        "ms",
        "the same not recorded",
        _training(RANKS),
        {"must": 1.05, "aim": 1.02},
    ),
    Row(
        f"all-reduce of {SIZE >> 20} MB, {RANKS} ranks on one GPU, shared_memory",
        "ms",
        "gloo on CUDA tensors",
        _reducing,
        {"must": 0.5, "aim": 0.2},
    ),
    Row(
        "step of DDP, one rank with NCCL, recorded",
        "ms",
        "the same not recorded",
        _training(1),
        {"must": 1.02},
    ),
    Row(
        "hang of GPU ranks to its finding",
        "s",
        "torch's own timeout, which names nobody",
        _finding,
        {"must": 2.0, "absolute": True},
    ),
    Row(
        "interrupt of hung GPU ranks to a usable cluster",
        "s",
        "torch's own timeout",
        _interrupting,
        {"must": 3.0, "absolute": True},
    ),
    *(
        Row(
            f"GPU memory left {WITHIN:.0f} s after {end}",
            "MiB",
            "",
            partial(_leaving, killed),
            {"must": 0, "absolute": True},
        )
        for end, killed in (("stop()", False), ("SIGKILL of the kernel", True))
    ),
]
