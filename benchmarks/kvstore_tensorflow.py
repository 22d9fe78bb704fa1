"""TensorFlow's ParameterServerStrategy, which is always asynchronous, on the digits MLP.

Set ``DISTKIT_TENSORFLOW_PYTHON`` to the path of a separate Python with ``tensorflow-cpu``. The
servers listen on all interfaces, so they run in a network namespace, which requires Linux with
unshare and ip.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from distkit.errors import DistkitError

NAME = "TensorFlow's ParameterServerStrategy"
MISSING = f"{NAME}: set DISTKIT_TENSORFLOW_PYTHON"

#: Training steps per call of the coordinator: one, as in TensorFlow's tutorial, and several.
CALLS = {"step": 1, "ten steps per call": 10}

#: A program that coordinates servers and workers; each input line is a number of steps to time.
_PROGRAM = """
import json, os, socket, subprocess, sys, threading, time
replies = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
workers, servers, path, batch, rate, calls = json.loads(sys.argv[1])

def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

if "TF_CONFIG" not in os.environ:
    nodes = {"chief": 1, "worker": workers, "ps": servers}
    nodes = {k: ["127.0.0.1:%d" % port() for _ in range(n)] for k, n in nodes.items()}
    def config(kind, i):
        return json.dumps({"cluster": nodes, "task": {"type": kind, "index": i}})
    children = [subprocess.Popen([sys.executable, "-c", program, sys.argv[1]],
                                 stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                 env={**os.environ, "TF_CONFIG": config(kind, i)})
                for kind in ("ps", "worker") for i in range(len(nodes[kind]))]
    os.environ["TF_CONFIG"] = config("chief", 0)

import numpy as np
import tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type != "chief":
    tf.distribute.Server(resolver.cluster_spec(), job_name=resolver.task_type,
                         task_index=resolver.task_id, protocol="grpc")
    sys.stdin.read()    # until the chief exits
    os._exit(0)

strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    w1 = tf.Variable(tf.random.uniform((64, 128), -0.125, 0.125))
    b1 = tf.Variable(tf.zeros(128))
    w2 = tf.Variable(tf.random.uniform((128, 10), -0.088, 0.088))
    b2 = tf.Variable(tf.zeros(10))
with np.load(path) as data:
    x, y = data["x"], data["y"].astype("int64")

def dataset():
    whole = tf.data.Dataset.from_tensor_slices((x, y)).cache().shuffle(len(x))
    return whole.batch(batch, drop_remainder=True).repeat().prefetch(4)

def training(count):
    @tf.function
    def steps(batches):
        for _ in range(count):
            images, labels = next(batches)
            with tf.GradientTape() as tape:
                logits = tf.matmul(tf.nn.relu(tf.matmul(images, w1) + b1), w2) + b2
                loss = tf.reduce_mean(
                    tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            weights = [w1, b1, w2, b2]
            for w, g in zip(weights, tape.gradient(loss, weights)):
                w.assign_sub(rate * g)
    return steps

batches = iter(coordinator.create_per_worker_dataset(dataset))
jobs = {what: (count, training(count)) for what, count in calls.items()}

def many(steps, count):
    for _ in range(count):
        coordinator.schedule(steps, args=(batches,))
    coordinator.join()

for line in sys.stdin:
    requested, results = json.loads(line), {}
    for what, (count, steps) in jobs.items():
        each = max(1, requested // count)
        many(steps, workers * max(3, each // 5))
        start = time.perf_counter()
        many(steps, workers * each)
        results[what] = (time.perf_counter() - start) / (each * count)
    hidden = np.maximum(x @ w1.numpy() + b1.numpy(), 0)
    results["accuracy"] = float(((hidden @ w2.numpy() + b2.numpy()).argmax(1) == y).mean())
    replies.write(json.dumps(results) + "\\n")
    replies.flush()
for child in children:
    child.stdin.close()
for child in children:
    child.wait()
os._exit(0)
"""

_NETNS = [
    "unshare",
    "--map-root-user",
    "--net",
    "sh",
    "-c",
    'ip link set lo up; exec "$@"',
    "sh",
]


class TensorFlow:
    """A coordinator, servers and workers in a network namespace."""

    def __init__(self, python: str, workers: int, servers: int, data: Any, folder: Path) -> None:
        import numpy as np

        from benchmarks.kvstore import BATCH, RATE

        np.savez(folder / "digits.npz", x=data[0], y=data[1])
        arguments = [workers, servers, str(folder / "digits.npz"), BATCH, RATE, CALLS]
        program = f"program = {_PROGRAM!r}\nexec(program)"
        environ = {
            "CUDA_VISIBLE_DEVICES": "",
            "GRPC_FAIL_FAST": "use_caller",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "OMP_NUM_THREADS": "1",
            "HOME": str(folder),
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        }
        self._log = (folder / "log").open("ab")
        self._process = subprocess.Popen(
            [*_NETNS, python, "-c", program, json.dumps(arguments)],
            stderr=self._log,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def run(self, steps: int) -> dict[str, float]:
        """Return a worker's time per step [s] for each entry in ``CALLS``."""
        stdin, stdout = self._pipes()
        stdin.write(json.dumps(steps).encode() + b"\n")
        line = stdout.readline()
        if not line:
            log = Path(self._log.name).read_text(errors="replace")[-1000:]
            raise DistkitError(f"TensorFlow did not reply. The end of its log:\n{log}")
        results: dict[str, float] = json.loads(line)
        accuracy = results.pop("accuracy")
        assert accuracy > 0.5, f"TensorFlow's model did not learn: accuracy {accuracy:.0%}"
        return results

    def close(self) -> None:
        """Close the input of the coordinator, which then stops the other processes and exits."""
        stdin, stdout = self._pipes()
        stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        stdout.close()
        self._log.close()

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process.stdin is not None and self._process.stdout is not None
        return self._process.stdin, self._process.stdout


@contextmanager
def tensorflow(
    python: str | None, workers: int, servers: int, data: Any
) -> Iterator[TensorFlow | None]:
    """Run TensorFlow if its Python is configured; otherwise, yield None."""
    if python is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="distkit-bench-") as folder:
        cluster = TensorFlow(python, workers, servers, data, Path(folder))
        try:
            yield cluster
        finally:
            cluster.close()
