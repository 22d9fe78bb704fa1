"""Runs on several hosts in a browser: views separate and name the hosts."""

from pathlib import Path
from typing import Any

from sheets import Sheet, settle
from traces import on_hosts

from distkit.views import Timeline

HOSTS = ("alpha", "beta", "gamma")

#: Records the text drawn on a canvas.
NOTE = """window.drawn = [];
const draw = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (words, ...place) {
  drawn.push([words, place[1]]);
  return draw.call(this, words, ...place);
};"""


def test_timeline_separates_hosts(tab: Any, tmp_path: Path) -> None:
    page = tab.page
    page.set_viewport_size({"width": 1280, "height": 720})
    page.add_init_script(NOTE)
    Sheet(tab, Timeline(on_hosts(HOSTS)), tmp_path / "page.html")
    settle(page)
    rows = {words: y for words, y in page.evaluate("drawn")}
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
