"""The site, built from the executed notebooks."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
from sheets import RESULTS, settle
from waiting import wait_until

from distkit_course.exercises import LESSONS

ROOT = Path(__file__).parents[2]
FIRST = ROOT / "notebooks" / "01_messages.ipynb"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("site_tool", str(ROOT / "tools" / "site"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("site_tool", loader))
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(
    tool: ModuleType,
    executed: Path,
    tmp_path_factory: pytest.TempPathFactory,
    jupyter_home: Path,
    request: pytest.FixtureRequest,
) -> dict[str, Path]:
    """The pages of all executed lessons, by name."""
    ended = [
        executed / item.callspec.params["path"].stem
        for item in request.session.items
        if item.path.stem == "test_notebooks"
    ]
    wait_until(lambda: all(map(Path.exists, ended)), timeout=250)  # on other workers
    if not executed.joinpath(FIRST.name).exists():
        assert not tool.run(FIRST, executed / FIRST.name)
    return {path.stem: path for path in tool.build(tmp_path_factory.mktemp("site"), executed)}


def test_links_are_valid_and_no_external_resources_load(pages: dict[str, Path]) -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in pages.values()}
    assert not [name for name, text in texts.items() if re.search(r'src="https?:', text)]
    folder = pages["index"].parent
    broken = []
    for name, text in texts.items():
        for address, anchor in re.findall(r'href="(?!\w+:)([^"#]*)#?([^"]*)"', text):
            target = texts.get(address or name)
            exists = folder.joinpath(address).is_file() if target is None else True
            if not exists or (target and anchor and f'id="{anchor}"' not in target):
                broken.append((name, address, anchor))
    assert not broken


def test_lessons_have_pictures_and_no_errors(
    pages: dict[str, Path], executed: Path, tool: ModuleType
) -> None:
    for path in executed.glob("*.ipynb"):
        text = pages[path.stem].read_text(encoding="utf-8")
        notebook = nbformat.read(path, as_version=4)
        raising = [c for c in notebook.cells if "raises-exception" in c.metadata.get("tags", [])]
        assert text.count("output_error") <= len(raising), path.stem
        shown = [o.get("data", {}) for c in notebook.cells for o in c.get("outputs", [])]
        pictures = sum(any(kind.startswith("image/") for kind in data) for data in shown)
        assert text.count("<img") >= pictures, path.stem
        assert text.count('class="replay"') == len(tool.replays(notebook)), path.stem
        assert "widget-view+json" not in text


def test_page_of_a_lesson_draws_its_views(pages: dict[str, Path], tab: Any) -> None:
    page = tab.page
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.goto(pages[FIRST.stem].as_uri())
        page.wait_for_selector(".distkit-timeline canvas, .distkit-timeline svg")
        assert not page.locator("[data-view]:not([data-begun])").count()
        settle(page)
        page.screenshot(path=RESULTS / f"site-{scheme}.png")
    assert not tab.errors


def test_cheat_sheet_has_one_page(
    tool: ModuleType, browser: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sheet = tmp_path / "cheatsheet.pdf"
    monkeypatch.setattr(tool.lab, "browse", lambda: nullcontext(browser))  # no second browser
    monkeypatch.setattr(sys, "argv", ["site", "--cheatsheet", str(sheet)])
    tool.main()
    assert len(re.findall(rb"/Type ?/Page\b", sheet.read_bytes())) == 1


SQUARE = '<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"/>'


def lesson(path: Path, *sources: str, picture: str = "") -> Path:
    """Write a notebook whose last cell shows ``picture``, if any."""
    cells = [*map(nbformat.v4.new_code_cell, sources)]
    if picture:
        cells[-1].outputs = [nbformat.v4.new_output("display_data", {"image/svg+xml": picture})]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def test_failed_lesson_names_the_cell_and_is_not_up_to_date(
    tool: ModuleType, tmp_path: Path, jupyter_home: Path
) -> None:
    one, result = lesson(tmp_path / "07_one.ipynb", "1", "1 / 0"), tmp_path / "out" / "07_one.ipynb"
    error = tool.run(one, result)
    assert error.startswith("07_one, cell 2: ") and "ZeroDivisionError" in error
    assert result.exists() and not tool.up_to_date(one, result)


def test_slides_are_made_for_selected_lessons(
    tool: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(path: Path, to: Path) -> str:
        to.parent.mkdir(parents=True, exist_ok=True)
        lesson(to, "0", "1", picture=SQUARE)
        return ""

    monkeypatch.setattr(tool, "run", run)
    monkeypatch.setattr(tool, "lessons", lambda: [*map(Path, ("00_a.ipynb", "15_b.ipynb"))])
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    to = tmp_path / "slides"
    to.mkdir()
    to.joinpath("00_a-1.svg").write_text("from an earlier call")
    monkeypatch.setattr(sys, "argv", ["site", "--slides", str(to), "00"])
    tool.main()  # no exit: success
    files = {"00_a-01.svg", "00_a-01-dark.svg"}
    assert {path.name for path in to.iterdir()} == {*files, "index.html"}
    assert (
        set(re.findall(r'(?:src|href)="([^"]*)"', to.joinpath("index.html").read_text())) == files
    )
    monkeypatch.setattr(sys, "argv", ["site", "--slides", str(to), "99"])
    with pytest.raises(SystemExit) as caught:
        tool.main()
    assert caught.value.code == 2 and "there is no lesson '99'" in capsys.readouterr().err


def test_guide_lists_every_lesson() -> None:
    guide = ROOT.joinpath("notebooks", "course", "teaching.md").read_text(encoding="utf-8")
    assert {*LESSONS} <= set(re.findall(r"^### (\w+)$", guide, re.M))
