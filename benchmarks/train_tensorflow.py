"""TensorFlow's MultiWorkerMirroredStrategy with RING, training the digits MLP.

It wants a Python of its own, as :mod:`benchmarks.kvstore_tensorflow` says; its workers listen on
every network: they get one of their own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.kvstore_tensorflow import ALONE
from distkit.errors import DistkitError

MISSING = "TensorFlow's MultiWorkerMirroredStrategy: set DISTKIT_TENSORFLOW_PYTHON"

#: Starts itself once per worker; worker 0 prints the seconds of a step.
_PROGRAM = """
import json, os, socket, subprocess, sys, time
workers, path, batch, steps = json.loads(sys.argv[1])

def port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]

children = []
if "TF_CONFIG" not in os.environ:
    nodes = {"worker": ["127.0.0.1:%d" % port() for _ in range(workers)]}
    def config(i):
        return json.dumps({"cluster": nodes, "task": {"type": "worker", "index": i}})
    children = [subprocess.Popen([sys.executable, "-c", program, sys.argv[1]],
                                 stdout=subprocess.DEVNULL,
                                 env={**os.environ, "TF_CONFIG": config(i)})
                for i in range(1, workers)]
    os.environ["TF_CONFIG"] = config(0)

try:
    import numpy as np
    import tensorflow as tf
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(implementation=ring))
    with np.load(path) as data:
        x, y = data["x"], data["y"].astype("int64")
    whole = tf.data.Dataset.from_tensor_slices((x, y)).cache().repeat().batch(batch * workers)
    batches = iter(strategy.experimental_distribute_dataset(whole))
    with strategy.scope():
        net = tf.keras.Sequential([tf.keras.layers.Dense(128, "relu"), tf.keras.layers.Dense(10)])
        net.build((None, 64))
        optimizer = tf.keras.optimizers.SGD(0.2)

    def replica(images, labels):
        with tf.GradientTape() as tape:
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, net(images))
            loss = tf.nn.compute_average_loss(each, global_batch_size=batch * workers)
        optimizer.apply_gradients(zip(tape.gradient(loss, net.trainable_variables),
                                      net.trainable_variables))

    @tf.function
    def step(given):
        strategy.run(replica, args=given)

    for n in range(steps + 20):
        if n == 20:
            start = time.perf_counter()
        step(next(batches))
    print("seconds", (time.perf_counter() - start) / steps, flush=True)
    for child in children:
        child.wait()
finally:
    for child in children:    # none is left behind when this one fails
        child.kill()
"""


def ring(workers: int, batch: int, steps: int, data: Any) -> float | None:
    """Seconds per step; None where no Python with TensorFlow is known.

    Raises:
        DistkitError: it is known, and fails.
    """
    import numpy as np

    python = os.environ.get("DISTKIT_TENSORFLOW_PYTHON")
    if python is None:
        return None
    with tempfile.TemporaryDirectory(prefix="distkit-bench-") as folder:
        file = Path(folder) / "digits.npz"
        np.savez(file, x=data[0], y=data[1])
        program = f"program = {_PROGRAM!r}\nexec(program)"
        said = json.dumps([workers, str(file), batch, steps])
        environ = {
            "CUDA_VISIBLE_DEVICES": "",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "OMP_NUM_THREADS": "1",
            "HOME": folder,
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        }
        printed, errors = _ran([*ALONE, python, "-c", program, said], environ)
    lines = [line.split() for line in printed.splitlines() if line.startswith("seconds ")]
    if not lines:
        raise DistkitError(f"TensorFlow gave no answer. Its last words:\n{errors[-1000:]}")
    return float(lines[0][1])


def _ran(command: list[str], environ: dict[str, str], within: float = 300) -> tuple[str, str]:
    """What a command prints, and its errors; all that it started has ended, too."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environ, start_new_session=True, **pipes)
    try:
        return process.communicate(timeout=within)
    except subprocess.TimeoutExpired:
        raise DistkitError(f"TensorFlow gave no answer within {within:g} s.") from None
    finally:
        with suppress(ProcessLookupError):  # nobody is left of its session
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
