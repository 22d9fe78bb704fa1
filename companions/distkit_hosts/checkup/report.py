"""What the doctor says: as text for a terminal, a table for a notebook, JSON for a program."""

from __future__ import annotations

import html
import json
import math
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property

from distkit.views.scene.theme import RANKS_LIGHT, WARNING_LIGHT, channels
from distkit.views.scene.units import aligned, count, human_bytes, human_seconds
from distkit_hosts.checkup import alone, together
from distkit_hosts.checkup.check import Check, Level
from distkit_hosts.checkup.facts import HERE, Facts, cores, gpus

#: Lines are at most so long [columns].
WIDTH = 100

#: A table in a terminal has at most so many columns, beside the first.
COLUMNS = 8

_COLOURS = {Level.FAILURE: WARNING_LIGHT, Level.WARNING: RANKS_LIGHT[1], Level.OK: RANKS_LIGHT[2]}

Rows = list[tuple[str, ...]]


@dataclass(frozen=True)
class Report:
    """The doctor's findings; a notebook shows it as a table, ``print`` as text.

    Args:
        facts: what they are about.
    """

    facts: Facts

    @cached_property
    def checks(self) -> list[Check]:
        """Everything that was looked at, the worst first."""
        machines = [c for host, m in self.facts.machines.items() for c in alone.judge(host, m)]
        single = not self.facts.targets  # several machines are a table
        kept = [c for c in machines if single or c.level is not Level.OK]
        order = [Level.FAILURE, Level.WARNING, Level.OK]
        checks = [*kept, *together.judge(self.facts)]
        return sorted(checks, key=lambda check: order.index(check.level))

    @property
    def failures(self) -> list[Check]:
        """What has to be repaired before ranks work together."""
        return [check for check in self.checks if check.level is Level.FAILURE]

    @property
    def warnings(self) -> list[Check]:
        """What will surprise."""
        return [check for check in self.checks if check.level is Level.WARNING]

    @property
    def good(self) -> bool:
        """True if nothing has to be repaired."""
        return not self.failures

    @property
    def title(self) -> str:
        """All in one line."""
        hosts = len(self.facts.targets) - (HERE in self.facts.targets)
        who = f"this machine ({self.facts.machines[HERE]['hostname']})"
        who += f" and {count(hosts, 'host')}" if hosts else ""
        bad = [count(len(self.failures), "failure")] if self.failures else []
        bad += [count(len(self.warnings), "warning")] if self.warnings else []
        return f"{who}: {', '.join(bad) or 'all is well'}"

    def to_json(self) -> str:
        """One JSON object: ``good``, the ``checks``, and the ``facts`` that they are about."""
        checks = [asdict(check) for check in self.checks]
        plain = {"good": self.good, "checks": checks, "facts": self.facts.to_dict()}
        return json.dumps(plain, indent=2)

    def __str__(self) -> str:
        blocks = [self.title, "\n".join(line for check in self.checks for line in _lines(check))]
        blocks += [
            "\n".join([caption, *(f"  {line}" for line in aligned(part))])
            for caption, rows in self._tables()
            for part in _parts(rows)
        ]
        return "\n\n".join(blocks)

    __repr__ = __str__

    def _tables(self) -> Iterator[tuple[str, Rows]]:
        if self.facts.hosts:
            yield "Machines", machines(self.facts)
            yield "Latency, from row to column", matrix(self.facts, LATENCY)
            yield "Bandwidth, from row to column", matrix(self.facts, BANDWIDTH)

    def _repr_html_(self) -> str:
        checks = [
            f'<tr><td style="{_CELL};border-left:5px solid {_COLOURS[c.level]};padding-left:7px">'
            f'<b>{c.level}</b></td><td style="{_CELL}">{html.escape(str(c))}</td></tr>'
            for c in self.checks
        ]
        tables = [
            f'<div style="margin-top:8px"><b>{html.escape(caption)}</b></div>{_table(rows)}'
            for caption, rows in self._tables()
        ]
        return (
            '<div class="distkit-doctor" style="font-family:var(--jp-ui-font-family,sans-serif);'
            f'font-size:var(--jp-ui-font-size1,13px)"><b>{html.escape(self.title)}</b>'
            f"<table>{''.join(checks)}</table>{''.join(tables)}</div>"
        )


_CELL = "text-align:left;padding:1px 14px 1px 0;vertical-align:top"


def _table(rows: Rows) -> str:
    lines = [
        "".join(f'<{tag} style="{_CELL}{_shade(cell)}">{html.escape(cell)}</{tag}>' for cell in row)
        for tag, row in zip(["th", *["td"] * len(rows)], rows, strict=False)
    ]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _shade(cell: str) -> str:
    """The colour below a link's number: the more, the worse it is than the best."""
    opacity = min(0.6, 0.3 * math.log10(cell.worse)) if isinstance(cell, Number) else 0.0
    red, green, blue = channels(WARNING_LIGHT)
    return f";background:rgba({red},{green},{blue},{opacity:.2f})" if opacity > 0.05 else ""


def _parts(rows: Rows) -> Iterator[Rows]:
    """A table in pieces that a terminal can show side by side; each has the first column."""
    columns = len(rows[0]) - 1
    width = math.ceil(columns / math.ceil(columns / COLUMNS))
    for first in range(1, columns + 1, width):
        yield [(row[0], *row[first : first + width]) for row in rows]


def _lines(check: Check) -> list[str]:
    """A check as a paragraph."""
    return textwrap.wrap(
        f"{check.level:<8} {check}",
        WIDTH,
        initial_indent="  ",
        subsequent_indent=" " * 11,
        break_on_hyphens=False,
        break_long_words=False,
    )


def machines(facts: Facts) -> Rows:
    """What each machine has."""
    head = (
        "machine",
        "address",
        "cores",
        "memory",
        "GPUs",
        "/dev/shm",
        "TMPDIR",
        "Python",
        "torch",
    )
    rows = [
        (
            label,
            facts.addresses.get(label, "?"),
            str(cores(m)),
            human_bytes(m["memory"]["free"]),
            str(len(gpus(m).usable)),
            human_bytes(m["shm"].get("free", 0)),
            human_bytes(m["temporary"].get("free", 0)),
            m["python"]["version"],
            m["packages"]["torch"] or "none",
        )
        for label, m in facts.machines.items()
    ]
    return [head, *rows]


#: What a matrix shows: an index into (alpha, beta).
LATENCY, BANDWIDTH = 0, 1


class Number(str):
    """A link's number in words, and how many times worse it is than the best."""

    worse: float


def matrix(facts: Facts, which: int) -> Rows:
    """Latency or bandwidth from every machine to every other."""
    links, labels = facts.links(), list(facts.machines)
    best = min((link[which] for link in links.values()), default=1.0)

    def cell(a: str, b: str) -> str:
        if a == b:
            return "·"
        value = links.get((a, b), (math.inf, math.inf))[which]
        words = f"{human_bytes(1 / value)}/s" if which == BANDWIDTH else human_seconds(value)
        number = Number(words if value < math.inf else "none")
        number.worse = max(1.0, value / best) if best else 1.0
        return number

    return [("", *labels), *((a, *(cell(a, b) for b in labels)) for a in labels)]
