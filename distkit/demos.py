"""Four demonstrations on real ranks and real data: send, reduce, train, serve.

Each is a function that a notebook calls (``dk.demos.p2p()``) and a name that the command line
takes (``distkit demo p2p``). It returns a :class:`Demo`: some sentences of summary and the
traces, the first of which is displayed. The programs that run on the ranks stand first:
they are plain ``torch.distributed``, to be read and copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkit._format import count, human_seconds
from distkit.data.sets import digits as digits  # also as dk.demos.digits
from distkit.recording.gradients import watch_gradients
from distkit.recording.recorder import mark
from distkit.trace.trace import Trace

if TYPE_CHECKING:
    from torch import Tensor, nn

    from distkit.cluster.cluster import Cluster

RANKS, EPOCHS, PS_EPOCHS, BATCH, LR = 4, 8, 3, 32, 0.2


def model() -> nn.Module:
    """A perceptron with one hidden layer, 64-128-10; the same weights at every call."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


# -- the programs: what runs on each rank ----------------------------------------


def pass_a_digit() -> tuple[Tensor, Tensor]:
    """Rank 0 has an image; each rank receives it from its left and sends it to its right."""
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
    """Each rank adds up its own images; the all-reduce makes the sum over all ranks' images."""
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
    """Synchronous data-parallel SGD: every rank its shard, one averaged gradient for all."""
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


def train_alone(ranks: int, epochs: int = EPOCHS) -> dict[str, Any]:
    """The oracle: one process, whose every batch is the union of the ranks' batches."""
    import torch
    import torch.nn.functional as F

    net, (images, labels) = model(), digits()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    losses = []
    for _ in range(epochs):
        for rows in _batches(len(images), ranks):
            loss = F.cross_entropy(net(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return {"losses": losses, "weights": _flat(net)}


def train_with_servers(mode: str, epochs: int = PS_EPOCHS) -> dict[str, Any]:
    """The parameter server: pull the weights, compute a gradient, push it; servers update."""
    import torch
    import torch.nn.functional as F

    from distkit import kvstore
    from distkit.data.shards import shard

    images, labels = shard(*digits())
    net = model()
    weights = dict(net.named_parameters())
    kv = kvstore.create(mode)
    for key, w in weights.items():
        kv.init(key, w.detach())
    # the servers add the workers' gradients; dividing makes the sum a mean
    kv.set_optimizer(kvstore.SGD(learning_rate=LR / kv.num_workers))
    losses = []
    for _ in range(epochs):
        for i in range(0, len(images) - BATCH + 1, BATCH):
            with torch.no_grad():
                for key, w in weights.items():
                    kv.pull(key, out=w)
            with mark("gradient"):
                loss = F.cross_entropy(net(images[i : i + BATCH]), labels[i : i + BATCH])
                net.zero_grad()
                loss.backward()
            for key, w in weights.items():
                if w.grad is not None:
                    kv.push(key, w.grad)
            losses.append(loss.item())
    kv.barrier()
    with torch.no_grad():
        for key, w in weights.items():
            kv.pull(key, out=w)
    return {"losses": losses, "weights": _flat(net)}


def _batches(size: int, ranks: int) -> Iterator[list[int]]:
    """The rows of each step's global batch, as the ranks' shards take them."""
    each = size // ranks
    for i in range(0, each - BATCH + 1, BATCH):
        yield [k * ranks + r for r in range(ranks) for k in range(i, i + BATCH)]


def _flat(net: nn.Module) -> Tensor:
    import torch

    return torch.cat([w.detach().reshape(-1) for w in net.parameters()])


def accuracy(weights: Tensor) -> float:
    """The fraction of all digits that a 64-128-10 perceptron with these weights gets right."""
    import torch

    net, (images, labels) = model(), digits()
    torch.nn.utils.vector_to_parameters(weights, net.parameters())
    with torch.no_grad():
        return float((net(images).argmax(1) == labels).float().mean())


# -- the demonstrations ----------------------------------------------------------


@dataclass
class Demo:
    """The result of a demonstration: sentences, the traces they are drawn from, and a view."""

    name: str
    title: str
    lines: list[str] = field(default_factory=list)
    traces: dict[str, Trace] = field(default_factory=dict)
    view: str = "Timeline"

    def __repr__(self) -> str:
        return "\n".join([self.title, *("  " + line for line in self.lines)])

    def _ipython_display_(self) -> None:
        from distkit import views

        print(self)
        getattr(views, self.view)(next(iter(self.traces.values())))._ipython_display_()


def p2p(cluster: Cluster | None = None) -> Demo:
    """Send and receive: a handwritten digit goes from rank to rank."""
    import torch

    with _cluster(cluster) as ranks:
        run = ranks.submit(pass_a_digit).wait()
    demo = Demo("p2p", "p2p: a digit passed from rank to rank by send and recv")
    _, sent = run.results[0]
    for rank, (before, after) in enumerate(run.results):
        demo.lines += _picture(f"rank {rank}", before, after)
    equal = all(torch.equal(after, sent) for _, after in run.results)
    demo.lines.append(_brief(run.trace))
    demo.lines.append(f"every rank ends with the same image, bit by bit: {_yes(equal)}")
    demo.traces["p2p"] = run.trace
    return demo


def all_reduce(cluster: Cluster | None = None) -> Demo:
    """All-reduce: the sum over all ranks, by torch's own call and by a ring on this page."""
    import torch

    from distkit.algorithms.all_reduce.ring import ring_all_reduce

    demo = Demo("all_reduce", "all_reduce: the average digit, from partial sums on every rank")
    with _cluster(cluster) as ranks:
        n = ranks.plan.ranks
        native = ranks.submit(average_digit).wait()
        ring = ranks.submit(average_digit, ring_all_reduce).wait()
    images = digits()[0][: 1797 // n * n]
    partial, mean = native.results[0]
    demo.lines += _picture("rank 0", partial / (len(images) // n), mean)
    same = all(torch.equal(r[1], ring.results[0][1]) for r in ring.results)
    error = float((ring.results[0][1] - images.mean(0)).abs().max())
    demo.lines += [
        f"native: {_brief(native.trace)}",
        f"ring:   {_brief(ring.trace)}, {len(ring.trace.messages) // n} per rank = 2(n-1)",
        f"ring: all ranks equal to the bit: {_yes(same)}; "
        f"largest difference to one process's mean: {error:.1e}",
    ]
    demo.traces = {"all_reduce (native)": native.trace, "all_reduce (ring)": ring.trace}
    return demo


def sync_sgd(cluster: Cluster | None = None) -> Demo:
    """Synchronous SGD: the replicas stay identical, and equal one process on the whole batch."""
    import torch

    with _cluster(cluster) as ranks:
        n = ranks.plan.ranks
        steps = EPOCHS * len(list(_batches(1797, n)))
        run = ranks.submit(train_in_step).wait()
    alone = train_alone(n)
    weights = [r["weights"] for r in run.results]
    identical = all(torch.equal(w, weights[0]) for w in weights)
    difference = float((weights[0] - alone["weights"]).abs().max())
    demo = Demo("sync_sgd", f"sync_sgd: {n} replicas of a 64-128-10 perceptron learn digits")
    demo.view = "Gradients"
    first, last = (sum(r["losses"][i] for r in run.results) / n for i in (0, -1))
    demo.lines = [
        f"{steps} steps of {n} x {BATCH} images: loss {first:.3f} → {last:.3f}, "
        f"accuracy {accuracy(weights[0]):.1%}",
        f"loss  {_spark(torch.tensor([r['losses'] for r in run.results]).mean(0).tolist())}",
        f"replicas identical to the bit: {_yes(identical)}",
        f"largest difference of a weight to one process on the whole batch: {difference:.1e}",
        _brief(run.trace),
    ]
    demo.traces["sync_sgd"] = run.trace
    return demo


def parameter_server(cluster: Cluster | None = None) -> Demo:
    """The parameter server: workers push gradients, servers update, in step and out of step."""
    demo = Demo("parameter_server", "parameter_server: workers push gradients to servers")
    demo.view = "Servers"
    with _cluster(cluster, servers=2) as ranks:
        n, plan = ranks.plan.ranks, ranks.plan
        demo.lines.append(
            f"{n} workers, {plan.servers} servers and a scheduler, each a process of its own"
        )
        for mode in ("dist_sync", "dist_async"):
            run = ranks.submit(train_with_servers, mode).wait()
            losses = [r["losses"] for r in run.results]
            final = accuracy(run.results[0]["weights"])
            demo.lines.append(
                f"{mode}: {sum(map(len, losses))} gradients in {run.seconds:.1f} s, "
                f"loss {losses[0][0]:.3f} → {losses[0][-1]:.3f}, accuracy {final:.1%}"
            )
            demo.lines.append(f"      {_brief(run.trace)}")
            if mode == "dist_sync":
                alone = train_alone(n, PS_EPOCHS)["weights"]
                difference = float((run.results[0]["weights"] - alone).abs().max())
                demo.lines.append(
                    "      largest difference of a weight to one process on the whole batch: "
                    f"{difference:.1e}"
                )
            demo.traces[mode] = run.trace
    return demo


#: The demonstrations by name, in the order in which they teach.
ALL: dict[str, Callable[..., Demo]] = {
    "p2p": p2p,
    "all_reduce": all_reduce,
    "sync_sgd": sync_sgd,
    "parameter_server": parameter_server,
}


# -- runs that were recorded before ------------------------------------------------

_FOLDER = Path(__file__).parent / "recorded"
#: The names of larger runs that come with distkit, made by tools/record.
RECORDED = sorted(file.stem for file in _FOLDER.glob("*.trace"))


def recorded(name: str) -> Trace:
    """The trace of a run that comes with distkit: larger than a laptop's, and it needs no torch.

    Args:
        name: one of ``dk.demos.RECORDED``.

    Raises:
        ValueError: there is none of this name.

    >>> trace = recorded("ring_16")
    >>> len(trace.messages), trace.info.name
    (480, 'A ring all-reduce on 16 ranks')
    """
    if name not in RECORDED:
        raise ValueError(f"no recorded run is called {name!r}. There are: {', '.join(RECORDED)}.")
    return Trace.load(_FOLDER / f"{name}.trace")


# -- small parts -----------------------------------------------------------------


@contextmanager
def _cluster(given: Cluster | None, *, servers: int = 0) -> Iterator[Cluster]:
    """The cluster that was given, or one for as long as the demonstration takes."""
    from distkit.cluster.cluster import Cluster

    if given is not None:
        yield given
        return
    with Cluster(workers=2, servers=servers) if servers else Cluster(RANKS) as made:
        yield made.wait()


def _brief(trace: Trace) -> str:
    sizes = sum(m.nbytes for m in trace.messages)
    said = f"{count(len(trace.messages), 'message')}, {sizes:,} bytes" if trace.messages else ""
    called = count(len(trace.collectives), "collective") if trace.collectives else ""
    return ", ".join(filter(None, [said, called, human_seconds(trace.seconds)]))


def _picture(title: str, before: Tensor, after: Tensor) -> list[str]:
    """Two images side by side, in half blocks: what a rank held before and after."""
    left, right = _blocks(before), _blocks(after)
    lines = [f"{a}   →   {b}" for a, b in zip(left, right, strict=True)]
    return [f"{title:<9}{lines[0]}", *(" " * 9 + line for line in lines[1:])]


def _blocks(image: Tensor) -> list[str]:
    shades = " ░▒▓█"
    rows = image.reshape(8, 8).clamp(0, 1).mul(4).round().int().tolist()
    return ["".join(shades[v] * 2 for v in row) for row in rows]


def _spark(values: list[float], width: int = 48) -> str:
    """A curve in one line of text."""
    bars = "▁▂▃▄▅▆▇█"
    picked = [values[i * (len(values) - 1) // (width - 1)] for i in range(width)]
    low, high = min(picked), max(picked)
    return "".join(bars[round((v - low) / ((high - low) or 1) * 7)] for v in picked)


def _yes(fact: bool) -> str:
    return "yes" if fact else "NO"
