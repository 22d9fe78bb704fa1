"""Provides notebook output other than views: figures, warnings, findings and a progress bar."""

from __future__ import annotations

import io
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any, TypeVar

from distkit.trace.log import EventLog, grouped
from distkit.views.scene import svg
from distkit.views.scene.theme import GRAY, GRAY_DARK, RANKS_DARK, RANKS_LIGHT, darkened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from distkit.diagnosis.rules import Finding

T = TypeVar("T")

#: Protects matplotlib's global settings, since widgets draw in several threads.
_draw_lock = threading.RLock()


@contextmanager
def style(style: str | dict[str, Any] = "distkit.plots") -> Iterator[None]:
    """Return a context manager or decorator that applies a matplotlib style."""
    import matplotlib.style

    with _draw_lock, matplotlib.style.context(style):
        yield


def new(width: float, height: float, **options: Any) -> Figure:
    """Return a figure that cells display as a picture, without registering it with pyplot.

    Args:
        width: width [inches].
        height: height [inches].
        options: arguments of ``matplotlib.figure.Figure``.
    """
    from matplotlib.figure import Figure

    shell = _shell()
    if shell is not None and Figure not in shell.display_formatter.formatters["image/png"]:
        from IPython.core.pylabtools import select_figure_formats

        select_figure_formats(shell, {"png"})  # as pyplot does; otherwise cells show the repr
    return Figure(figsize=(width, height), **options)


# -- findings and warnings -------------------------------------------------------------

#: A card with a colored edge: red for a hang, amber for a warning.
_CARD = """
.distkit-notice { display: flex; flex-wrap: wrap; align-items: center; gap: 6px 36px;
  max-width: 1600px; margin: 4px 0; padding: 10px 18px 11px; border-radius: 12px;
  border: 1px solid var(--jp-border-color2, #c8ced4); border-left: 5px solid #e08600;
  font: 13px/1.5 var(--jp-ui-font-family, sans-serif); }
.distkit-notice.hang { border-left-color: var(--jp-error-color1, #c4314b); }
.jp-RenderedHTMLCommon > .distkit-notice { margin-right: -20px; }
.distkit-notice > div { flex: 1 1 420px; min-width: 0; }
.distkit-notice b.title { font-size: 14.5px; margin-right: 6px; }
.distkit-notice :is(p, ul) { margin: 5px 0 0 !important; padding: 0 !important; }
.distkit-notice li { list-style: none; margin: 3px 0 0; }
.distkit-notice li code { margin-left: 12px; white-space: pre-wrap; }
.distkit-notice i { display: inline-block; min-width: 20px; padding: 0 5px; margin-right: 3px;
  border-radius: 10px; font: 700 12px/20px var(--jp-ui-font-family, sans-serif);
  text-align: center; color: var(--on-light); background: var(--light); box-sizing: border-box; }
body[data-jp-theme-light="false"] .distkit-notice i { color: #101418; background: var(--dark); }
"""


def card(title: str, *parts: str, hang: bool = False, picture: str = "") -> str:
    """Return a card as HTML; ``parts`` and ``picture`` are HTML, ``title`` is text."""
    return (
        f'<style>{_CARD}</style><div class="distkit-notice{" hang" * hang}">'
        f'<div><b class="title">{escape(title)}</b> {"".join(parts)}</div>{picture}</div>'
    )


def finding_card(
    finding: Finding,
    sources: Mapping[str, str] | None = None,
    *,
    brief: bool = False,
    picture: str = "",
) -> str:
    """Return a finding as HTML: the mistake, each rank's line, and the remedy.

    Args:
        finding: the finding.
        sources: the source code of each file, by label.
        brief: whether to leave out the message.
        picture: HTML that is shown next to the finding.
    """
    from distkit.diagnosis.rules import linked

    by_line = grouped(sorted(finding.lines), lambda rank: finding.lines[rank])
    rows = (
        f"<li>{''.join(map(_chip, ranks))} {escape(line)}{_source(line, sources or {})}</li>"
        for line, ranks in by_line.items()
    )
    parts = [
        linked(f"[{finding.code}]"),
        f"<p>{with_code(linked(finding.message))}</p>" * (not brief),
        f"<ul>{''.join(rows)}</ul>",
        f"<p><b>Remedy:</b> {with_code(linked(finding.remedy))}</p>" * bool(finding.remedy),
    ]
    return card(finding.rule.title().strip("."), *parts, hang=finding.hang, picture=picture)


def with_code(html: str) -> str:
    """Format the parts of ``html`` between backquotes as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html)


def _chip(rank: int) -> str:
    """Return a badge with a rank's number, in the rank's color."""
    light, dark = (colors[rank % len(colors)] for colors in (RANKS_LIGHT, RANKS_DARK))
    style = f"--light:{light};--dark:{dark};--on-light:{svg.readable(light)}"
    return f'<i title="rank {rank}" style="{style}">{rank}</i>'


def _source(line: str, sources: Mapping[str, str]) -> str:
    """Return the source code of ``file:line`` as HTML; "" if it is unknown."""
    file, _, number = line.rpartition(":")
    text = sources.get(file, "").splitlines()[int(number) - 1 :][:1] if number.isdigit() else []
    return "".join(f"<code>{escape(code.strip())}</code>" for code in text)


def hang(findings: Sequence[Finding], trace: EventLog, *, brief: bool = False) -> dict[str, str]:
    """Return the findings of a hang, with its wait-for graph, for all front ends.

    Args:
        findings: the findings; {} is returned if there are none.
        trace: the run.
        brief: whether to leave out the messages.
    """
    from distkit.diagnosis.evidence import Evidence
    from distkit.views.scene.waits import waits_svg
    from distkit.views.widget.snapshot import as_picture

    states = Evidence(trace).graph.rank_states
    drawn, summary = waits_svg(states), "; ".join(["wait-for graph", *map(str, states)])
    picture = as_picture(drawn, summary) if drawn else {"text/html": "", "text/plain": summary}
    cards = (
        finding_card(f, trace.info.sources, brief=brief, picture=picture["text/html"] * (not n))
        for n, f in enumerate(findings)
    )
    return {**picture, "text/html": "".join(cards)} if findings else {}


# -- figures ---------------------------------------------------------------------------


def to_html(figure: Figure) -> str | None:
    """Return a transparent figure as HTML, or None if the figure has a background color."""
    from distkit.views.widget.snapshot import as_picture

    if figure.get_facecolor()[-1]:  # the opacity
        return None
    return as_picture(to_svg(figure, bbox_inches="tight"), _title(figure))["text/html"]


def _title(figure: Figure) -> str:
    """Return the titles of a figure's axes, or the y labels of axes without a title."""
    titles = (axes.get_title("left") or axes.get_ylabel() for axes in figure.axes)
    return ", ".join(filter(None, titles)) or "plot"


def to_svg(figure: Figure, **options: Any) -> str:
    """Return a figure as an SVG element with the fonts and the color scheme of its page.

    Args:
        figure: the figure.
        options: arguments of ``Figure.savefig``.
    """
    file = io.StringIO()
    fonts = [family.strip("'") for family in svg.FONT.split(", ")]
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "distkit", "font.sans-serif": fonts}
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type")) | {"Title": _title(figure)}
    with style(settings):
        figure.savefig(file, format="svg", metadata=metadata, **options)
    text = file.getvalue()
    return _COLOR.sub(_light_and_dark, text[text.index("<svg") :])


#: A color in a style attribute.
_COLOR = re.compile(r"(?<=: )#[0-9a-f]{6}\b")
#: Grays of the matplotlib style, and the grays of the light and dark themes that replace them.
_NEUTRAL = {"#737b85": (GRAY, GRAY_DARK), "#7b838d": (GRAY, GRAY_DARK)}


def _light_and_dark(color: re.Match[str]) -> str:
    """Return a CSS color with the counterparts of a color in the light and dark themes."""
    return "light-dark({}, {})".format(*_NEUTRAL.get(color[0], (color[0], darkened(color[0]))))


def _shell() -> Any:
    """Return the running IPython shell, if IPython is imported."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module is not None else None


def advance(steps: Sequence[T]) -> Iterator[T]:
    """Iterate over ``steps``; in a notebook, show a progress bar until the end.

    >>> [*advance("abc")]
    ['a', 'b', 'c']
    """
    if not hasattr(_shell(), "kernel"):
        yield from steps
        return
    from IPython.display import display

    bar = display({"text/html": ""}, raw=True, display_id=True)
    for done, step in enumerate(steps):
        html = f'<progress max="{len(steps)}" value="{done}"></progress>'
        bar.update({"text/html": html, "text/plain": f"{done} of {len(steps)}"}, raw=True)
        yield step
    bar.update({"text/html": "", "text/plain": ""}, raw=True)
