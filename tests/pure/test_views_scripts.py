"""The scripts of views, and their unit tests in tests/js, run by Node."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from sheets import to_base64
from traces import DEMOS

from distkit.views.scene.theme import theme
from distkit.views.timeline.columns import Columns, packed
from distkit.views.widget.assets import css, esm, page_script
from distkit.views.widget.page import VIEWS, renderer

TESTS = Path(__file__).parents[1] / "js"
SCRIPTS = (
    "cockpit",
    "compare",
    "concept",
    "prediction",
    "scene",
    "timeline",
)


def node() -> str | None:
    """Return the path of Node: the system's or Playwright's."""
    if found := shutil.which("node"):
        return found
    playwright = importlib.util.find_spec("playwright")
    bundled = Path(playwright.origin).parent / "driver" / "node" if playwright else None
    return str(bundled) if bundled and bundled.exists() else None


@pytest.mark.parametrize("view", SCRIPTS)
def test_modules_of_a_view_are_bundled(view):
    script = esm(view)
    assert not re.search(r"^ *import\b|\bfrom \"\./", script, re.MULTILINE)
    (export,) = re.findall(r"^export .*", script, re.MULTILINE)
    assert export == (
        "export default { initialize: $late.initialize, "
        f"render: $render.renders(${view}.{view.title()}) }};"
    )
    names = re.findall(r"^const (\$\w+) = ", script, re.MULTILINE)
    assert len(names) == len(set(names)) and names[-1] in ("$render", "$late", f"${view}")
    assert ".distkit-timeline" in css(view)


def test_script_cannot_end_its_element():
    script = page_script(*dict.fromkeys(map(renderer, VIEWS)))
    assert "</script" not in script and "<!--" not in script


def test_javascript_unit_tests_pass(tmp_path):
    if (program := node()) is None:
        pytest.skip("neither Node nor Playwright is installed: the modules of js/ are not tested")
    pictures = tmp_path / "pictures.json"
    pictures.write_text(json.dumps(timelines(), default=to_base64), encoding="utf-8")
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    for view in SCRIPTS:
        (scripts / f"{view}.mjs").write_text(esm(view), encoding="utf-8")
    result = subprocess.run(
        [program, "--test", *map(str, sorted(TESTS.glob("*.test.mjs")))],
        env={**os.environ, "PICTURES": str(pictures), "SCRIPTS": str(scripts)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def timelines():
    """Return the theme, and the packed timeline of each demo."""
    bulk = {name: packed(Columns(make(), 10_000)) for name, make in DEMOS.items()}
    return {"theme": theme(), "bulk": bulk}
