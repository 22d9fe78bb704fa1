"""The catalogue: every algorithm by name, with its schedule, its page and what it costs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from distkit.algorithms import pipeline_schedules, schedules
from distkit.algorithms.pipeline_schedules import PipelineSchedule
from distkit.algorithms.rounds import Hosts, Round, bits, highest_bit


@dataclass(frozen=True)
class Algorithm:
    """One algorithm, with its two faces: its schedule for all ranks, and one rank's page.

    In costs n is the number of ranks, K [bytes] the size of the tensor, or of all chunks
    together, α [s] the latency of a message, β [s/byte] the inverse bandwidth, and γ [s/byte] the
    time to reduce.

    Args:
        name: its key in the catalogue.
        title: its name in a heading.
        summary: what it does, in one sentence.
        source: paper or documentation.
        schedule: number of ranks -> rounds; with the keyword options that it documents.
        home: where its page is, in ``distkit.algorithms``: "module.function".
        cost: how long it takes, as a formula to be read.
        rounds: number of ranks -> how many rounds its schedule has, with default options. A rank
            may have several messages in one, which go one after another: of "reduce_broadcast" the
            first has n-1 in each of two, so that 2(n-1) exchanges follow each other, as
            :class:`~distkit.Compare` and the lessons count them.
        messages: number of ranks -> the most messages that one rank sends.
        volume: number of ranks -> the most that one rank sends, in K.
        chunks: number of ranks -> in how many chunks the tensor is split, by
            ``torch.tensor_split``; with the options of the schedule.
        kind: the collective of ``torch.distributed`` whose contract the page has; "" for none.

    Example:
        >>> a = ALL_REDUCES["ring"]
        >>> a.messages(4), a.volume(4), a.chunks(4)
        (6, 1.5, 4)
        >>> a
        Ring: chunks go round once to be reduced, once more to be shared
            2(n-1)α + 2(n-1)/n Kβ + (n-1)/n Kγ    Patarasuk & Yuan, 2009
    """

    name: str
    title: str
    summary: str
    source: str
    schedule: Callable[..., Iterator[Round]]
    home: str
    cost: str
    rounds: Callable[[int], int]
    messages: Callable[[int], int]
    volume: Callable[[int], float]
    chunks: Callable[..., int] = lambda n: n
    kind: str = "all_reduce"

    @property
    def page(self) -> Callable[..., None]:
        """One rank's program, with the contract of ``torch.distributed``'s own call."""
        module, function = self.home.split(".")
        found = getattr(importlib.import_module(f"distkit.algorithms.{module}"), function)
        return found  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"{self.title}: {self.summary}\n    {self.cost}    {self.source}"


Entry = TypeVar("Entry", bound=Algorithm | PipelineSchedule)


class Catalogue(dict[str, Entry]):
    """Algorithms by name; shown as a table."""

    def __init__(self, *algorithms: Entry) -> None:
        super().__init__({a.name: a for a in algorithms})

    def __missing__(self, name: str) -> Entry:
        raise KeyError(f"no algorithm {name!r}; there are {', '.join(self)}")

    def __repr__(self) -> str:
        """One line for each: its name, what it costs and what it does."""
        names, costs = max(map(len, self), default=0), max(len(a.cost) for a in self.values())
        return "\n".join(f"{a.name:{names}}  {a.cost:{costs}}  {a.summary}" for a in self.values())

    def _repr_html_(self) -> str:
        """The same as a table of a notebook."""
        cells = [
            (f"<code>{a.name}</code>", a.title, a.summary, a.cost, a.source) for a in self.values()
        ]
        head = "".join(f"<th>{h}</th>" for h in ("", "algorithm", "", "time", "source"))
        style = 'style="text-align: left"'
        rows = "".join(f"<tr>{''.join(f'<td {style}>{c}</td>' for c in row)}</tr>" for row in cells)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def lg(n: int) -> int:
    """⌈log2 n⌉: how often one doubles until there are n."""
    return (n - 1).bit_length()


def _folds(n: int) -> int:
    """1 when n is no power of two."""
    return int(n > highest_bit(n))


def _floor_lg(n: int) -> int:
    return n.bit_length() - 1


def _one(n: int, **options: Any) -> int:
    """A tensor that is not split."""
    return 1


def _hosts(n: int, devices_per_host: int = 2, hosts: Hosts | None = None) -> int:
    return -(-n // devices_per_host) if hosts is None else len(hosts)


def _of_grid(n: int, devices_per_host: int | None = None, hosts: Hosts | None = None) -> int:
    """Chunks of a :func:`~distkit.algorithms.schedules.torus`."""
    return n if hosts is None else len(hosts) * min(map(len, hosts))


def _grid(n: int) -> int:
    """Rounds of a :func:`~distkit.algorithms.schedules.torus`."""
    g = schedules.columns(n)
    return 2 * (g - 1 + n // g - 1)


def _largest_subtree(n: int) -> int:
    """Ranks below and with a child of the root of a binomial tree."""
    return max((min(bit, n - bit) for bit in bits(n)), default=0)


#: Every all-reduce by name.
ALL_REDUCES = Catalogue(
    Algorithm(
        "reduce_broadcast",
        "Reduce to one, broadcast",
        "one rank reduces for all and sends the result to every rank",
        "TensorFlow's ReductionToOneDevice",
        schedules.reduce_broadcast,
        "all_reduces.reduce_broadcast_all_reduce",
        "2(n-1)(α + Kβ) + (n-1)Kγ",
        rounds=lambda n: 2 * (n > 1),
        messages=lambda n: n - 1,
        volume=lambda n: n - 1,
        chunks=_one,
    ),
    Algorithm(
        "flat",
        "Flat exchange",
        "every rank sends everything to every other rank and reduces by itself",
        "Chan et al., 2007",
        schedules.flat,
        "all_reduces.flat_all_reduce",
        "(n-1)(α + Kβ + Kγ)",
        rounds=lambda n: int(n > 1),
        messages=lambda n: n - 1,
        volume=lambda n: n - 1,
        chunks=_one,
    ),
    Algorithm(
        "ring",
        "Ring",
        "chunks go round once to be reduced, once more to be shared",
        "Patarasuk & Yuan, 2009",
        schedules.ring,
        "collectives.ring_all_reduce",
        "2(n-1)α + 2(n-1)/n Kβ + (n-1)/n Kγ",
        rounds=lambda n: 2 * (n - 1),
        messages=lambda n: 2 * (n - 1),
        volume=lambda n: 2 * (n - 1) / n,
    ),
    Algorithm(
        "pipelined_ring",
        "Pipelined ring",
        "a ring of chunks in segments: one is reduced while the next is on its way",
        "Gloo's ring_chunked",
        schedules.pipelined_ring,
        "all_reduces.pipelined_ring_all_reduce",
        "2(n-1)Sα + 2(n-1)/n Kβ, S > 1 segments, if β > γ",
        rounds=lambda n: 4 * (n - 1),
        messages=lambda n: 4 * (n - 1),
        volume=lambda n: 2 * (n - 1) / n,
        chunks=lambda n, segments=2: n * segments,
    ),
    Algorithm(
        "tree",
        "Binomial tree",
        "up a tree to rank 0, and down again",
        "Thakur et al., 2005",
        schedules.tree,
        "all_reduces.tree_all_reduce",
        "2⌈lg n⌉(α + Kβ) + ⌈lg n⌉Kγ",
        rounds=lambda n: 2 * lg(n),
        messages=lg,
        volume=lg,
        chunks=_one,
    ),
    Algorithm(
        "double_tree",
        "Double binary tree",
        "two trees, each for half of the data, with all links busy both ways",
        "Sanders et al., 2009; NCCL 2.4",
        schedules.double_tree,
        "all_reduces.double_tree_all_reduce",
        "at most (S + 2⌈lg n⌉ - 1)(4α + 2K/S β + K/S γ), S ≤ 8 segments",
        rounds=lambda n: (3 + 2 * lg(n)) * (n > 1),
        messages=lambda n: 4 * min(n, 4) * (n > 1),
        volume=lambda n: min(n, 4) / 2 * (n > 1),
        chunks=lambda n, segments=4: 2 * segments,
    ),
    Algorithm(
        "recursive_doubling",
        "Recursive doubling",
        "partners at distance 1, 2, 4, … exchange everything",
        "Thakur et al., 2005",
        schedules.recursive_doubling,
        "all_reduces.recursive_doubling_all_reduce",
        "lg n (α + Kβ + Kγ)",
        rounds=lambda n: _floor_lg(n) + 2 * _folds(n),
        messages=lambda n: _floor_lg(n) + _folds(n),
        volume=lambda n: _floor_lg(n) + _folds(n),
        chunks=_one,
    ),
    Algorithm(
        "halving_doubling",
        "Recursive halving and doubling",
        "partners exchange halves, quarters, … to reduce, and the same way back to share",
        "Rabenseifner, 2004",
        schedules.halving_doubling,
        "all_reduces.halving_doubling_all_reduce",
        "2 lg n α + 2(n-1)/n Kβ + (n-1)/n Kγ",
        rounds=lambda n: 2 * _floor_lg(n) + 2 * _folds(n),
        messages=lambda n: 2 * _floor_lg(n) + _folds(n),
        volume=lambda n: 2 - 2 / highest_bit(n) + _folds(n),
        chunks=highest_bit,
    ),
    Algorithm(
        "hierarchical",
        "Hierarchical",
        "devices to their host's leader, a ring of leaders, and back",
        "TensorFlow's HierarchicalCopyAllReduce; Horovod",
        schedules.hierarchical,
        "all_reduces.hierarchical_all_reduce",
        "(g-1)(2α + 2Kβ + Kγ) + 2(m-1)α + (m-1)/m K(2β + γ), m hosts of g",
        rounds=lambda n: 2 * (n > 1) + 2 * (_hosts(n) - 1),
        messages=lambda n: (n > 1) + 2 * (_hosts(n) - 1),
        volume=lambda n: (n > 1) + 2 - 2 / _hosts(n),
        chunks=_hosts,
    ),
    Algorithm(
        "torus",
        "Two-dimensional ring",
        "rings along the rows and the columns of a grid of hosts × devices",
        "Ying et al., 2018; Mikami et al., 2018",
        schedules.torus,
        "all_reduces.torus_all_reduce",
        "2(g-1 + m-1)α + 2(n-1)/n Kβ + (n-1)/n Kγ",
        rounds=_grid,
        messages=_grid,
        volume=lambda n: 2 * (n - 1) / n,
        chunks=_of_grid,
    ),
)

#: The other collectives by name; "gossip" is none, and only comes near to an average.
COLLECTIVES = Catalogue(
    Algorithm(
        "broadcast",
        "Broadcast",
        "a binomial tree down from the root",
        "Thakur et al., 2005",
        schedules.broadcast,
        "collectives.broadcast",
        "⌈lg n⌉(α + Kβ)",
        rounds=lg,
        messages=lg,
        volume=lg,
        chunks=_one,
        kind="broadcast",
    ),
    Algorithm(
        "reduce",
        "Reduce",
        "a binomial tree up to the root",
        "Thakur et al., 2005",
        schedules.reduce,
        "collectives.reduce",
        "⌈lg n⌉(α + Kβ + Kγ)",
        rounds=lg,
        messages=lambda n: int(n > 1),
        volume=lambda n: int(n > 1),
        chunks=_one,
        kind="reduce",
    ),
    Algorithm(
        "scatter",
        "Scatter",
        "down a binomial tree, each message for a whole subtree",
        "Thakur et al., 2005",
        schedules.scatter,
        "collectives.scatter",
        "⌈lg n⌉α + (n-1)/n Kβ",
        rounds=lg,
        messages=lg,
        volume=lambda n: (n - 1) / n,
        kind="scatter",
    ),
    Algorithm(
        "gather",
        "Gather",
        "up a binomial tree, each message from a whole subtree",
        "Thakur et al., 2005",
        schedules.gather,
        "collectives.gather",
        "⌈lg n⌉α + (n-1)/n Kβ",
        rounds=lg,
        messages=lambda n: int(n > 1),
        volume=lambda n: _largest_subtree(n) / n,
        kind="gather",
    ),
    Algorithm(
        "all_gather",
        "All-gather",
        "every rank's chunk goes round a ring",
        "Patarasuk & Yuan, 2009",
        schedules.all_gather,
        "collectives.all_gather",
        "(n-1)α + (n-1)/n Kβ",
        rounds=lambda n: n - 1,
        messages=lambda n: n - 1,
        volume=lambda n: (n - 1) / n,
        kind="all_gather",
    ),
    Algorithm(
        "reduce_scatter",
        "Reduce-scatter",
        "chunks are reduced on their way round a ring",
        "Patarasuk & Yuan, 2009",
        schedules.reduce_scatter,
        "collectives.reduce_scatter",
        "(n-1)α + (n-1)/n Kβ + (n-1)/n Kγ",
        rounds=lambda n: n - 1,
        messages=lambda n: n - 1,
        volume=lambda n: (n - 1) / n,
        kind="reduce_scatter",
    ),
    Algorithm(
        "all_to_all",
        "All-to-all",
        "in round s every rank serves the rank s places to the right",
        "Thakur et al., 2005",
        schedules.all_to_all,
        "collectives.all_to_all",
        "(n-1)α + (n-1)/n² Kβ",
        rounds=lambda n: n - 1,
        messages=lambda n: n - 1,
        volume=lambda n: (n - 1) / n**2,
        chunks=lambda n: n * n,
        kind="all_to_all",
    ),
    Algorithm(
        "barrier",
        "Barrier",
        "every rank tells ranks at distance 1, 2, 4, … who has arrived",
        "Hensgen, Finkel & Manber, 1988",
        schedules.barrier,
        "collectives.barrier",
        "⌈lg n⌉α",
        rounds=lg,
        messages=lg,
        volume=lambda n: 0,
        chunks=_one,
        kind="barrier",
    ),
    Algorithm(
        "gossip",
        "Gossip",
        "every rank averages with its neighbours only",
        "Lian et al., 2017",
        schedules.gossip,
        "all_reduces.gossip_average",
        "2α + 2Kβ per round",
        rounds=lambda n: int(n > 1),
        messages=lambda n: 2 * (n > 1),
        volume=lambda n: 2 * (n > 1),
        chunks=_one,
        kind="",
    ),
)

#: The schedules of a pipeline by name.
PIPELINES = Catalogue(*pipeline_schedules.SCHEDULES)
