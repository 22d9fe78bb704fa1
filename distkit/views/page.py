"""A stand-alone replay page: one file, no server, nothing loaded from anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple
from html import escape
from pathlib import Path
from string import Template

from distkit.events import Trace
from distkit.views.assets import css, esm
from distkit.views.columns import Columns
from distkit.views.frame import Json
from distkit.views.packing import lettered, packed
from distkit.views.static import MAX_BARS, to_svg
from distkit.views.text import COLUMNS, headline, rows
from distkit.views.theme import theme

#: So many rows of a table are written out.
MAX_ROWS = 300

_PAGE = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))


def to_html(trace: Trace | Mapping[str, Trace], path: str | Path) -> Path:
    """Write one trace, or several by name as tabs, as a page that opens from the disk.

    Args:
        trace: a trace, or ``{"p2p": trace, "all_reduce": other}``.
        path: the file to write.

    Returns:
        The path.

    >>> import tempfile
    >>> page = to_html(Trace(), Path(tempfile.mkdtemp()) / "run.html")
    >>> "<script" in page.read_text(encoding="utf-8")
    True
    """
    traces = {"": trace} if isinstance(trace, Trace) else dict(trace)
    path = Path(path)
    path.write_text(_page(traces), encoding="utf-8")
    return path


def _page(traces: dict[str, Trace]) -> str:
    several = len(traces) > 1
    columns = {name: Columns(trace) for name, trace in traces.items()}
    titles = [name or columns[name].frame["title"] for name in traces]
    return _PAGE.substitute(
        title=escape(" · ".join(filter(None, titles)) or "distkit replay"),
        css=css("timeline"),
        tabs=_tabs(list(traces)) if several else "",
        panels="\n".join(
            _panel(i, trace, columns[name], several)
            for i, (name, trace) in enumerate(traces.items())
        ),
        pictures=_json([_picture(c) for c in columns.values()]),
        esm=esm("timeline").replace("export default", "const timeline ="),
    )


def _picture(columns: Columns) -> Json:
    return {**lettered(packed(columns, thin=True), compressed=True), "theme": theme()}


def _json(value: object) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _tabs(names: list[str]) -> str:
    buttons = (
        f'<button role="tab" id="tab{i}" aria-controls="panel{i}" aria-selected="{_yes(i == 0)}"'
        f' tabindex="{0 if i == 0 else -1}">{escape(name.replace("_", " "))}</button>'
        for i, name in enumerate(names)
    )
    return f'<div class="tabs" role="tablist" aria-label="runs">{"".join(buttons)}</div>'


def _yes(truth: bool) -> str:
    return "true" if truth else "false"


def _panel(i: int, trace: Trace, columns: Columns, several: bool) -> str:
    picture = columns.picture(max(3 * MAX_BARS, MAX_ROWS * max(2, len(columns.frame["lanes"]))))
    role = f'role="tabpanel" aria-labelledby="tab{i}"' if several else ""
    return f"""<section id="panel{i}" {role}{" hidden" if i else ""}>
<div class="timeline"><noscript>{to_svg(picture)}</noscript></div>
{_table(picture)}
{_about(trace, picture)}
</section>"""


def _about(trace: Trace, picture: Json) -> str:
    """The ranks of the run, and where they ran."""
    ranks = {int(r): about for r, about in trace.meta.get("ranks", {}).items()}
    keys = [k for k in ("role", "host", "pid", "device") if any(a.get(k) for a in ranks.values())]
    if not keys:
        return ""
    names = {lane["rank"]: lane["name"] for lane in picture["lanes"]}
    body = [
        (str(r), names.get(r, f"rank {r}"), *(str(about.get(k) or "") for k in keys))
        for r, about in sorted(ranks.items())
    ]
    return _details(f"The {len(body)} ranks", ("rank", "name", *keys), body)


def _table(picture: Json) -> str:
    found = rows(picture)
    if not found:
        return ""
    entries = picture["entries"]
    more = f" (the first {MAX_ROWS} of {entries:,} rows)" if entries > MAX_ROWS else ""
    body = [astuple(row) for row in found[:MAX_ROWS]]
    return _details(f"Messages and collectives{more}", COLUMNS, body, headline(picture))


def _details(
    summary: str, head: tuple[str, ...], body: list[tuple[str, ...]], caption: str = ""
) -> str:
    cells = "".join(f'<th scope="col">{escape(c)}</th>' for c in head)
    lines = "\n".join(
        "<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in body
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<details open><summary>{escape(summary)}</summary><div class="scroll"><table>{title}'
        f"<thead><tr>{cells}</tr></thead>\n<tbody>{lines}</tbody></table></div></details>"
    )
