"""Pictures for slides: every view as SVG, PNG and PDF, on white and on dark paper."""

import io
import re
import sys
import xml.etree.ElementTree as ET
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from traces import big, hang, odd_values, ring

from distkit.errors import DistkitError
from distkit.trace.trace import Trace
from distkit.views import Gradients, Stage, Tensors, Timeline
from distkit.views.scene import svg
from distkit.views.scene.theme import (
    INK,
    INK_DARK,
    PAPER_DARK,
    RANKS_DARK,
    RANKS_LIGHT,
    channels,
)
from distkit.views.widget.snapshot import save

VIEWS = [Timeline, Stage, Tensors, Gradients]


def image(path: Path) -> Image.Image:
    return Image.open(io.BytesIO(path.read_bytes())).convert("RGBA")


def unpacked(pdf: bytes) -> bytes:
    """What a PDF's compressed streams hold."""
    streams = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", pdf, re.DOTALL)
    found = []
    for data in streams:
        try:
            found.append(zlib.decompressobj().decompress(data))
        except zlib.error:
            continue
    return b"\n".join(found)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dark", [False, True])
def test_a_png_has_its_size_and_its_paper(tmp_path: Path, view: Any, dark: bool) -> None:
    drawn = view(ring())
    path = drawn.save(tmp_path / "x.png", dark=dark, width=700)
    found = image(path)
    across, down = map(int, re.search(r'width="(\d+)" height="(\d+)"', drawn._svg()).groups())
    assert found.width == 700 and abs(found.height - 700 * down / across) <= 1
    assert found.getpixel((350, 5))[:3] == (channels(PAPER_DARK) if dark else (255, 255, 255))
    assert found.getpixel((0, 0))[3] < 128  # beyond the round corner there is no paper
    ink = channels(INK_DARK if dark else INK)
    top = found.crop((0, 0, 400, 40)).convert("RGB")  # the title is written there
    assert any(
        max(abs(a - b) for a, b in zip(c, ink, strict=True)) < 30 for _, c in top.getcolors(2**16)
    )


def test_a_png_is_twice_as_fine_as_the_picture(tmp_path: Path) -> None:
    assert image(Timeline(ring()).save(tmp_path / "x.png")).width == 2 * 960


@pytest.mark.parametrize("view", VIEWS)
def test_a_pdf_has_text_and_lines_no_pixels(tmp_path: Path, view: Any) -> None:
    pdf = view(ring()).save(tmp_path / "x.pdf", width=480).read_bytes()
    assert pdf.startswith(b"%PDF-") and b"/Subtype/Image" not in pdf.replace(b" ", b"")
    everything = pdf + unpacked(pdf)
    box = re.search(rb"/MediaBox ?\[([\d. ]+)\]", everything)[1].split()
    assert [round(float(x)) for x in box[:3]] == [0, 0, 480]
    assert b"/FontFile" in everything and b"/ToUnicode" in everything  # text that can be searched
    assert re.search(rb"\bBT\b.*\bT[jJ]\b.*\bET\b", unpacked(pdf), re.DOTALL)


def test_an_svg_can_be_scaled_and_dark(tmp_path: Path) -> None:
    view = Timeline(ring())
    root = ET.parse(view.save(tmp_path / "x.svg", dark=True, width=480)).getroot()
    before = ET.fromstring(view._svg())
    assert root.get("width") == "480" and root.get("viewBox") == before.get("viewBox")
    fills = {e.get("fill") for e in root.iter()} - {None}
    assert PAPER_DARK in fills and INK_DARK in fills and RANKS_DARK[0] in fills
    assert not {INK, "#fff", *RANKS_LIGHT} & fills
    texts = ["".join(e.itertext()) for e in root.iter()]
    assert texts == ["".join(e.itertext()) for e in before.iter()]


@pytest.mark.parametrize("make", [Trace, hang, odd_values, big])
def test_odd_traces_are_saved(tmp_path: Path, make: Any) -> None:
    for view in VIEWS:
        assert image(view(make()).save(tmp_path / "x.PNG", dark=True, width=300)).width == 300


def test_other_names_and_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends in \.svg, \.png or \.pdf"):
        Timeline(ring()).save(tmp_path / "ring.gif")
    with pytest.raises(ValueError, match="width=0 is not possible"):
        Timeline(ring()).save(tmp_path / "ring.png", width=0)
    assert list(tmp_path.iterdir()) == []


def test_without_typst_the_message_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "typst", None)
    with pytest.raises(DistkitError, match="Run: pip install typst"):
        Timeline(ring()).save(tmp_path / "ring.pdf")
    assert Timeline(ring()).save(tmp_path / "ring.svg").exists()


# -- dark paper ----------------------------------------------------------------------


def test_words_that_look_like_colours_stay(tmp_path: Path) -> None:
    words = svg.text(0, 0, 'fill="#fff" is white', "#fff")
    assert svg.dark(words) == svg.text(0, 0, 'fill="#fff" is white', PAPER_DARK)
    picture = f'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9">{words}</svg>'
    assert save(picture, tmp_path / "w.svg").read_text() == picture
