"""The example view of CONTRIBUTING.md in a browser."""

import re
from pathlib import Path
from typing import Any

import pytest
import traces
from sheets import Sheet

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"


def test_example_view_plays_and_follows_the_theme(tab: Any, tmp_path: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "example"}
    (code,) = re.findall(
        r"```python\n(.*?)```", CONTRIBUTING.read_text(encoding="utf-8"), re.DOTALL
    )
    exec(compile(code, str(CONTRIBUTING), "exec"), namespace)
    tab.page.emulate_media(reduced_motion="reduce", color_scheme="light")
    view = Sheet(tab, namespace["BytesSent"](traces.ring()), tmp_path / "bytes.html")
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
    fill_of = "e => getComputedStyle(e).fill"
    light_fill = bars.first.evaluate(fill_of)
    view.wait_until_drawn(lambda: tab.page.emulate_media(color_scheme="dark"))
    assert bars.first.evaluate(fill_of) != light_fill
    view.assert_clean()
