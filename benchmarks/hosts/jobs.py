"""What runs on the laboratory's head: ``python -m benchmarks.hosts.jobs NAME``; it prints JSON."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import Any

#: Ranks on each host.
EACH = {"alpha": 2, "beta": 2, "gamma": 2}


def say(**words: Any) -> None:
    """Print a line of JSON."""
    print(json.dumps(words), flush=True)


def total() -> float:
    """One all-reduce; the sum is the number of ranks."""
    import torch
    import torch.distributed as dist

    x = torch.ones(1)
    dist.all_reduce(x)
    return float(x)


def ours() -> None:
    """Start, and the first all-reduce."""
    began = time.perf_counter()
    import distkit as dk

    with dk.Cluster(hosts=EACH) as cluster:
        results = cluster.run(total).results
        say(seconds=time.perf_counter() - began, results=results)


def theirs() -> None:
    """The same by hand: ipyparallel's own SSH cluster, torch, gloo."""
    began = time.perf_counter()
    import ipyparallel
    from traitlets.config import Config

    from distkit.cluster.machine import own_address

    config = Config()
    config.SSHEngineSetLauncher.engines = dict(EACH)
    config.SSHEngineSetLauncher.remote_python = sys.executable
    here = own_address("alpha")
    with ipyparallel.Cluster(
        n=6, engines="ssh", config=config, controller_ip=here, controller_location=here
    ) as client:
        client.wait_for_engines(6, timeout=180)
        view = client[:]
        address = view.apply_sync(_address)[0]
        replies = [client[i].apply_async(_join, rank, address) for rank, i in enumerate(client.ids)]
        results = [reply.get() for reply in replies]
        say(seconds=time.perf_counter() - began, results=results)


def _address() -> str:
    from distkit.cluster.machine import own_address

    return own_address("head")


def _join(rank: int, address: str) -> float:
    import os

    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo", init_method=f"tcp://{address}:29511", rank=rank, world_size=6)
    x = torch.ones(1)
    dist.all_reduce(x)
    return float(x)


def _for_ever() -> None:
    while True:
        total()


def working() -> None:
    """Work until it is ended, or hears that a machine is lost."""
    import distkit as dk

    with dk.Cluster(hosts=EACH) as cluster:
        cluster.run(total)
        run = cluster.submit(_for_ever)
        say(working=True)
        try:
            run.wait()
        except Exception as error:
            say(at=time.monotonic(), error=str(error))


#: Ways to reduce: torch's own, and names of ours.
GLOO, RING, HIERARCHICAL, SHARED = WAYS = (
    "gloo's own ring",
    "ring",
    "hierarchical",
    "shared_memory",
)
#: Bytes of a tensor that is reduced, how often, and those of pings and sums for the formulas.
REDUCED, TIMES = 1 << 22, 7
SIZES = (1 << 12, 1 << 18, 1 << 20, 1 << 22)


def _times() -> dict[str, Any]:
    """Seconds of all-reduces, of messages between hosts and inside, and of sums; by rank 0."""
    import torch
    import torch.distributed as dist

    from distkit.algorithms.shared_memory import Segment
    from distkit.algorithms.use import page

    rank, x = dist.get_rank(), torch.ones(REDUCED // 4)

    def slowest(call: Any) -> float:
        """Seconds until the last rank is done."""
        dist.barrier()
        began = time.perf_counter()
        call()
        took = torch.tensor([time.perf_counter() - began])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return float(took)

    def ping(nbytes: int, a: int, b: int) -> float:
        """Half of there and back."""
        x = torch.ones(nbytes // 4)

        def there_and_back() -> None:
            if rank == a:
                dist.send(x, b)
                dist.recv(x, b)
            elif rank == b:
                dist.recv(x, a)
                dist.send(x, a)

        return slowest(there_and_back) / 2

    def inside(nbytes: int) -> float:
        """Half of there and back in memory."""
        x = torch.ones(nbytes // 4)
        segment = Segment.of(x, None)

        def both() -> None:
            segment.reduce(x, dist.ReduceOp.SUM)
            segment.broadcast(x)

        return slowest(both) / 2

    def add(nbytes: int) -> float:
        x = torch.ones(nbytes // 4)
        began = time.perf_counter()
        x += x
        return time.perf_counter() - began

    def reduce(name: str) -> float:
        return slowest(partial(dist.all_reduce if name == GLOO else page(name), x))

    took: dict[str, list[float]] = {name: [] for name in WAYS}
    for name in WAYS:
        reduce(name)  # the first time connections are made
    for _ in range(TIMES):
        for name in WAYS:
            took[name].append(reduce(name))
    ways = {
        "between": lambda size: ping(size, 0, 2),
        "messages": lambda size: ping(size, 0, 1),
        "memory": inside,
        "adds": add,
    }
    pings = {
        way: {size: [call(size) for _ in range(TIMES)] for size in SIZES}
        for way, call in ways.items()
    }
    return {"took": took, "nbytes": REDUCED, **pings}


def reducing() -> None:
    """How long all-reduces take between the machines, and messages and sums."""
    import distkit as dk

    with dk.Cluster(hosts=EACH) as cluster:
        say(**cluster.run(_times).results[0])


def dealing() -> None:
    """The same with the ranks dealt round the machines, as ``--map-by node`` has them."""
    import distkit as dk

    n, dealt = sum(EACH.values()), ["--map-by", "node"]
    with dk.Cluster(n, hosts=list(EACH), engines="mpi", mpi_args=dealt) as cluster:
        say(**cluster.run(_times).results[0])


def _hang() -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 0:
        dist.recv(torch.ones(1), src=1)
    else:
        dist.barrier()


def hanging() -> None:
    """How long a hang lasts over three machines; and what the clocks are thought to be."""
    import distkit as dk

    with dk.Cluster(hosts=EACH) as cluster:
        cluster.run(total)
        for _ in range(5):
            began = time.monotonic()
            try:
                cluster.run(_hang)
            except dk.DeadlockError as error:
                say(seconds=time.monotonic() - began, error=str(error))
        time.sleep(3)  # of comparisons
        for place in cluster._room._places:
            clock = place.server.clock
            assert clock is not None
            say(host=place.name, offset=clock.seconds, bound=clock.error)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
