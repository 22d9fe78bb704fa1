"""Scenes: timed marks, the renderer, and the example view in CONTRIBUTING.md."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import traces

from distkit._format import human_bytes
from distkit.trace.trace import Trace
from distkit.views.scene import svg
from distkit.views.scene.marks import Scene, picture, rect, text
from distkit.views.scene.renderer import body, drawing_of, to_svg
from distkit.views.scene.theme import MARKS

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.fixture(scope="module")
def example():
    """Return the names that the example defines, and its lines."""
    (code,) = re.findall(
        r"```python\n(.*?)```", CONTRIBUTING.read_text(encoding="utf-8"), flags=re.DOTALL
    )
    names = {"__name__": "example"}
    exec(compile(code, str(CONTRIBUTING), "exec"), names)
    return names, code.splitlines()


def test_example_view_works_and_has_at_most_sixty_lines(example) -> None:
    names, lines = example
    assert len(lines) <= 60
    trace = traces.ring()
    view = names["BytesSent"](trace)
    json.dumps(view._picture(), allow_nan=False)
    sent = [sum(m.nbytes for m in trace.messages if m.src == r) for r in trace.ranks]
    bars = {lane: [] for lane in range(4)}
    scene = view._data["scene"]
    for drawing, _, begin, end, *_ in scene["marks"]:
        for tag, _, lane, attributes, _ in drawing_of(scene, drawing):
            if tag == "rect":
                bars[lane].append((begin, end, dict(attributes)["width"]))
    for lane, found in bars.items():
        widths = [width for _, _, width in found]
        assert widths == sorted(widths) and found[-1][1] is None
        assert widths[-1] == pytest.approx(680 * sent[lane] / max(sent), abs=0.1)
    rows = [f"  rank {rank} has sent {human_bytes(n)}" for rank, n in enumerate(sent)]
    assert repr(view).splitlines()[2:] == [f"  {row}" for row in rows]
    assert ET.fromstring(view._svg()).tag.endswith("svg")
    assert "this trace has no messages" in names["BytesSent"](Trace())._svg()


def test_example_view_passes_ruff(tmp_path: Path, example) -> None:
    file = tmp_path / "bytes_sent.py"
    file.write_text('"""A view."""\n\n' + "\n".join(example[1]) + "\n", encoding="utf-8")
    root = CONTRIBUTING.parent
    command = [sys.executable, "-m", "ruff", "check", "--config", root / "pyproject.toml", file]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_mark_is_visible_between_begin_and_end() -> None:
    scene = Scene(100, 20, start=5.0)
    scene.add(0, 0, text("old", "name"), end=5.0)  # ended before the picture begins
    scene.add(1, 2, text("now", "name"), begin=6.0, end=7.0)
    scene.add(3, 4, text("ever", "name"))
    scene.hold_frame(0, 5, 6, text("rest", "name"))
    plain = scene.plain()

    def words(time, keyframe=-1):
        return re.findall(r">(\w+)</text>", body(plain, time, keyframe))

    assert [words(t) for t in (0.0, 0.999, 1.0, 1.999, 2.0)] == [
        ["ever"],
        ["ever"],
        ["ever", "now"],
        ["ever", "now"],
        ["ever"],
    ]
    assert words(2.0, keyframe=0) == ["rest", "ever"]


@pytest.mark.parametrize("style", MARKS)
def test_every_class_has_light_and_dark_colors(style) -> None:
    scene = Scene(10, 10)
    scene.add(0, 0, rect(5, 5, style))
    drawn = to_svg(picture(scene, title=style))
    for page in (drawn, svg.dark(drawn)):
        ET.fromstring(page)
        assert not re.search(r'(fill|stroke)="(ink|paper|muted|warning|rank|label)', page)
