"""What crashes, faults and random bytes do to a parameter server's run."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure, figure
from benchmarks.kvstore_schedules import at_random
from distkit.errors import CommunicationWarning, DistkitError

#: Workers and servers; random byte strings for each socket; random schedules of faults.
WORKERS, SERVERS, STRINGS, SCHEDULES = 4, 2, 10_000, 500

#: Seconds until somebody is killed, and until the others have seen enough; servers killed.
_KILL, _END, _TIMES = 0.5, 1.5, 4


def measure(say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """One cluster for each of those that are killed or molested, and schedules without any."""
    say("kvstore: a worker is killed")
    gaps = worker_killed()
    say(f"kvstore: a server is killed, {_TIMES} times")
    ends = servers_killed(_TIMES)
    say(f"kvstore: {SCHEDULES} random schedules of faults")
    broken = [seed for seed in range(SCHEDULES) if at_random(seed)]
    say(f"kvstore: {STRINGS:,} random byte strings to each socket")
    wrong, sockets = strings(STRINGS)
    before, after = ([1e3 * gap for gap in found] for found in zip(*gaps, strict=True))
    pauses = [end["pause"] for end in ends]
    pushes = sum(end["pushes"] for end in ends)
    return [
        Figure(
            f"dist_async, a worker killed: longest pause of the other {WORKERS - 1} afterwards "
            f"(before: {max(before):.1f} ms)",
            "ms",
            max(after),
            min(after),
            max(after),
            len(after),
            must=100,
            absolute=True,
        ),
        figure(
            f"a server of {SERVERS} killed, replication 2: longest pause of {WORKERS} workers",
            "s",
            pauses,
            must=5,
            aim=1,
            absolute=True,
        ),
        Figure(
            f"a server of {SERVERS} killed, replication 2, {_TIMES} times: of {pushes:,} "
            "acknowledged pushes lost or counted twice",
            "",
            sum(end["wrong"] for end in ends),
            must=0,
            absolute=True,
        ),
        Figure(
            f"{SCHEDULES} random schedules of crashes, delays and echoes: those in which a "
            "push did not count exactly once",
            "",
            len(broken),
            must=0,
            absolute=True,
        ),
        Figure(
            f"{STRINGS:,} random byte strings to each of {sockets} sockets: values that differ",
            "",
            wrong,
            must=0,
            absolute=True,
        ),
    ], {
        "pauses_ms": {"before": before, "after": after},
        "servers_killed": ends,
        "broken_schedules": broken,
    }


@contextmanager
def _unwarned() -> Iterator[None]:
    """Nobody needs to be told who was killed here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CommunicationWarning)
        yield


def worker_killed() -> list[tuple[float, float]]:
    """Each survivor's longest time between two answers [s], before and after a worker's death."""
    from distkit.cluster.cluster import Cluster

    with tempfile.TemporaryDirectory(prefix="distkit-bench-") as folder:
        with Cluster(workers=WORKERS, servers=SERVERS) as cluster:
            run = cluster._submit(go_on, (folder, None), {}, record=False)
            with suppress(DistkitError), _unwarned():
                run.wait()
        found = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
        return [(said["before"], said["after"]) for said in found]


def servers_killed(times: int) -> list[dict[str, Any]]:
    """For each death of a server: the longest pause [s], all pushes, and those that are wrong."""
    from distkit.cluster.cluster import Cluster

    ends = []
    with Cluster(workers=WORKERS, servers=SERVERS).wait() as cluster:
        for time_ in range(times):
            victim = cluster._room.nodes.children[WORKERS + time_ % SERVERS].pid
            with tempfile.TemporaryDirectory(prefix="distkit-bench-") as folder:
                run = cluster._submit(go_on, (folder, victim), {"replication": 2}, record=False)
                with _unwarned():
                    run.wait()
                cluster._room.settled.wait()  # another has its place
                said = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
            sent = sum(each["sent"] for each in said)
            ends.append(
                {
                    "pause": max(each["after"] for each in said),
                    "before": max(each["before"] for each in said),
                    "pushes": sent * len(said[0]["values"]),
                    "wrong": sum(abs(sent - value) for value in said[0]["values"]),
                }
            )
    return ends


def go_on(folder: str, server: int | None, **options: Any) -> None:
    """Push and pull while somebody is killed: a server, or else the last worker.

    Each worker writes down its longest pauses before and after, how often it pushed each key,
    and what became of the keys.
    """
    import torch

    from distkit import kvstore

    kv = kvstore.create("dist_async", **options)
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    keys, ones = list(range(8)), torch.ones(1000, dtype=torch.float64)  # on both servers
    kv.init(keys, [torch.zeros_like(ones)] * len(keys))
    kv.barrier()
    start = last = time.monotonic()
    gaps, sent = [0.0, 0.0], 0
    armed = kv.rank == (kv.num_workers - 1 if server is None else 0)
    while last < start + _END:
        if armed and last > start + _KILL:
            armed = False
            os.kill(os.getpid() if server is None else server, signal.SIGKILL)
        kv.push(keys, [ones] * len(keys))
        kv.pull(keys)
        sent += 1
        now = time.monotonic()
        half = int(last > start + _KILL)
        gaps[half], last = max(gaps[half], now - last), now
    kv.barrier()
    values: Any = kv.pull(keys)
    Path(folder, f"{kv.rank}.json").write_text(
        json.dumps(
            {
                "before": gaps[0],
                "after": gaps[1],
                "sent": sent,
                "values": [value[0].item() for value in values],
            }
        )
    )


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
