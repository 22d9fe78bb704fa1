"""References for the parameter server: MXNet's, or an echo of the same bytes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from distkit.errors import DistkitError

MXNET = "MXNet 1.9.1's"
ECHO = "a bare ZeroMQ echo's (MXNet's: set DISTKIT_MXNET_PYTHON)"

#: A program for MXNet's Python. It runs and times a job for each line of its input.
_MXNET_PROGRAM = """
import json, os, sys, time
replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
import mxnet as mx      # servers and the scheduler run inside this import
if os.environ["DMLC_ROLE"] != "worker":
    sys.exit()
from mxnet import autograd, gluon
import numpy as np
mode, path, batch, rate = json.loads(sys.argv[1])

def timed(kv, call, calls):
    for _ in range(max(3, calls // 5)):
        call()
    mx.nd.waitall()
    kv._barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    mx.nd.waitall()
    seconds = (time.perf_counter() - start) / calls
    kv._barrier()
    return seconds

def trips():
    kv = mx.kv.create(mode)
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5, rescale_grad=1.0))
    kv._barrier()
    arrays = {}
    def job(sizes):
        times = {}
        for size, calls in sizes.items():
            if size not in arrays:
                arrays[size] = mx.nd.zeros((int(size) // 4,)), mx.nd.ones((int(size) // 4,))
                kv.init(len(arrays), arrays[size][0])
                kv._barrier()
            w, g = arrays[size]
            key = list(arrays).index(size) + 1
            def trip():
                kv.push(key, g)
                kv.pull(key, out=w)
                w.wait_to_read()
            times[size] = timed(kv, trip, calls)
        return times
    return job

def train():
    with np.load(path) as data:
        x, y = data["x"], data["y"]
    rank, world = int(os.environ["RANK"]), int(os.environ["DMLC_NUM_WORKER"])
    x, y = x[rank::world], y[rank::world]
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(128, activation="relu", in_units=64), gluon.nn.Dense(10, in_units=128))
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": rate}, kvstore=mode,
                            update_on_kvstore=True)
    batches = [(mx.nd.array(x[i:i + batch]), mx.nd.array(y[i:i + batch]))
               for i in range(0, len(x) - batch + 1, batch)]
    examples, done = batch * (world if mode == "dist_sync" else 1), [0]
    def step():
        images, labels = batches[done[0] % len(batches)]
        done[0] += 1
        with autograd.record():
            value = loss(net(images), labels)
        value.backward()
        trainer.step(examples)
    step()
    return lambda steps: {"step": timed(trainer._kvstore, step, steps)}

jobs = {}
for line in sys.stdin:
    kind, what = json.loads(line)
    if kind not in jobs:
        jobs[kind] = {"trips": trips, "steps": train}[kind]()
    replies.write(json.dumps(jobs[kind](what)) + "\\n")
    replies.flush()
"""


class Reference(Protocol):
    """A running program with which distkit is compared."""

    name: str

    def run(self, job: tuple[str, Any]) -> list[dict[Any, float]]:
        """Run a job and return each worker's times [s]."""


def digits() -> tuple[Any, Any]:
    """Return digits (1797, 64) with values in [0, 1], and labels (1797,), in random order."""
    import numpy as np
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    return (x[order] / 16).astype("float32"), y[order]


@contextmanager
def reference(
    python: str | None, workers: int, servers: int, mode: str, data: Any
) -> Iterator[Reference]:
    """Run MXNet if its Python is configured; otherwise, yield an echo."""
    if python is None:
        yield Echo()
        return
    with tempfile.TemporaryDirectory(prefix="distkit-bench-") as folder:
        clusters = [
            MXNetCluster(python, workers, servers, mode, data, Path(folder)) for _ in range(2)
        ]
        try:
            yield MXNet(*clusters)
        finally:
            for cluster in clusters:
                cluster.close()


class MXNet:
    """Two MXNet clusters with separate optimizers, for round trips and for training."""

    name = MXNET

    def __init__(self, trips: MXNetCluster, steps: MXNetCluster) -> None:
        self._clusters = {"trips": trips, "steps": steps}

    def run(self, job: tuple[str, Any]) -> list[dict[Any, float]]:
        """Run a job and return each worker's times [s]."""
        return self._clusters[job[0]].run(job)


class MXNetCluster:
    """MXNet's scheduler, servers and workers, on the loopback interface."""

    def __init__(
        self, python: str, workers: int, servers: int, mode: str, data: Any, folder: Path
    ) -> None:
        import numpy as np

        from benchmarks.kvstore import BATCH, RATE

        np.savez(folder / "digits.npz", x=data[0], y=data[1])
        arguments = json.dumps([mode, str(folder / "digits.npz"), BATCH, RATE])
        self._log = (folder / "log").open("ab")
        common = {
            **os.environ,
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(_free_port()),
            "DMLC_NODE_HOST": "127.0.0.1",
            "DMLC_NUM_SERVER": str(servers),
            "DMLC_NUM_WORKER": str(workers),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
        }
        roles = [
            ("scheduler", 0),
            *(("server", i) for i in range(servers)),
            *(("worker", i) for i in range(workers)),
        ]
        self._processes = [
            subprocess.Popen(
                [python, "-c", _MXNET_PROGRAM, arguments],
                stderr=self._log,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env={**common, "DMLC_ROLE": role, "RANK": str(i)},
            )
            for role, i in roles
        ]
        self._workers = self._processes[-workers:]

    def run(self, job: tuple[str, Any]) -> list[dict[Any, float]]:
        """Run a job and return each worker's times [s]."""
        for process in self._workers:
            _pipe(process.stdin).write(json.dumps(job).encode() + b"\n")
        lines = [_pipe(process.stdout).readline() for process in self._workers]
        if not all(lines):
            log = Path(self._log.name).read_text(errors="replace")[-1000:]
            raise DistkitError(f"MXNet did not reply. The end of its log:\n{log}")
        results = [json.loads(line) for line in lines]
        return [{k if k == "step" else int(k): v for k, v in result.items()} for result in results]

    def close(self) -> None:
        """Close the inputs and kill the processes that are still running 5 s later."""
        for process in self._processes:
            _pipe(process.stdin).close()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _pipe(process.stdout).close()
        self._log.close()


class Echo:
    """A socket that echoes messages."""

    name = ECHO

    def run(self, job: tuple[str, Any]) -> list[dict[Any, float]]:
        """Return the time of one worker's round trips [s], or nothing for training."""
        kind, trips = job
        if kind != "trips":
            return [{}]
        return [{size: _echo(size, calls) for size, calls in trips.items()}]


def _echo(size: int, calls: int) -> float:
    """Return the time of a round trip of ``size`` bytes [s]."""
    import zmq

    with (
        zmq.Context() as context,
        context.socket(zmq.PAIR) as client,
        context.socket(zmq.PAIR) as server,
    ):
        client.connect(f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}")

        def serve() -> None:
            for _ in range(calls + 1):
                server.send(server.recv(copy=False), copy=False)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        message = bytes(size)
        for call in range(calls + 1):
            if call == 1:
                start = time.perf_counter()
            client.send(message, copy=False)
            client.recv(copy=False)
        seconds = (time.perf_counter() - start) / calls
        thread.join()
        return seconds


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
