"""Timeline labels, rendered in a browser."""

from pathlib import Path
from typing import Any

from sheets import Sheet, settle
from traces import on_hosts, parameter_server

from distkit.views.timeline.view import Timeline

HOSTS = ("alpha", "beta", "gamma")

#: Records the text drawn on a canvas.
RECORD_TEXT = """window.drawn = [];
const draw = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...position) {
  drawn.push([text, position[1]]);
  return draw.call(this, text, ...position);
};"""


def draw(tab: Any, timeline: Timeline, folder: Path) -> dict[str, float]:
    """Draw a timeline; return the y coordinate of each text on its canvas."""
    tab.page.set_viewport_size({"width": 1280, "height": 720})
    tab.page.add_init_script(RECORD_TEXT)
    Sheet(tab, timeline, folder / "page.html")
    settle(tab.page)
    return dict(tab.page.evaluate("drawn"))


def test_requests_are_labeled_with_their_size(tab: Any, tmp_path: Path) -> None:
    assert {"push w1 8 KiB", "pull w1 8 KiB"} <= set(
        draw(tab, Timeline(parameter_server(1)), tmp_path)
    )


def test_timeline_groups_ranks_by_host(tab: Any, tmp_path: Path) -> None:
    rows = draw(tab, Timeline(on_hosts(HOSTS)), tmp_path)
    names = [name for name in sorted(rows, key=rows.get) if name in HOSTS or "rank " in name[:5]]
    assert [name for name in names if not name.startswith("send")] == [
        *("alpha", "rank 0", "rank 1"),
        *("beta", "rank 2", "rank 3"),
        *("gamma", "rank 4", "rank 5"),
    ]
    assert {
        "192 B\nbetween hosts · 12 messages",
        "±300 µs\nbetween the clocks of alpha, beta and gamma",
    } <= {*tab.page.locator(".dk-tile").all_inner_texts()}
    assert not tab.errors
