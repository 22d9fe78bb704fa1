"""What a killed worker and random bytes do to a parameter server's run."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from distkit.bench.figure import Figure
from distkit.errors import DistkitError

#: Workers and servers; random byte strings for each socket.
WORKERS, SERVERS, STRINGS = 4, 2, 10_000

#: Seconds until a worker is killed, and until the others have seen enough.
_KILL, _END = 0.5, 1.5


def measure(say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """One cluster for each row."""
    say("kvstore: a worker is killed")
    gaps = killed()
    say(f"kvstore: {STRINGS:,} random byte strings to each socket")
    wrong, sockets = strings(STRINGS)
    after = [1e3 * gap for _, gap in gaps]
    before = [1e3 * gap for gap, _ in gaps]
    return [
        Figure(
            f"dist_async, a worker killed: longest pause of the other {WORKERS - 1} afterwards "
            f"(before: {max(before):.1f} ms)", "ms", max(after), min(after), max(after),
            len(after), must=100, absolute=True,
        ),
        Figure(f"{STRINGS:,} random byte strings to each of {sockets} sockets: values that differ",
               "", wrong, must=0, absolute=True),
    ], {"pauses_ms": {"before": before, "after": after}}  # fmt: skip


def killed() -> list[tuple[float, float]]:
    """Each survivor's longest time between two answers [s], before and after a worker's death."""
    from distkit.cluster.cluster import Cluster

    with tempfile.TemporaryDirectory(prefix="distkit-bench-") as folder:
        with Cluster(workers=WORKERS, servers=SERVERS) as cluster:
            run = cluster._submit(go_on, (folder,), {}, record=False)
            with suppress(DistkitError):
                run.wait()
        found = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
        return [(before, after) for before, after in found]


def go_on(folder: str) -> None:
    """Push and pull; the last worker is killed meanwhile, the others write their pauses down."""
    import torch

    from distkit import kvstore

    kv = kvstore.create("dist_async")
    kv.set_optimizer(kvstore.SGD(learning_rate=0.5))
    kv.init("w", torch.zeros(1000))
    kv.barrier()
    start = last = time.monotonic()
    gaps = [0.0, 0.0]
    while last < start + _END:
        if kv.rank == kv.num_workers - 1 and last > start + _KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        kv.push("w", torch.ones(1000))
        kv.pull("w")
        now = time.monotonic()
        half = int(last > start + _KILL)
        gaps[half], last = max(gaps[half], now - last), now
    Path(folder, f"{kv.rank}.json").write_text(json.dumps(gaps))


def strings(count: int) -> tuple[int, int]:
    """Send random bytes to each socket of a cluster at work: wrong values, number of sockets."""
    from distkit.cluster.cluster import Cluster

    with Cluster(workers=2, servers=1) as cluster, tempfile.NamedTemporaryFile() as flag:
        cluster.wait()
        paths = [p for p in Path(cluster._room.folder).iterdir() if p.is_socket()]
        run = cluster._submit(add_up, (flag.name,), {}, record=False)
        for path in paths:
            throw(path, count)
        flag.write(b"x")
        flag.flush()
        results = run.wait().results
        return sum(value != expected for value, expected in results), len(paths)


def add_up(flag: str) -> tuple[float, float]:
    """Push ones until the flag is written; the value that came of it, and what it should be."""
    import torch

    from distkit import kvstore

    kv = kvstore.create("dist_async")
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    kv.init(["w", "pushes"], [torch.zeros(1, dtype=torch.float64)] * 2)
    mine = 0
    while not Path(flag).stat().st_size:
        kv.push("w", torch.ones(1, dtype=torch.float64))
        kv.pull("w")
        mine += 1
    kv.push("pushes", torch.tensor([mine], dtype=torch.float64))
    kv.barrier()
    value, pushes = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    kv.pull(["w", "pushes"], [value, pushes])
    return value.item(), pushes.item()


def throw(path: Path, count: int) -> None:
    """Random byte strings to a Unix socket: a new connection whenever it has been hung up."""
    chance = random.Random(0)
    line: socket.socket | None = None
    for _ in range(count):
        try:
            if line is None:
                line = socket.socket(socket.AF_UNIX)
                line.settimeout(5)
                line.connect(str(path))
            line.sendall(chance.randbytes(chance.randrange(1, 200)))
        except OSError:
            if line is not None:
                line.close()
            line = None
    if line is not None:
        line.close()
