"""What the judge says."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Point:
    """One thing that was looked at, and whether it is as it should be."""

    good: bool
    text: str


@dataclass(frozen=True)
class Verdict:
    """How good an answer is; true when the exercise is solved.

    ``status`` is "solved", "right, but not the best", "not right yet" or "not attempted".
    """

    name: str
    status: str
    points: tuple[Point, ...] = ()
    advice: str = ""

    def __bool__(self) -> bool:
        return self.status == "solved"

    def __repr__(self) -> str:
        lines = [f"{self.name}: {self.status}"]
        lines += [f"  {'✓' if p.good else '✗'} {_indented(p.text)}" for p in self.points]
        return "\n".join([*lines, *([f"  {self.advice}"] if self.advice else [])])

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        colour = {"solved": "#009e73", "not attempted": "#7f8c99"}.get(self.status, "#d55e00")
        rows = "".join(
            f'<tr><td style="color:{"#009e73" if p.good else "#d55e00"};vertical-align:top">'
            f'{"✓" if p.good else "✗"}</td><td style="text-align:left;white-space:pre-wrap">'
            f"{escape(p.text)}</td></tr>"
            for p in self.points
        )
        advice = self.advice and f'<div style="white-space:pre-wrap">{escape(self.advice)}</div>'
        return (
            f'<div style="border-left:4px solid {colour};padding:4px 12px"><strong>'
            f"{escape(self.name)}: {self.status}</strong><table>{rows}</table>{advice}</div>"
        )


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")
