"""Four demonstrations on real ranks and real data: send, reduce, train, serve.

``distkit demo`` runs them. The functions that the ranks run come first, so that you can read and
copy them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from distkit import kvstore
from distkit._format import count, human_seconds
from distkit.algorithms.sgd import sync_initial_weights, sync_sgd_step
from distkit.cluster.runs.run import run_ranks
from distkit.data import digits, shard
from distkit.recording.gradients import watch_gradients
from distkit.recording.recorder import mark
from distkit.trace.log import grouped
from distkit.trace.trace import Trace
from distkit_examples.recorded import recorded as recorded

RANKS, EPOCHS, PS_EPOCHS, BATCH, LR = 4, 8, 3, 32, 0.2


def model() -> nn.Module:
    """Return a perceptron with one hidden layer, 64-128-10, with the same weights on every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


# -- the ranks' programs -----------------------------------------------------------


def pass_a_digit() -> tuple[Tensor, Tensor]:
    """Pass an image from rank to rank; return this rank's image before and after."""
    rank, n = dist.get_rank(), dist.get_world_size()
    x = digits()[0][5] if rank == 0 else torch.zeros(64)
    before = x.clone()
    if rank > 0:
        dist.recv(x, src=rank - 1)
    if rank < n - 1:
        dist.send(x, dst=rank + 1)
    return before, x


def average_digit(all_reduce: Callable[[Tensor], Any]) -> tuple[Tensor, Tensor]:
    """Average all images: each rank sums its shard, and an all-reduce sums over the ranks.

    Returns:
        The mean of this rank's images, and the mean of all images.
    """
    images = shard(digits()[0])[0]
    total = images.sum(dim=0)
    local_mean = total / len(images)
    all_reduce(total)
    return local_mean, total / (len(images) * dist.get_world_size())


def batches() -> Iterable[tuple[Tensor, Tensor]]:
    """Yield one epoch of this rank's shard of the digits, in batches."""
    images, labels = shard(*digits())
    for i in range(0, len(images) - BATCH + 1, BATCH):
        yield images[i : i + BATCH], labels[i : i + BATCH]


def train_synchronously(epochs: int = EPOCHS) -> dict[str, Any]:
    """Train with synchronous data-parallel SGD, each rank on its shard."""
    net, losses = model(), []
    sync_initial_weights(net)
    with watch_gradients(net) as watch:
        for batch in [*batches()] * epochs:
            with mark("step"):
                loss = sync_sgd_step(net, batch, F.cross_entropy, LR)
            watch.step(loss=loss, lr=LR, samples=BATCH)
            losses.append(loss.item())
    return {"losses": losses, "weights": nn.utils.parameters_to_vector(net.parameters()).detach()}


def train_with_servers(mode: str, epochs: int = PS_EPOCHS) -> dict[str, Any]:
    """Train with a parameter server: pull the weights, compute a gradient, push it."""
    net, losses = model(), []
    keys, weights = zip(*net.named_parameters(), strict=True)
    kv = kvstore.create(mode)
    kv.init(keys, weights)
    # dist_sync sums the workers' gradients, so dividing the learning rate averages them
    kv.set_optimizer(kvstore.SGD(learning_rate=LR / kv.num_workers))
    for images, labels in [*batches()] * epochs:
        kv.pull(keys, out=weights)
        with mark("gradient"):
            loss = F.cross_entropy(net(images), labels)
            net.zero_grad()
            loss.backward()
        kv.push(keys, [w.grad for w in weights])
        losses.append(loss.item())
    kv.barrier()
    kv.pull(keys, out=weights)
    return {"losses": losses, "weights": nn.utils.parameters_to_vector(weights).detach()}


def accuracy(weights: Tensor) -> float:
    """Return the accuracy of a 64-128-10 perceptron with these weights on all digits."""
    net, (images, labels) = model(), digits()
    nn.utils.vector_to_parameters(weights, net.parameters())
    with torch.no_grad():
        return float((net(images).argmax(1) == labels).float().mean())


# -- the demonstrations ----------------------------------------------------------


#: The lines that summarize a demonstration, and its traces by name.
Result = tuple[list[str], dict[str, Trace]]


def p2p() -> Result:
    """Pass a handwritten digit from rank to rank with send and recv."""
    run = run_ranks(pass_a_digit, RANKS)
    pictures = [_picture(f"rank {rank}", *images) for rank, images in enumerate(run.results)]
    equal = _equal(after for _, after in run.results)
    lines = [*chain(*pictures), _brief(run.trace), f"images bitwise equal on all ranks: {equal}"]
    return lines, {"p2p": run.trace}


def all_reduce() -> Result:
    """Average the digits with torch's all-reduce and with distkit's ring."""
    from distkit.algorithms.all_reduce.ring import ring_all_reduce

    native = run_ranks(average_digit, RANKS, dist.all_reduce)
    ring = run_ranks(average_digit, RANKS, ring_all_reduce)
    error = float((ring.results[0][1] - native.results[0][1]).abs().max())
    lines = [
        *_picture("rank 0", *native.results[0]),
        f"native: {_brief(native.trace)}",
        f"ring:   {_brief(ring.trace)}, {len(ring.trace.messages) // RANKS} per rank = 2(n-1)",
        f"ring: means bitwise equal on all ranks: {_equal(mean for _, mean in ring.results)}; "
        f"largest difference from the native mean: {error:.1e}",
    ]
    return lines, {"all_reduce (native)": native.trace, "all_reduce (ring)": ring.trace}


def sync_sgd() -> Result:
    """Train replicas of a 64-128-10 perceptron on digits with synchronous SGD."""
    run = run_ranks(train_synchronously, RANKS)
    losses = torch.tensor([r["losses"] for r in run.results]).mean(0).tolist()
    lines = [
        f"{len(losses)} steps of {RANKS} x {BATCH} images: {_progress(losses, run.results)}",
        f"replicas bitwise equal: {_equal(r['weights'] for r in run.results)}",
        _brief(run.trace),
    ]
    return lines, {"sync_sgd": first_steps(run.trace, "step"), "sync_sgd (all steps)": run.trace}


def parameter_server() -> Result:
    """Train with a parameter server, synchronously and asynchronously."""
    from distkit.cluster.cluster import Cluster  # ranks that call model() need not import it

    lines = ["2 workers, 2 servers and a scheduler, each in a separate process"]
    traces: dict[str, Trace] = {}
    with Cluster(workers=2, servers=2) as cluster:
        for mode in ("dist_sync", "dist_async"):
            run = cluster.run(train_with_servers, mode)
            losses = run.results[0]["losses"]
            traces |= {mode: first_steps(run.trace, "gradient"), f"{mode} (all steps)": run.trace}
            lines += [
                f"{mode}: {2 * len(losses)} gradients in {run.seconds:.1f} s, "
                f"{_progress(losses, run.results)}",
                f"      {_brief(run.trace)}",
            ]
    return lines, traces


def first_steps(trace: Trace, label: str, steps: int = 3) -> Trace:
    """Return a trace of each rank's first steps; each step begins with a mark labeled ``label``.

    >>> from distkit.events import Event, Op, State
    >>> label = {"label": "step"}
    >>> t = Trace(Event(0, n, Op.MARK, State.STARTED, n, attributes=label) for n in range(5))
    >>> len(first_steps(t, "step"))
    3
    """
    marks = grouped((s for s in trace.spans if s.label == label), lambda s: s.rank)
    ends = {rank: spans[steps].start for rank, spans in marks.items()}
    shown = {
        (s.rank, s.seq)
        for s in trace.spans
        if s.start < ends.get(s.rank, max(ends.values()))  # a server has no steps
    }
    return Trace((e for e in trace if (e.rank, e.seq) in shown), trace.info)


#: The demonstrations by name, in teaching order.
ALL: dict[str, Callable[[], Result]] = {
    "p2p": p2p,
    "all_reduce": all_reduce,
    "sync_sgd": sync_sgd,
    "parameter_server": parameter_server,
}


# -- formatting ------------------------------------------------------------------


def _brief(trace: Trace) -> str:
    total = sum(m.nbytes for m in trace.messages)
    messages = f"{count(len(trace.messages), 'message')}, {total:,} bytes" if trace.messages else ""
    calls = count(len(trace.collectives), "collective") if trace.collectives else ""
    return ", ".join(filter(None, [messages, calls, human_seconds(trace.seconds)]))


def _progress(losses: list[float], results: list[Any]) -> str:
    return (
        f"loss {losses[0]:.3f} → {losses[-1]:.3f}, accuracy {accuracy(results[0]['weights']):.1%}"
    )


def _equal(tensors: Iterable[Tensor]) -> str:
    first, *others = tensors
    return "yes" if all(torch.equal(first, other) for other in others) else "NO"


def _picture(title: str, before: Tensor, after: Tensor) -> list[str]:
    """Return a rank's images before and after, side by side in block characters."""
    left, right = _blocks(before), _blocks(after)
    lines = [f"{a}   →   {b}" for a, b in zip(left, right, strict=True)]
    return [f"{title:<9}{lines[0]}", *(" " * 9 + line for line in lines[1:])]


def _blocks(image: Tensor) -> list[str]:
    rows = image.reshape(8, 8).clamp(0, 1).mul(4).round().int().tolist()
    return ["".join(" ░▒▓█"[v] * 2 for v in row) for row in rows]
