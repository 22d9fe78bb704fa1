"""A page for a student: what was seen of each exercise, and the run in which it was seen."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from distkit.exercises.task import PASS, Criterion, Verdict
from distkit.views.timeline.columns import Columns
from distkit.views.timeline.static import MAX_BARS, to_svg

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
section { margin: 1.5rem 0; } table { margin: .3rem 0; } td { padding: .1rem .5rem .1rem 0; }
figure { margin: .8rem 0; } figcaption { opacity: .75; } svg { max-width: 100%; height: auto; }
"""


def page(title: str, verdicts: Sequence[Verdict]) -> str:
    """A page of HTML that needs no other file and no network.

    Args:
        title: whose submission it is.
        verdicts: on its exercises.
    """
    points, most = (sum(getattr(v, name) for v in verdicts) for name in ("points", "max"))
    exercises = "".join(map(_exercise, verdicts)) or "<p>There is no exercise in it.</p>"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f"<h1>{escape(title)}: {points} of {most} points</h1>{exercises}</html>"
    )


def _exercise(verdict: Verdict) -> str:
    runs = "".join(_run(c) for c in verdict.criteria if c.trace and c.status != PASS)
    return f"<section>{verdict._repr_html_()}{runs}</section>"


def _run(criterion: Criterion) -> str:
    """The timeline of a run in which a criterion was not met."""
    assert criterion.trace is not None
    drawn = to_svg(Columns(criterion.trace).picture(MAX_BARS))
    return f"<figure>{drawn}<figcaption>The run of “{criterion.name}”</figcaption></figure>"
