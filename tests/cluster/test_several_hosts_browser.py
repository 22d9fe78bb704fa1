"""The timeline of a run on several hosts, in a browser."""

from pathlib import Path
from typing import Any

from sheets import Sheet, settle
from traces import on_hosts

from distkit.views import Timeline

HOSTS = ("alpha", "beta", "gamma")

#: Records the text drawn on a canvas.
RECORD_TEXT = """window.drawn = [];
const draw = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...position) {
  drawn.push([text, position[1]]);
  return draw.call(this, text, ...position);
};"""


def test_timeline_groups_ranks_by_host(tab: Any, tmp_path: Path) -> None:
    page = tab.page
    page.set_viewport_size({"width": 1280, "height": 720})
    page.add_init_script(RECORD_TEXT)
    Sheet(tab, Timeline(on_hosts(HOSTS)), tmp_path / "page.html")
    settle(page)
    rows = {text: y for text, y in page.evaluate("drawn")}
    names = [name for name in sorted(rows, key=rows.get) if name in HOSTS or "rank " in name[:5]]
    assert [name for name in names if not name.startswith("send")] == [
        *("alpha", "rank 0", "rank 1"),
        *("beta", "rank 2", "rank 3"),
        *("gamma", "rank 4", "rank 5"),
    ]
    tiles = page.locator(".dk-tile").all_inner_texts()
    assert "192 B\nbetween hosts · 12 messages" in tiles
    assert "±300 µs\nbetween the clocks of alpha, beta and gamma" in tiles
    assert not tab.errors
