"""Views saved as SVG for slides, in light or dark colors."""

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from traces import ring

from distkit.views.scene.theme import INK, INK_DARK, PAPER_DARK, RANKS_LIGHT
from distkit.views.scenes import Gradients, Stage, Tensors
from distkit.views.timeline.view import Timeline

VIEWS = [Timeline, Stage, Tensors, Gradients]


@pytest.mark.parametrize("view", VIEWS)
def test_dark_picture_has_the_same_text_in_dark_colors(tmp_path: Path, view: Any) -> None:
    shown_view = view(ring())
    path = shown_view.save(tmp_path / "x.SVG", dark=True)
    root, before = ET.parse(path).getroot(), ET.fromstring(shown_view._svg())
    fills = {e.get("fill") for e in root.iter()} - {None}
    assert PAPER_DARK in fills and INK_DARK in fills
    assert not {INK, "#fff", *RANKS_LIGHT} & fills
    texts = ["".join(e.itertext()) for e in root.iter()]
    assert texts == ["".join(e.itertext()) for e in before.iter()]


def test_other_file_extensions_raise(tmp_path: Path) -> None:
    for name in ("ring.png", "ring.pdf", "ring"):
        with pytest.raises(ValueError, match=r"Use a name that ends in \.svg"):
            Timeline(ring()).save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
