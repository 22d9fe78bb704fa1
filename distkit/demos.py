"""Four demonstrations on real ranks and real data: send, reduce, train, serve.

``distkit demo`` runs them. The ranks' programs come first; they are plain ``torch.distributed``,
to be read and copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkit._format import count, human_seconds
from distkit.cluster.runs.run import run_ranks
from distkit.data.sets import digits as digits  # also as dk.demos.digits
from distkit.recording.gradients import watch_gradients
from distkit.recording.recorder import mark
from distkit.trace.trace import Trace

if TYPE_CHECKING:
    from torch import Tensor, nn

RANKS, EPOCHS, PS_EPOCHS, BATCH, LR = 4, 8, 3, 32, 0.2


def model() -> nn.Module:
    """Return a perceptron with one hidden layer, 64-128-10, with the same weights at every call."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


# -- programs of the ranks ---------------------------------------------------------


def pass_a_digit() -> tuple[Tensor, Tensor]:
    """Pass an image from rank to rank; return this rank's image before and after."""
    import torch
    import torch.distributed as dist

    rank, n = dist.get_rank(), dist.get_world_size()
    x = digits()[0][5] if rank == 0 else torch.zeros(64)
    before = x.clone()
    if rank > 0:
        dist.recv(x, src=rank - 1)
    if rank < n - 1:
        dist.send(x, dst=rank + 1)
    return before, x


def average_digit(all_reduce: Callable[[Tensor], Any] | None = None) -> tuple[Tensor, Tensor]:
    """Average all images: each rank sums its shard, and an all-reduce sums over the ranks."""
    import torch.distributed as dist

    from distkit.data.shards import shard

    images = shard(digits()[0])[0]
    total = images.sum(dim=0)
    before = total.clone()
    (all_reduce or dist.all_reduce)(total)
    return before, total / (len(images) * dist.get_world_size())


def train_in_step(
    epochs: int = EPOCHS, all_reduce: Callable[[Tensor], Any] | None = None
) -> dict[str, Any]:
    """Train with synchronous data-parallel SGD, each rank on its shard."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    from distkit.algorithms.sgd import sync_initial_weights, sync_sgd_step
    from distkit.data.shards import shard

    images, labels = shard(*digits())
    net, losses = model(), []
    sync_initial_weights(net)
    with watch_gradients(net) as watch:
        for i in epochs * [*range(0, len(images) - BATCH + 1, BATCH)]:
            batch = images[i : i + BATCH], labels[i : i + BATCH]
            with mark("step"):
                loss = sync_sgd_step(
                    net, batch, F.cross_entropy, LR, all_reduce=all_reduce or dist.all_reduce
                )
            watch.step(loss=loss, lr=LR, samples=BATCH)
            losses.append(loss)
    return {"losses": torch.stack(losses).tolist(), "weights": _flat(net)}


def train_with_servers(mode: str, epochs: int = PS_EPOCHS) -> dict[str, Any]:
    """Train with a parameter server: pull the weights, compute a gradient, push it."""
    import torch.nn.functional as F

    from distkit import kvstore
    from distkit.data.shards import shard

    images, labels = shard(*digits())
    net, losses = model(), []
    keys, weights = zip(*net.named_parameters(), strict=True)
    kv = kvstore.create(mode)
    kv.init(keys, weights)
    # the servers add the workers' gradients; dividing turns the sum into a mean
    kv.set_optimizer(kvstore.SGD(learning_rate=LR / kv.num_workers))
    for i in epochs * [*range(0, len(images) - BATCH + 1, BATCH)]:
        kv.pull(keys, out=weights)
        with mark("gradient"):
            loss = F.cross_entropy(net(images[i : i + BATCH]), labels[i : i + BATCH])
            net.zero_grad()
            loss.backward()
        kv.push(keys, [w.grad for w in weights])
        losses.append(loss.item())
    kv.barrier()
    kv.pull(keys, out=weights)
    return {"losses": losses, "weights": _flat(net)}


def _flat(net: nn.Module) -> Tensor:
    import torch

    return torch.cat([w.detach().reshape(-1) for w in net.parameters()])


def accuracy(weights: Tensor) -> float:
    """Return the accuracy of a 64-128-10 perceptron with these weights on all digits."""
    import torch

    net, (images, labels) = model(), digits()
    torch.nn.utils.vector_to_parameters(weights, net.parameters())
    with torch.no_grad():
        return float((net(images).argmax(1) == labels).float().mean())


# -- the demonstrations ----------------------------------------------------------


@dataclass
class Demo:
    """The result of a demonstration: a summary, and its traces."""

    title: str
    lines: list[str]
    traces: dict[str, Trace]


def p2p() -> Demo:
    """Pass a handwritten digit from rank to rank with send and recv."""
    import torch

    run = run_ranks(pass_a_digit, RANKS)
    _, sent = run.results[0]
    equal = all(torch.equal(after, sent) for _, after in run.results)
    lines = [
        line
        for rank, (before, after) in enumerate(run.results)
        for line in _picture(f"rank {rank}", before, after)
    ]
    lines += [_brief(run.trace), f"all ranks have the same image, bit by bit: {_yes(equal)}"]
    return Demo(
        "p2p: a digit passed from rank to rank with send and recv", lines, {"p2p": run.trace}
    )


def all_reduce() -> Demo:
    """Compare torch's all-reduce with the ring all-reduce of this package."""
    import torch

    from distkit.algorithms.all_reduce.ring import ring_all_reduce

    native = run_ranks(average_digit, RANKS)
    ring = run_ranks(average_digit, RANKS, ring_all_reduce)
    images = digits()[0][: 1797 // RANKS * RANKS]
    partial, mean = native.results[0]
    average = ring.results[0][1]
    same = all(torch.equal(r[1], average) for r in ring.results)
    error = float((average - images.mean(0)).abs().max())
    lines = [
        *_picture("rank 0", partial / (len(images) // RANKS), mean),
        f"native: {_brief(native.trace)}",
        f"ring:   {_brief(ring.trace)}, {len(ring.trace.messages) // RANKS} per rank = 2(n-1)",
        f"ring: all ranks bitwise equal: {_yes(same)}; "
        f"largest difference from one process's mean: {error:.1e}",
    ]
    traces = {"all_reduce (native)": native.trace, "all_reduce (ring)": ring.trace}
    return Demo("all_reduce: the average digit, from partial sums on every rank", lines, traces)


def sync_sgd() -> Demo:
    """Train with synchronous SGD, and compare the replicas."""
    import torch

    run = run_ranks(train_in_step, RANKS)
    weights = [r["weights"] for r in run.results]
    losses = torch.tensor([r["losses"] for r in run.results]).mean(0).tolist()
    identical = all(torch.equal(w, weights[0]) for w in weights)
    lines = [
        f"{len(losses)} steps of {RANKS} x {BATCH} images: loss {losses[0]:.3f} → "
        f"{losses[-1]:.3f}, accuracy {accuracy(weights[0]):.1%}",
        f"replicas bitwise equal: {_yes(identical)}",
        _brief(run.trace),
    ]
    title = f"sync_sgd: {RANKS} replicas of a 64-128-10 perceptron learn digits"
    return Demo(title, lines, {"sync_sgd": run.trace})


def parameter_server() -> Demo:
    """Train with a parameter server, synchronously and asynchronously."""
    from distkit.cluster.cluster import Cluster

    lines = ["2 workers, 2 servers and a scheduler, each in a separate process"]
    traces = {}
    with Cluster(workers=2, servers=2) as cluster:
        for mode in ("dist_sync", "dist_async"):
            run = cluster.run(train_with_servers, mode)
            losses, weights = run.results[0]["losses"], run.results[0]["weights"]
            lines += [
                f"{mode}: {2 * len(losses)} gradients in {run.seconds:.1f} s, loss "
                f"{losses[0]:.3f} → {losses[-1]:.3f}, accuracy {accuracy(weights):.1%}",
                f"      {_brief(run.trace)}",
            ]
            traces[mode] = run.trace
    return Demo("parameter_server: workers push gradients to servers", lines, traces)


#: The demonstrations by name, in teaching order.
ALL: dict[str, Callable[[], Demo]] = {
    "p2p": p2p,
    "all_reduce": all_reduce,
    "sync_sgd": sync_sgd,
    "parameter_server": parameter_server,
}


# -- recorded runs -----------------------------------------------------------------

_FOLDER = Path(__file__).parent / "recorded"
#: The names of larger runs that come with distkit, recorded by tools/record.
RECORDED = sorted(file.stem for file in _FOLDER.glob("*.trace"))


def recorded(name: str) -> Trace:
    """Return the trace of a run that comes with distkit; this needs no torch.

    Args:
        name: one of ``dk.demos.RECORDED``.

    Raises:
        ValueError: The name is unknown.

    >>> trace = recorded("ring_16")
    >>> len(trace.messages), trace.info.name
    (480, 'A ring all-reduce on 16 ranks')
    """
    if name not in RECORDED:
        raise ValueError(f"unknown recorded run {name!r}. Choose from: {', '.join(RECORDED)}.")
    return Trace.load(_FOLDER / f"{name}.trace")


# -- formatting ------------------------------------------------------------------


def _brief(trace: Trace) -> str:
    sizes = sum(m.nbytes for m in trace.messages)
    messages = f"{count(len(trace.messages), 'message')}, {sizes:,} bytes" if trace.messages else ""
    calls = count(len(trace.collectives), "collective") if trace.collectives else ""
    return ", ".join(filter(None, [messages, calls, human_seconds(trace.seconds)]))


def _picture(title: str, before: Tensor, after: Tensor) -> list[str]:
    """Return a rank's images before and after, side by side in block characters."""
    left, right = _blocks(before), _blocks(after)
    lines = [f"{a}   →   {b}" for a, b in zip(left, right, strict=True)]
    return [f"{title:<9}{lines[0]}", *(" " * 9 + line for line in lines[1:])]


def _blocks(image: Tensor) -> list[str]:
    shades = " ░▒▓█"
    rows = image.reshape(8, 8).clamp(0, 1).mul(4).round().int().tolist()
    return ["".join(shades[v] * 2 for v in row) for row in rows]


def _yes(fact: bool) -> str:
    return "yes" if fact else "NO"
