"""The parameter server compared with MXNet 1.9.1's, with the same arrays and model.

MXNet needs a separate Python: ``pip install "numpy<1.24" mxnet==1.9.1`` under Python 3.8, and
the path of that Python in ``DISTKIT_MXNET_PYTHON``. Otherwise, the reference is a ZeroMQ socket on
the loopback interface that echoes the same bytes. TensorFlow trains the same model; see
:mod:`benchmarks.kvstore_tensorflow`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks import kvstore_peers, kvstore_tensorflow
from benchmarks.figure import Figure, figure

#: Numbers of workers and servers.
CLUSTERS = ((2, 1), (4, 2))

#: Number of round trips, by mode and bytes.
TRIPS = {("dist_sync", 4 << 20): 12, ("dist_sync", 64 << 20): 2, ("dist_async", 1 << 10): 300}
#: Number of training steps, by mode.
STEPS = {"dist_sync": 150, "dist_async": 150}
BATCH, RATE = 32, 0.1

#: Upper limits of the ratio of distkit's time to MXNet's (limit, target), by bytes.
_LIMITS = {1 << 10: (1 / 0.7, 1 / 1.5), 4 << 20: (1.0, 0.5), 64 << 20: (1.0, 0.5)}

#: A contender's times in all repetitions [s], by size or for a training "step".
Seconds = dict[Any, list[float]]
Samples = dict[str, Seconds]
OURS = "ours"


def measure(reps: int, log: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Measure the slowest worker's time per call [s], ``reps`` times for each contender."""
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    for workers, servers in CLUSTERS:
        for mode in STEPS:
            trips = {size: n for (m, size), n in TRIPS.items() if m == mode}
            samples = _measure(workers, servers, mode, trips, reps, log)
            setup = f"{workers} workers + {servers} server{'s' * (servers > 1)}, {mode}"
            figures += _figures(setup, workers, samples)
            details[setup] = {
                f"{task}, {name}": {
                    "us": [1e6 * s for s in times],
                    "median_us": 1e6 * median(times),
                }
                for name, seconds in samples.items()
                for task, times in seconds.items()
            }
    return figures, details


def _measure(
    workers: int,
    servers: int,
    mode: str,
    trips: dict[int, int],
    reps: int,
    log: Callable[[str], None],
) -> Samples:
    """Return the times of distkit, MXNet (or the echo) and TensorFlow (if it is configured) [s]."""
    from distkit.cluster.cluster import Cluster

    samples: Samples = {OURS: {}}
    data, jobs = kvstore_peers.digits(), {"trips": trips, "steps": STEPS[mode]}
    mxnet, tensorflow = map(os.environ.get, ("DISTKIT_MXNET_PYTHON", "DISTKIT_TENSORFLOW_PYTHON"))
    with (
        kvstore_peers.reference(mxnet, workers, servers, mode, data) as reference,
        kvstore_tensorflow.tensorflow(tensorflow, workers, servers, data) as coordinator,
        Cluster(workers=workers, servers=servers) as cluster,
    ):
        for rep in range(reps):
            log(f"kvstore: {workers} + {servers}, {mode}, {rep + 1} of {reps}")
            for job in jobs.items():
                run = cluster._submit(on_worker, (mode, job, data), {}, record=False).wait()
                _add(samples[OURS], run.results)
                _add(samples.setdefault(reference.name, {}), reference.run(job))
            if coordinator is not None:
                _add(
                    samples.setdefault(kvstore_tensorflow.NAME, {}), [coordinator.run(STEPS[mode])]
                )
    return samples


def _add(seconds: Seconds, results: list[dict[Any, float]]) -> None:
    for task in results[0]:
        seconds.setdefault(task, []).append(max(result[task] for result in results))


def _figures(setup: str, workers: int, samples: Samples) -> list[Figure]:
    """Return figures of distkit's times, compared with MXNet's or the echo's."""
    figures = []
    reference = kvstore_peers.MXNET if kvstore_peers.MXNET in samples else kvstore_peers.ECHO
    for task, seconds in samples[OURS].items():
        limits: dict[str, Any] = {}
        if task == "step":
            rate = workers * BATCH / median(seconds)
            name = f"training step of the digits MLP, {setup} ({rate:,.0f} samples/s)"
            limits = {"limit": 1.0, "target": 0.5}
        else:
            rate = 2 * int(task) / median(seconds) / 1e6
            name = f"push + pull of {_size(int(task))}, {setup} ({rate:,.4g} MB/s per worker)"
            limits = dict(zip(("limit", "target"), _LIMITS[int(task)], strict=True))
        if reference != kvstore_peers.MXNET:
            limits = {}  # the limits apply only to MXNet
        figures.append(
            figure(name, "us", _us(seconds), reference, _us(samples[reference].get(task)), **limits)
        )
        if task == "step":
            figures += _compare_with_tensorflow(
                name, seconds, samples.get(kvstore_tensorflow.NAME, {})
            )
    return figures


def _compare_with_tensorflow(name: str, seconds: list[float], reference: Seconds) -> list[Figure]:
    """Compare a step with TensorFlow's, for one and for ten steps per call of its coordinator."""
    if not reference:
        return [
            figure(name, "us", _us(seconds), kvstore_tensorflow.MISSING, limit=1 / 3, target=0.1)
        ]
    limits: dict[str, dict[str, float]] = {"step": {"limit": 1 / 3, "target": 0.1}}
    return [
        figure(
            name,
            "us",
            _us(seconds),
            f"{kvstore_tensorflow.NAME} ({task})",
            _us(times),
            **limits.get(task, {}),
        )
        for task, times in reference.items()
    ]


def on_worker(mode: str, job: tuple[str, Any], data: Any) -> dict[Any, float]:
    """Return this worker's time per push and pull of each size, or per training step [s]."""
    from distkit import kvstore

    kv = kvstore.create(mode)
    kind, calls_or_steps = job
    if kind == "trips":
        kv.set_optimizer(kvstore.SGD(learning_rate=0.5))
        return {size: _trip(kv, size, calls) for size, calls in calls_or_steps.items()}
    return {"step": _train(kv, calls_or_steps, *data)}


def _trip(kv: Any, size: int, calls: int) -> float:
    """Return the time per push and pull [s]."""
    import torch

    w, g = torch.zeros(size // 4), torch.ones(size // 4)
    kv.init(size, w)

    def trip() -> None:
        kv.push(size, g)
        kv.pull(size, out=w)

    return _time_calls(kv, trip, calls)


def _train(kv: Any, steps: int, images: Any, labels: Any) -> float:
    """Return the time per step of the digits MLP on this worker's shard [s]."""
    import torch
    from torch import nn

    from distkit import kvstore

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    loss = nn.CrossEntropyLoss(reduction="sum")
    trainer = kvstore.Trainer(model.parameters(), "sgd", {"learning_rate": RATE}, kv)
    x = torch.tensor(images[kv.rank :: kv.num_workers]).split(BATCH)[:-1]
    y = torch.tensor(labels[kv.rank :: kv.num_workers]).split(BATCH)[:-1]
    examples = BATCH * (kv.num_workers if kv.type == "dist_sync" else 1)
    done = 0

    def step() -> None:
        nonlocal done
        model.zero_grad()
        loss(model(x[done % len(x)]), y[done % len(x)]).backward()
        trainer.step(examples)
        done += 1

    seconds = _time_calls(kv, step, steps)
    accuracy = (model(torch.tensor(images)).argmax(1) == torch.tensor(labels)).float().mean()
    assert accuracy > 0.5, f"the model did not learn: accuracy {accuracy:.0%}"
    return seconds


def _time_calls(kv: Any, call: Callable[[], None], calls: int) -> float:
    import time

    for _ in range(max(3, calls // 5)):  # warm-up: opens connections, touches memory
        call()
    kv.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = (time.perf_counter() - start) / calls
    kv.barrier()
    return seconds


def _us(seconds: list[float] | None) -> list[float]:
    return [1e6 * s for s in seconds or []]


def _size(size: int) -> str:
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"
