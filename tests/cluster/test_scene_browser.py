"""A new view in a real browser: CONTRIBUTING.md's example, without JavaScript of its own."""

import re
from pathlib import Path
from typing import Any

import pytest
import traces
from sheets import Sheet

from distkit.data.policies import make_plan
from distkit.views import ShardMap

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"


def test_the_example_plays_and_follows_the_theme(tab: Any, tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "example"}
    (code,) = re.findall(
        r"```python\n(.*?)```", CONTRIBUTING.read_text(encoding="utf-8"), re.DOTALL
    )
    exec(compile(code, str(CONTRIBUTING), "exec"), names)
    tab.page.emulate_media(reduced_motion="reduce", color_scheme="light")
    view = Sheet(tab, names["BytesSent"](traces.ring()), tmp_path / "bytes.html")
    bars = view.root.locator("rect.mark-own")

    def widths() -> list[float]:
        return [
            float(w) for w in bars.evaluate_all("all => all.map((e) => e.getAttribute('width'))")
        ]

    assert widths() == pytest.approx([680] * 4)
    view.root.focus()
    view.press("Home")
    assert widths() == pytest.approx([1] * 4)
    view.press("ArrowRight")
    assert sum(w > 1 for w in widths()) == 1
    assert re.fullmatch(r"rank \d sends 64 B to rank \d", view.text(".dk-fact strong"))
    assert view.root.locator(".dkm-column").is_hidden()
    paint = "e => getComputedStyle(e).fill"
    light = bars.first.evaluate(paint)
    view.drawn(lambda: tab.page.emulate_media(color_scheme="dark"))
    assert bars.first.evaluate(paint) != light
    view.fine()


def test_a_shard_map_plays_step_by_step(tab: Any, tmp_path: Path) -> None:
    tab.page.emulate_media(reduced_motion="reduce")
    view = Sheet(tab, ShardMap(make_plan(4, 2, samples=10)), tmp_path / "shards.html")
    assert view.text(".dk-clock") == "step 3 of 3"
    view.root.focus()
    view.press("Home")
    assert view.text(".dk-fact strong") == "before the first step"
    assert view.root.locator(".mark-solid").count() == 0
    view.press("ArrowRight")
    assert view.text(".dk-fact strong") == "step 1: 4 samples"
    assert view.text(".dk-clock") == "step 1 of 3" and view.root.locator(".mark-solid").count() == 2
    for width in (1100, 848, 400):
        tab.page.set_viewport_size({"width": width, "height": 720})
        box = view.root.bounding_box()
        assert box["height"] <= 600 and box["width"] <= width
    view.pictures("shards")
    view.fine()
