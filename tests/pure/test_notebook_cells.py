"""Rerunning a notebook cell stops the clusters it started before."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from distkit.cluster import notebook
from distkit.cluster.notebook import CellRegistry


class Resource:
    """An object that a cell creates."""

    ended = False


def end(resource: Resource) -> None:
    resource.ended = True


@pytest.fixture
def header(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    header = {"msg_id": "first"}
    kernel = SimpleNamespace(get_parent=lambda channel: {"header": header})
    monkeypatch.setattr(notebook, "shell", lambda: SimpleNamespace(kernel=kernel))
    return header


def test_rerunning_a_cell_stops_its_clusters(header: dict[str, str]) -> None:
    first, second, other, rerun = (Resource() for _ in range(4))
    registry = CellRegistry(end)
    registry.add("a cell", first)
    registry.add("a cell", second)
    registry.add("another cell", other)
    header["msg_id"] = "second"
    registry.add("a cell", rerun)
    assert [resource.ended for resource in (first, second, other, rerun)] == [
        True,
        True,
        False,
        False,
    ]


def test_location_uses_the_latest_execution_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: dict[str, tuple[str, str]] = {}
    shell = SimpleNamespace(execution_count=0, compile=SimpleNamespace(format_code_name=names.get))
    monkeypatch.setattr(notebook, "shell", lambda: shell)
    for count in (2, 5):
        shell.execution_count, names["cell.py"] = count, ("Cell", f"In[{count}]")
        assert notebook.line_label("cell.py:3") == f"In[{count}]:3"
        assert notebook._files[f"In[{count}]"] == "cell.py"
