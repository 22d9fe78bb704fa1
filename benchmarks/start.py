"""Time to the first all_reduce (cold and warm), to the first DDP run, and for imports."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.driver import Driver, Log, interleave
from benchmarks.figure import Figure, fill
from benchmarks.house import size

#: There are WARM warm runs and IMPORTS imports per repetition of the slow measurements.
WARM, IMPORTS = 12, 4

FIRST = """
def first():
    import torch, torch.distributed as dist
    dist.all_reduce(torch.ones(1))

def seconds(run, start):  # to the end of the all_reduce on the last rank
    return max(e.time for e in run.trace if e.state == "completed") - start

import distkit
"""

#: Times Cluster(4) to the end of its first run, then warm runs.
CLUSTER = (
    FIRST
    + """
request()
start = time.monotonic()
cluster = distkit.Cluster(4)
cluster.run(first)
reply(time.monotonic() - start)
while request():
    start = time.monotonic()
    reply(seconds(cluster.run(first), start))
"""
)

#: Times the same with an ipyparallel cluster and code that turns its engines into ranks.
STOCK = """
def first(rank, store):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo", store=dist.FileStore(store, 4), rank=rank, world_size=4)
    dist.all_reduce(torch.ones(1))

import logging, ipyparallel
request()
start = time.monotonic()
cluster = ipyparallel.Cluster(n=4, log_level=logging.ERROR)
client = cluster.start_and_connect_sync()
calls = [client[r].apply_async(first, r, folder + "/store") for r in range(4)]
[call.get() for call in calls]
reply(time.monotonic() - start)
while request():
    start = time.monotonic()
    client[:].apply_sync(os.getpid)
    reply(time.monotonic() - start)
client.close()
cluster.stop_cluster_sync()
"""

RUN_RANKS = (
    FIRST
    + """
while request():
    start = time.monotonic()
    reply(seconds(distkit.run_ranks(first, 4), start))
"""
)

#: Times accelerate in a process that has imported torch, as a notebook has.
ACCELERATE = """
import socket
from pathlib import Path
import torch
from accelerate import Accelerator, notebook_launcher

def first():
    import torch.distributed as dist
    Accelerator(cpu=True)
    dist.all_reduce(torch.ones(1))
    Path(folder, f"rank{dist.get_rank()}").write_text(repr(time.monotonic()))
    dist.destroy_process_group()

while request():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    start = time.monotonic()
    notebook_launcher(first, num_processes=4, use_port=str(port))
    reply(max(float(file.read_text()) for file in Path(folder).glob("rank*")) - start)
"""

#: Times the first DDP run of a cluster that has been idle for five seconds.
DDP = (
    FIRST
    + """
def train():
    import torch
    from torch.nn.parallel import DistributedDataParallel
    net = DistributedDataParallel(torch.nn.Linear(4, 4))
    net(torch.ones(2, 4)).sum().backward()

request()
cluster = distkit.Cluster(2)
cluster.run(first)
time.sleep(5)
start = time.monotonic()
cluster.run(train)
reply(time.monotonic() - start)
"""
)

#: Replies with the files of distkit's modules loaded by four ranks and their parent.
MODULES = (
    FIRST
    + """
def loaded():
    import sys
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("distkit")]
    return [m.__file__ for m in modules]

request()
files = distkit.run_ranks(loaded, 4).results
reply(sorted({*loaded(), *sum(files, [])}))
"""
)

_TORCH, _STOCK = 'python -c "import torch"', "stock ipyparallel.Cluster(n=4)"
_FIRST = "from Cluster(4) in a fresh process to its first all_reduce"
_ACCELERATE = "accelerate's notebook_launcher"

FIGURES = {
    "cluster / torch": Figure(_FIRST, "s", reference=_TORCH, limit=1.15, target=1.05),
    "cluster / stock": Figure(_FIRST, "s", reference=_STOCK, limit=0.25),
    "run / accelerate": Figure(
        "from cluster.run(fn) on 4 ranks, warm, to its first all_reduce",
        "s",
        reference=_ACCELERATE,
        limit=0.8,
        target=0.5,
    ),
    "run_ranks / accelerate": Figure(
        "from run_ranks(fn, 4), warm, to its first all_reduce",
        "s",
        reference=_ACCELERATE,
        limit=1.5,
        target=0.8,
    ),
    "ddp": Figure(
        "first DDP run of an idle cluster, 2 ranks", "s", limit=0.4, target=0.15, absolute=True
    ),
    "modules": Figure(
        "modules of distkit loaded by run_ranks(fn, 4)", "modules", limit=40, absolute=True
    ),
    "statements": Figure(
        "statements of distkit loaded by run_ranks(fn, 4)",
        "statements",
        limit=4500,
        absolute=True,
    ),
    "distkit / numpy": Figure("import distkit", "s", reference="import numpy", limit=3),
}


def measure(reps: int, log: Log) -> tuple[list[Figure], dict[str, Any]]:
    """Measure ``reps`` fresh processes of each contender, then warm processes."""
    programs = {"cluster": CLUSTER, "stock": STOCK, "ddp": DDP}
    samples = interleave("start: fresh processes", reps, log, lambda: _run_fresh(programs))
    samples |= _measure_warm(reps * WARM, log)
    samples |= interleave("start: imports", reps * IMPORTS, log, _measure_imports)
    with Driver(MODULES) as driver:
        files = driver.request()
    samples |= {"modules": [len(files)], "statements": [sum(size(Path(f)) for f in files)]}
    return fill(FIGURES, samples, "reference missing: pip install accelerate"), samples


def _run_fresh(programs: dict[str, str]) -> dict[str, float]:
    seconds = {}
    for name, program in programs.items():
        with Driver(program) as driver:
            seconds[name] = float(driver.request())
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return {**seconds, "torch": time.monotonic() - start}


def _measure_warm(reps: int, log: Log) -> dict[str, list[float]]:
    """Time alternating runs in warm processes, after two warm-up runs of each."""
    programs = {"run": CLUSTER, "run_ranks": RUN_RANKS}
    if find_spec("accelerate") is not None:
        programs["accelerate"] = ACCELERATE
    with ExitStack() as stack:
        drivers = {name: stack.enter_context(Driver(text)) for name, text in programs.items()}
        samples = interleave(
            "start: warm", reps + 2, log, lambda: {n: d.request() for n, d in drivers.items()}
        )
    return {name: seconds[2:] for name, seconds in samples.items()}


def _measure_imports() -> dict[str, float]:
    """Return import times in fresh interpreters, without interpreter startup."""
    program = "from time import perf_counter as now\nstart = now()\nimport {}\nprint(now() - start)"
    return {
        name: float(subprocess.check_output([sys.executable, "-c", program.format(name)]))
        for name in ("distkit", "numpy")
    }
