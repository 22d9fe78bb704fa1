"""The programs that are measured, distkit's and its references', side by side.

They are texts, since each runs in a fresh Python (see :class:`benchmarks.driver.Driver`).
"""

_FIRST = """
def first():
    import torch, torch.distributed as dist
    dist.all_reduce(torch.ones(1))
"""

#: From the call of Cluster(4) to the first all_reduce done; then a second one, beside the first.
CLUSTER = (
    _FIRST
    + """
import distkit
clusters = []
while asked():
    start = time.monotonic()
    clusters.append(distkit.Cluster(4))
    clusters[-1].run(first)
    answer(time.monotonic() - start)
"""
)

#: The same with ipyparallel's own cluster and what its user writes to make ranks of engines.
STOCK = """
def first(rank, store):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo", store=dist.FileStore(store, 4), rank=rank, world_size=4)
    dist.all_reduce(torch.ones(1))

import logging, ipyparallel
asked()
start = time.monotonic()
cluster = ipyparallel.Cluster(n=4, log_level=logging.ERROR)
client = cluster.start_and_connect_sync()
calls = [client[r].apply_async(first, r, folder + "/store") for r in range(4)]
[call.get() for call in calls]
answer(time.monotonic() - start)
asked()
client.close()
cluster.stop_cluster_sync()
"""

#: From the call of run_ranks to the first all_reduce done on the last rank, by the trace's clock.
RUN_RANKS = (
    _FIRST
    + """
import distkit
while asked():
    start = time.monotonic()
    run = distkit.run_ranks(first, 4)
    answer(max(e.time for e in run.trace if e.state == "completed") - start)
"""
)

#: The same with accelerate, in a process that has imported torch, as a notebook has.
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

while asked():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    start = time.monotonic()
    notebook_launcher(first, num_processes=4, use_port=str(port))
    answer(max(float(file.read_text()) for file in Path(folder).glob("rank*")) - start)
"""

#: A cluster that is ready: its folder is told.
READY = (
    _FIRST
    + """
import distkit
asked()
cluster = distkit.Cluster(4)
cluster.run(first)
answer(cluster._room.folder)
asked()
"""
)


def on_device(device: str, then: str = "pass") -> str:
    """The same on a device; the answer has the ranks' processes, each with 64 MiB there, too."""
    return f"""
def first():
    import torch, torch.distributed as dist
    dist.all_reduce(torch.ones(1, device={device!r}))

def keep():
    global kept
    import os, torch
    kept = torch.ones(1 << 24, device={device!r})
    return os.getpid()

import distkit
asked()
start = time.monotonic()
cluster = distkit.Cluster(4, device={device!r})
cluster.run(first)
seconds = time.monotonic() - start
answer([seconds, cluster.run(keep).results])
asked()
{then}
answer(0)
asked()
"""
