"""A catalog of algorithms by name, with schedule, reference implementation and cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from distkit.algorithms.rounds import Schedule, traffic

#: The program of one rank, with the contract of a ``torch.distributed`` collective.
Reference = TypeVar("Reference", bound=Callable[..., None])


@dataclass(frozen=True, repr=False)
class CatalogEntry:
    """An entry of a catalog.

    Args:
        name: the key in the catalog.
        title: the name in headings.
        summary: a description in one sentence.
        source: the paper or documentation.
        cost: the cost formulas, for display.
    """

    name: str
    title: str
    summary: str
    source: str
    cost: str

    def __repr__(self) -> str:
        return f"{self.title}: {self.summary}\n    {self.cost}    {self.source}"


@dataclass(frozen=True, repr=False)
class Algorithm(CatalogEntry):
    """An algorithm, with its schedule for all ranks and its reference implementation for one rank.

    In costs, n is the number of ranks, K [bytes] the total size of the tensor or of all chunks, α
    [s] the latency of a message, β [s/byte] the inverse bandwidth, and γ [s/byte] the time to
    reduce.

    Args:
        reference: the program of one rank, with the contract of the ``torch.distributed`` call.
        schedule: returns the rounds for a number of ranks; its docstring lists its options.
        seconds: computes ``cost`` as ``seconds(n, nbytes, link)``, with the options of the
            schedule; ``n`` and ``nbytes`` are arrays, and ``link`` is a
            :class:`~distkit_simulation.Link`. None if there is no formula.
        chunks: returns the number of chunks into which ``torch.tensor_split`` splits the tensor,
            given a number of ranks and the options of the schedule.

    Example:
        >>> from distkit.algorithms import ALL_REDUCES
        >>> a = ALL_REDUCES["ring"]
        >>> a.rounds(4), a.messages(4), a.volume(4), a.chunks(4)
        (6, 6, 1.5, 4)
        >>> a
        Ring: chunks travel around once to be reduced, once more to be gathered
            2(n-1)α + 2(n-1)/n Kβ + (n-1)/n Kγ    Patarasuk & Yuan, 2009
    """

    reference: Callable[..., None]
    schedule: Callable[..., Schedule]
    seconds: Callable[..., Any] | None = None
    chunks: Callable[..., int] = lambda n, **options: n

    def rounds(self, n: int) -> int:
        """Return the number of rounds on n ranks.

        A rank may send or receive several messages in one round, one after another. The root of
        "reduce_broadcast" has n-1 messages in each of two rounds, which :class:`~distkit.Compare`
        counts as 2(n-1) consecutive exchanges.
        """
        return sum(1 for _ in self.schedule(n))

    def messages(self, n: int) -> int:
        """Return the largest number of messages that any of n ranks sends."""
        return int(self._traffic(n)[0].max())

    def volume(self, n: int) -> float:
        """Return the largest amount of data that any of n ranks sends, as a multiple of K."""
        return float(self._traffic(n)[1].max() / self.chunks(n))

    def _traffic(self, n: int) -> Any:
        return traffic(self.schedule(n), n, self.chunks(n), self.chunks(n))


Entry = TypeVar("Entry", bound=CatalogEntry)


class Catalog(dict[str, Entry]):
    """Algorithms by name; shown as a table."""

    def __missing__(self, name: str) -> Entry:
        raise KeyError(f"unknown algorithm {name!r}; choose from {', '.join(self)}")

    def __repr__(self) -> str:
        """Return one line per algorithm: name, cost and summary."""
        names, costs = max(map(len, self), default=0), max(len(a.cost) for a in self.values())
        return "\n".join(f"{a.name:{names}}  {a.cost:{costs}}  {a.summary}" for a in self.values())

    def _repr_html_(self) -> str:
        """Return the algorithms as an HTML table."""
        cells = [
            (
                f"<code>{a.name}</code>",
                a.title,
                a.summary,
                a.cost.translate({ord(" "): "\u00a0", ord("-"): "−"}).replace(
                    "\u00a0+\u00a0", " + "
                ),
                a.source,
            )
            for a in self.values()
        ]
        style = 'style="text-align: left"'
        head = "".join(
            f"<th {style}>{heading}</th>"
            for heading in ("name", "algorithm", "how it works", "time", "source")
        )
        body = "".join(f"<tr>{''.join(f'<td {style}>{c}</td>' for c in row)}</tr>" for row in cells)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class Algorithms(Catalog[Algorithm]):
    """A catalog with a decorator that registers reference implementations."""

    def register(self, **fields: Any) -> Callable[[Reference], Reference]:
        """Register a reference implementation with these fields of :class:`Algorithm`.

        The key is the function's name without "_all_reduce".
        """

        def add(reference: Reference) -> Reference:
            name = reference.__name__.removesuffix("_all_reduce")
            self[name] = Algorithm(name, reference=reference, **fields)
            return reference

        return add
