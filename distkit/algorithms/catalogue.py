"""The catalogue: algorithms by name, with schedule, reference implementation and cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from distkit.algorithms.pipeline_schedules import SCHEDULES, PipelineSchedule
from distkit.algorithms.rounds import Schedule, traffic

#: One rank's program, with the contract of a collective of ``torch.distributed``.
Reference = TypeVar("Reference", bound=Callable[..., None])


@dataclass(frozen=True)
class Algorithm:
    """One algorithm: its schedule for all ranks, and its reference implementation on one rank.

    In costs n is the number of ranks, K [bytes] the size of the tensor, or of all chunks
    together, α [s] the latency of a message, β [s/byte] the inverse bandwidth, and γ [s/byte] the
    time to reduce.

    Args:
        name: its key in the catalogue.
        reference: one rank's program, with the contract of ``torch.distributed``'s own call.
        title: its name in a heading.
        summary: what it does, in one sentence.
        source: paper or documentation.
        cost: how long it takes, as a formula to be read.
        schedule: number of ranks -> rounds; with the keyword options that it documents.
        seconds: the same as ``cost``, computed: ``seconds(n, nbytes, link)`` of arrays of ranks and
            bytes and a :class:`~distkit_simulation.Link`, with the options of the schedule; None
            if it has no formula.
        chunks: number of ranks -> in how many chunks the tensor is split, by
            ``torch.tensor_split``; with the options of the schedule.

    Example:
        >>> from distkit.algorithms import ALL_REDUCES
        >>> a = ALL_REDUCES["ring"]
        >>> a.rounds(4), a.messages(4), a.volume(4), a.chunks(4)
        (6, 6, 1.5, 4)
        >>> a
        Ring: chunks go round once to be reduced, once more to be shared
            2(n-1)α + 2(n-1)/n Kβ + (n-1)/n Kγ    Patarasuk & Yuan, 2009
    """

    name: str
    reference: Callable[..., None]
    title: str
    summary: str
    source: str
    cost: str
    schedule: Callable[..., Schedule]
    seconds: Callable[..., Any] | None = None
    chunks: Callable[..., int] = lambda n, **options: n

    def rounds(self, n: int) -> int:
        """The number of rounds on n ranks.

        A rank may send several messages in one round, one after another: of "reduce_broadcast"
        the root has n-1 in each of two, so that 2(n-1) exchanges follow each other, as
        :class:`~distkit.Compare` counts them.
        """
        return sum(1 for _ in self.schedule(n))

    def messages(self, n: int) -> int:
        """The most messages that one of n ranks sends."""
        return int(self._traffic(n)[0].max())

    def volume(self, n: int) -> float:
        """The most that one of n ranks sends, as a multiple of K."""
        return float(self._traffic(n)[1].max() / self.chunks(n))

    def _traffic(self, n: int) -> Any:
        return traffic(self.schedule(n), n, self.chunks(n), self.chunks(n))

    def __repr__(self) -> str:
        return f"{self.title}: {self.summary}\n    {self.cost}    {self.source}"


Entry = TypeVar("Entry", bound=Algorithm | PipelineSchedule)


class Catalogue(dict[str, Entry]):
    """Algorithms by name; shown as a table."""

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


class Algorithms(Catalogue[Algorithm]):
    """Algorithms that register themselves."""

    def register(self, **facts: Any) -> Callable[[Reference], Reference]:
        """Make an entry of a reference implementation and these fields of :class:`Algorithm`.

        The entry has the function's name without "_all_reduce".
        """

        def add(reference: Reference) -> Reference:
            name = reference.__name__.removesuffix("_all_reduce")
            self[name] = Algorithm(name, reference, **facts)
            return reference

        return add


#: The schedules of a pipeline by name.
PIPELINES = Catalogue({schedule.name: schedule for schedule in SCHEDULES})
