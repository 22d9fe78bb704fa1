"""Workers, servers and a scheduler as processes; the workers run functions from a test."""

from __future__ import annotations

import os
import queue
import random
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import waiting

from distkit import kvstore
from distkit.errors import KVStoreError
from distkit.kvstore import KVStore, Node
from distkit.recording import recorder
from distkit.trace.trace import Trace

WAIT = 20.0  # time limit of each wait [s]
wait_until = partial(waiting.wait_until, timeout=WAIT)
CONTEXT = get_context("forkserver")  # forks from a single-threaded process that has imported torch

Function = Callable[[KVStore], Any]


#: Number of elements of an array that is too large to be sent with the header.
LARGE = 300_000


def push_until_stopped(flag: str, stop: str, **options) -> float:
    """Push until the test creates ``stop``; return the largest error of the pulled values."""
    kv = kvstore.create("dist_async", **options)
    kv.set_optimizer(kvstore.SGD(learning_rate=-1))
    kv.init(["w", "large", "sent"], [torch.zeros(3), torch.zeros(LARGE), torch.zeros(1)])
    Path(flag).touch()
    sent = 0
    while not Path(stop).exists():
        kv.push(["w", "large"], [torch.ones(3), torch.ones(LARGE)])
        sent += 1
        kv.pull(["w", "large"])
    kv.push("sent", torch.tensor([float(sent)]))
    kv.barrier()
    small, large, total = kv.pull(["w", "large", "sent"])
    return max((v - total).abs().max().item() for v in (small, large))


# -- in the nodes ----------------------------------------------------------------


def serve(node: Node, connection: Connection, record: bool) -> None:
    """Run a server or the scheduler; a second thread handles the test's commands."""
    _set_recording(node, "record" if record else "stop")
    service = kvstore.Service(node)
    service.report = lambda kind, data: Path(node.folder, kind).write_text(str(data))

    def handle(command: Any) -> None:
        if isinstance(command, tuple):  # a process has exited
            service.handle_departure(*command)
        else:
            connection.send(_set_recording(node, command))

    threading.Thread(target=_receive, args=(connection, handle), daemon=True).start()
    try:
        service.run()
    except KVStoreError as e:
        connection.send(str(e))


def _receive(connection: Connection, handle: Callable[[Any], None]) -> None:
    """Handle the test's commands; exit when the test ends."""
    try:
        while True:
            handle(connection.recv())
    except (EOFError, OSError):
        os._exit(0)


def _set_recording(node: Node, command: str) -> list[recorder.Row]:
    """Start or stop recording; return the rows recorded since the last call."""
    last = recorder.current()
    recorder.set_current(recorder.Recorder(node.id) if command == "record" else None)
    return last.drain() if last else []


def work(node: Node, connection: Connection, record: bool) -> None:
    """Run a worker, which executes one function after another."""
    torch.set_num_threads(1)
    calls = queue.SimpleQueue[Any]()
    threading.Thread(target=_receive, args=(connection, calls.put), daemon=True).start()
    while True:
        mode, function, options, command, incarnation = calls.get()
        _set_recording(node, command)
        try:
            connection.send("started")
            kvstore.use(replace(node, incarnation=incarnation))
            result = function(kvstore.create(mode, **options))
            kvstore.release()
        except BaseException as e:
            kvstore.release(flush=False)
            result = f"{type(e).__name__}: {e}"
        connection.send((result, _set_recording(node, "stop")))


# -- in the test -----------------------------------------------------------------


class Nodes:
    """Workers, and servers and a scheduler that are restarted for each run.

    Args:
        workers: number of workers.
        servers: number of servers.
        folder: the folder for their sockets.
        others: other fields of all nodes.
    """

    def __init__(self, workers: int, servers: int, folder: str, **others: Any) -> None:
        self.workers, self.servers, self.folder = workers, servers, folder
        self.others = others
        self.connections: dict[int, Connection] = {}
        self.processes: dict[int, Any] = {}
        for i in range(workers):
            self.start("worker", i)

    def restart_servers(self, record: bool) -> None:
        """Stop the servers and the scheduler from the last run, and start new ones."""
        self.end([n for n in self.processes if n >= self.workers])
        for path in Path(self.folder).glob("run-*"):
            path.unlink()
        self.start("scheduler", 0, record)
        for i in range(self.servers):
            self.start("server", i, record)

    def start(self, role: str, index: int, record: bool = False, **other: Any) -> int:
        fields: dict[str, Any] = {"workers": self.workers, "servers": self.servers}
        fields |= {"folder": self.folder} | self.others | other
        node = Node(role, index, **fields)
        mine, theirs = CONTEXT.Pipe()
        target = work if role == "worker" else serve
        process = CONTEXT.Process(target=target, args=(node, theirs, record), daemon=True)
        process.start()
        theirs.close()
        self.connections[node.id], self.processes[node.id] = mine, process
        threading.Thread(target=self._report_end, args=(node.id, process), daemon=True).start()
        return node.id

    def _report_end(self, node: int, process: Any) -> None:
        """Report the exit of a process to the scheduler, unless the test killed the process."""
        wait([process.sentinel])
        scheduler = self.connections.get(self.workers + self.servers)
        if scheduler is not None and self.processes.get(node) is process:
            with suppress(OSError):  # the scheduler has also exited
                scheduler.send((node, 0, "signal SIGKILL"))

    def begin(
        self,
        mode: str,
        function: Function,
        *,
        record: bool = False,
        only: list[int] | None = None,
        join: bool = False,
        incarnation: int = 0,
        **options: Any,
    ) -> None:
        """Start a run, or join the current one, without waiting for it to finish."""
        if not join:
            self.restart_servers(record)
        command = "record" if record else "stop"
        for worker in range(self.workers) if only is None else only:
            self.connections[worker].send((mode, function, options, command, incarnation))
            assert self.receive(worker) == "started"

    def result(self, worker: int) -> Any:
        return self.receive(worker)[0]

    def receive(self, node: int) -> Any:
        assert self.connections[node].poll(WAIT), f"node {node} does not reply"
        return self.connections[node].recv()

    def run(self, mode: str, function: Function, **options: Any) -> list[Any]:
        self.begin(mode, function, **options)
        return [self.result(w) for w in range(self.workers)]

    def trace(self, mode: str, function: Function) -> tuple[list[Any], Trace]:
        """Record a run; return its results and trace."""
        services = range(self.workers, self.workers + self.servers + 1)
        self.begin(mode, function, record=True)
        replies = [self.receive(w) for w in range(self.workers)]
        rows = {w: rows for w, (_, rows) in enumerate(replies)}
        rows |= {node: self.request(node, "stop") for node in services}
        events = [e for node, mine in rows.items() for e in recorder.to_table(node, mine)]
        return [result for result, _ in replies], Trace(events)

    def request(self, node: int, command: str) -> Any:
        self.connections[node].send(command)
        return self.receive(node)

    def end(self, nodes: list[int]) -> None:
        for node in nodes:
            self.connections.pop(node).close()
        for node in nodes:
            process = self.processes.pop(node)
            process.join(WAIT)
            assert not process.is_alive()


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> Iterator[None]:
    """Set the modules that the nodes' fork server preloads; stop the server at the end."""
    # the package imports lazily: without the module, each node would import torch
    CONTEXT.set_forkserver_preload(["distkit.kvstore.client.worker"])
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


@contextmanager
def start_nodes(workers: int, servers: int, **others: Any) -> Iterator[Nodes]:
    """Start nodes for a test."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        nodes = Nodes(workers, servers, folder, **others)
        yield nodes
        nodes.end([*nodes.processes])


def interrupt(nodes: Nodes, worker: int) -> tuple[float, list[recorder.Row]]:
    """Interrupt a waiting worker; return the time until it raised [s], and its rows."""
    process = psutil.Process(nodes.processes[worker].pid)
    wait_until(lambda: process.status() == psutil.STATUS_SLEEPING)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    result, rows = nodes.receive(worker)
    assert result == "KeyboardInterrupt: "
    return time.monotonic() - start, rows


def send_random_bytes(path: Path, count: int) -> None:
    """Send random bytes to a Unix socket; reconnect whenever it is closed."""
    rng = random.Random(0)
    connection: socket.socket | None = None
    for _ in range(count):
        try:
            if connection is None:
                connection = socket.socket(socket.AF_UNIX)
                connection.settimeout(5)
                connection.connect(str(path))
            connection.sendall(rng.randbytes(rng.randrange(1, 200)))
        except OSError:
            if connection is not None:
                connection.close()
            connection = None
    if connection is not None:
        connection.close()
