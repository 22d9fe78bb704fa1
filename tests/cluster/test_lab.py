"""The welcome notebook in JupyterLab."""

import io
import time
from typing import Any

from labs import change_theme, idle
from PIL import Image, ImageColor
from sheets import RESULTS, settle

from benchmarks.lab import command
from distkit.views.scene.theme import theme


def test_welcome_notebook_draws_the_timeline(lab: Any, tab: Any) -> None:
    page = tab.page
    page.goto(lab.address("00_welcome.ipynb"))
    idle(page)
    assert command(page, "notebook:run-all-cells"), page.locator(".jp-OutputArea").all_inner_texts()
    idle(page)

    RESULTS.mkdir(exist_ok=True)
    for name in ("light", "dark"):
        change_theme(page, name.title())
        drawing = page.locator(".distkit-timeline").locator("canvas, svg").first
        drawing.scroll_into_view_if_needed()
        settle(page)
        assert drawing.bounding_box()["width"] > 300
        assert missing_colors(drawing, theme()[name]["ranks"][:4]) == []
        page.screenshot(path=RESULTS / f"welcome-{name}.png")

    assert tab.errors == []
    assert tab.external_requests == []


def missing_colors(drawing: Any, colors: list[str], timeout: float = 60) -> list[str]:
    """Return the colors that are still missing in a drawing after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        image = Image.open(io.BytesIO(drawing.screenshot())).convert("RGB")
        present = {color for _, color in image.getcolors(maxcolors=2**24)}
        absent = [c for c in colors if ImageColor.getrgb(c) not in present]
        if not absent or time.monotonic() > deadline:
            return absent
