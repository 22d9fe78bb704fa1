"""Every notebook runs from top to bottom, saves static pictures, and leaves no process."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
WIDGET = "application/vnd.jupyter.widget-view+json"
PICTURES = {"image/svg+xml", "image/png"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(
    path: Path,
    tmp_path: Path,
    executed: Path,
    jupyter_home: Path,
    leftovers: Callable[[], list[str]],
) -> None:
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=270, resources={"metadata": {"path": str(tmp_path)}})
    try:
        client.execute()
        nbformat.write(notebook, executed / path.name)  # for inspection, and for the site
    except CellExecutionError as error:
        if error.ename == "LaboratoryError" and "Laboratory([" in str(error):
            pytest.skip(str(error))  # this machine does not allow namespaces
        raise
    finally:
        executed.joinpath(path.stem).touch()  # the site's tests wait for it

    assert not errors(notebook)
    assert not [cell.id for cell in cells_that_raise(notebook) if not errors_of(cell)]
    assert not bare_widgets(notebook)
    assert not bare_figures(notebook)
    assert all("not attempted" in verdict for verdict in verdicts(notebook))
    assert not leftovers()


def outputs(notebook: NotebookNode) -> list[NotebookNode]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def cells_that_raise(notebook: NotebookNode) -> list[NotebookNode]:
    """Return the cells tagged with ``raises-exception``."""
    return [c for c in notebook.cells if "raises-exception" in c.metadata.get("tags", [])]


def errors_of(cell: NotebookNode) -> list[str]:
    outputs = cell.get("outputs", [])
    return [f"{o.ename}: {o.evalue}" for o in outputs if o.output_type == "error"]


def verdicts(notebook: NotebookNode) -> list[str]:
    """Return the verdicts on the exercises, which are still stubs."""
    return [
        o.data["text/plain"]
        for cell in notebook.cells
        if "dk.check." in cell.source
        for o in cell.get("outputs", [])
        if o.output_type == "execute_result"
    ]


def errors(notebook: NotebookNode) -> list[str]:
    """Return the errors of the cells that must not raise."""
    expected = cells_that_raise(notebook)
    return [text for cell in notebook.cells if cell not in expected for text in errors_of(cell)]


def bare_figures(notebook: NotebookNode) -> list[str]:
    """Return the matplotlib figures that are shown only as text."""
    shown = [o.get("data", {}) for o in outputs(notebook)]
    words = [data.get("text/plain", "") for data in shown if not PICTURES & set(data)]
    return [text for text in words if text.startswith("<Figure")]


def bare_widgets(notebook: NotebookNode) -> list[str]:
    """Return the widgets without a static alternative.

    A distkit view needs a picture in the previous output; other widgets need at least HTML.
    """
    state = notebook.metadata.get("widgets", {}).get("application/vnd.jupyter.widget-state+json")
    bare = []
    shown = [o.get("data", {}) for o in outputs(notebook)]
    for before, data in pairwise(({}, *shown)):
        # the timeline of a long live run is folded or removed
        folded = "distkit-folded" in before.get("text/html", "")
        if WIDGET not in data or folded:
            continue
        model = state["state"][data[WIDGET]["model_id"]]["state"]
        name = model.get("_anywidget_id") or model["_model_name"]
        if not (
            PICTURES & set(before)
            if name.startswith("distkit.views")
            else {*PICTURES, "text/html"} & set(data)
        ):
            bare.append(name)
    return bare
