"""Training: speed beside DDP under torchrun, MXNet and TensorFlow; equality; oracles; the model.

MXNet and TensorFlow want a Python of their own each, named by ``DISTKIT_MXNET_PYTHON`` and
``DISTKIT_TENSORFLOW_PYTHON`` (see kvstore_peers and kvstore_tensorflow); a figure says if they are
absent.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks import kvstore_peers, train_oracles, train_tensorflow
from benchmarks.figure import Figure, figure
from distkit.cluster.processes.rank_spec import free_port
from distkit.errors import DistkitError

if TYPE_CHECKING:
    from distkit.cluster.cluster import Cluster

#: Ranks; samples of each and step; steps of one turn; the learning rate.
RANKS, BATCH, STEPS, RATE = 4, 32, 300, 0.2

#: Ranks, and samples of each, for which speed-up is predicted.
SETTINGS: dict[str, Any] = {"ranks": [1, 2, 4], "batch": [32, 256, 1024]}

#: Replicas of an evaluation.
EVALUATED = (1, 2, 3, 4, 5, 7)

Say = Callable[[str], None]


def measure(reps: int, say: Say) -> tuple[list[Figure], dict[str, Any]]:
    """All figures; ``reps`` turns of each contender."""
    details: dict[str, Any] = {}
    found = [*speed(reps, say, details)]
    oracles = (train_oracles.schedules, train_oracles.memory, train_oracles.zero)
    equalities = (identical, train_oracles.strategies, evaluation)
    for make in (*equalities, *oracles, prediction):
        say(f"train: {make.__name__}")
        found += make(reps, details)
    return found, details


# -- speed -------------------------------------------------------------------------------------


def speed(reps: int, say: Say, details: dict[str, Any]) -> Iterator[Figure]:
    """Samples per second of the digits MLP, each contender in turn on the same machine.

    The figures are seconds per sample, so that limits are upper ones.
    """
    from distkit.cluster.cluster import Cluster

    times: dict[str, list[float]] = {}
    python = os.environ.get("DISTKIT_MXNET_PYTHON")
    data = kvstore_peers.digits()
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster(RANKS))
        mxnet = python and stack.enter_context(
            kvstore_peers.peer(python, RANKS, RANKS, "dist_sync", data)
        )
        for rep in range(reps):
            say(f"train: speed, {rep + 1} of {reps}")
            turns = {**ours(cluster), "DDP": torchrun(DDP)}
            if mxnet:
                turns["MXNet"] = max(result["step"] for result in mxnet.turn(("steps", STEPS)))
            if (theirs := train_tensorflow.ring(RANKS, BATCH, STEPS, data)) is not None:
                turns["TensorFlow"] = theirs
            for who, seconds in turns.items():
                times.setdefault(who, []).append(1e6 * seconds / (RANKS * BATCH))
    details["samples/s"] = {who: 1e6 / median(us) for who, us in times.items()}
    name, mine = f"sync-SGD, digits MLP, {RANKS} ranks: time per sample", times["auto"]
    yield figure(name, "us", mine, "DDP, torchrun, gloo", times["DDP"], must=1 / 3, aim=1 / 6)
    yield figure(name, "us", mine, "no communication", times["alone"], aim=1 / 0.8)
    for who, must, aim, absent in (
        ("TensorFlow", 1 / 3, 1 / 7, train_tensorflow.MISSING),
        ("MXNet", 1 / 1.5, 1 / 2.5, "MXNet's dist_sync: set DISTKIT_MXNET_PYTHON"),
    ):
        reference = who if who in times else absent
        yield figure(name, "us", mine, reference, times.get(who), must=must, aim=aim)


def ours(cluster: Cluster) -> dict[str, float]:
    """Seconds per step of our page, by its all-reduce; "alone" has none."""
    run = cluster._submit(steps_on_rank, (), {}, record=False).wait()
    return {how: max(result[how] for result in run.results) for how in run.results[0]}


def steps_on_rank() -> dict[str, float]:
    """On a rank: seconds per step with distkit's default choice of all-reduce, and without one."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    import distkit as dk

    torch.set_num_threads(1)
    images, labels = dk.shard(*dk.demos.digits())
    batches = list(zip(images.split(BATCH), labels.split(BATCH), strict=True))[:-1]
    found = {}
    with dk.use_algorithm("auto"):
        for how, all_reduce in (("auto", dist.all_reduce), ("alone", lambda tensor: None)):
            net = dk.demos.model()
            for step in range(STEPS + 20):
                if step == 20:
                    dist.barrier()
                    start = time.perf_counter()
                batch = batches[step % len(batches)]
                dk.sync_sgd_step(net, batch, F.cross_entropy, RATE, all_reduce=all_reduce)
            found[how] = (time.perf_counter() - start) / STEPS
    return found


#: The same training as PyTorch's tutorial writes it; prints the seconds of a step.
DDP = """
import sys, time
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks, (batch, steps, rate) = dist.get_rank(), dist.get_world_size(), map(float, sys.argv[1:])
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x[rank::ranks] / 16, dtype=torch.float32), torch.tensor(y[rank::ranks])
batches = list(zip(x.split(int(batch)), y.split(int(batch))))[:-1]
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
net = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=rate)
for step in range(int(steps) + 20):
    if step == 20:
        dist.barrier()
        start = time.perf_counter()
    images, labels = batches[step % len(batches)]
    optimizer.zero_grad()
    F.cross_entropy(net(images), labels).backward()
    optimizer.step()
sys.stdout.write(f"seconds {(time.perf_counter() - start) / steps}\\n")  # at once, also unbuffered
dist.barrier()  # gloo may abort in a rank whose peers are gone
dist.destroy_process_group()
"""


def torchrun(program: str, *arguments: object) -> float:
    """The largest of the seconds that the ranks of a program print."""
    given = arguments or (BATCH, STEPS, RATE)
    with tempfile.TemporaryDirectory(prefix="distkit-train-") as folder:
        file = Path(folder) / "train.py"
        file.write_text(program, "utf-8")
        said = launch(file, RANKS, *given)
    return max(float(line.split()[1]) for line in said.splitlines() if line.startswith("seconds "))


def launch(script: Path, ranks: int, *arguments: object) -> str:
    """What a script prints under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    ran = subprocess.run(
        [*command, f"--master-port={free_port()}", str(script), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if ran.returncode:
        raise DistkitError(f"torchrun failed: {ran.stderr[-1000:]}")
    return ran.stdout


# -- equality ----------------------------------------------------------------------------------


def identical(reps: int, details: dict[str, Any]) -> Iterator[Figure]:
    """The replicas after 1,000 steps, and their accuracy on digits that none of them has seen."""
    import distkit as dk

    weights = dk.run_ranks(trained, RANKS, record=False).results
    details["held-out accuracy"] = weights[0][1]
    others = sum(w != weights[0][0] for w, _ in weights)
    yield figure(
        "replicas that differ after 1,000 steps", "", [float(others)], must=0, aim=0, absolute=True
    )
    wrong = 1 - weights[0][1]
    yield figure("error on held-out digits", "", [wrong], must=0.03, absolute=True)


def trained(steps: int = 1000) -> tuple[bytes, float]:
    """On a rank: the bytes of the weights, and the accuracy on the last fifth of the digits."""
    import torch
    import torch.nn.functional as F

    import distkit as dk

    torch.manual_seed(0)
    images, labels = dk.demos.digits()
    order = torch.randperm(len(images))
    seen, held_out = order[:1437], order[1437:]
    mine, my = dk.shard(images[seen], labels[seen])
    net = dk.demos.model()
    dk.sync_initial_weights(net)
    decay = torch.optim.SGD(net.parameters(), RATE, momentum=0.9, weight_decay=1e-3)
    for step in range(steps):
        rows = torch.arange(step * BATCH, (step + 1) * BATCH) % len(mine)
        dk.sync_sgd_step(net, (mine[rows], my[rows]), F.cross_entropy, decay)
    accuracy = dk.data.evaluate(net, (images[held_out], labels[held_out]))
    return b"".join(w.detach().numpy().tobytes() for w in net.parameters()), accuracy


def evaluation(reps: int, details: dict[str, Any]) -> Iterator[Figure]:
    """Different accuracies of one trained model, on all ranks of different numbers of them."""
    import torch
    import torch.nn.functional as F

    import distkit as dk

    net, data = dk.demos.model(), dk.demos.digits()
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(net(data[0]), data[1]).backward()
        optimizer.step()

    def score() -> float:
        return dk.data.evaluate(net, data)

    found = {n: dk.run_ranks(score, n, record=False).results for n in EVALUATED}
    details["accuracy by ranks"] = found
    yield figure(
        f"accuracies of one model on {', '.join(map(str, EVALUATED))} ranks, different ones",
        "",
        [float(len(set().union(*found.values())))],
        must=1,
        aim=1,
        absolute=True,
    )


# -- the model ---------------------------------------------------------------------------------


def prediction(reps: int, details: dict[str, Any]) -> Iterator[Figure]:
    """Predicted against measured speed-up."""
    import distkit as dk

    rows = dk.simulation.speedups(dk.sweep(parts, **SETTINGS))
    details["speed-up"] = rows
    yield figure(
        "predicted speed-up, median error over the measured one",
        "",
        [median(abs(r["predicted"] / r["measured"] - 1) for r in rows if r["ranks"] > 1)],
        must=0.2,
        aim=0.1,
        absolute=True,
    )


def parts(batch: int) -> dict[str, float]:
    """On a rank: the seconds of the parts of a step."""
    import torch
    import torch.nn.functional as F

    import distkit as dk

    images, labels = dk.demos.digits()
    rows = torch.arange(batch) % len(images)
    given = images[rows], labels[rows]
    return dk.simulation.measure_step(dk.demos.model(), given, F.cross_entropy, blocks=15)
