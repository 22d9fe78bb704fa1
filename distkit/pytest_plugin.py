"""A pytest plugin, whose option ``--distkit-notebooks`` runs each notebook as a test.

A cell that raises an error fails the test, unless it has Jupyter's tag ``raises-exception``. A cell
that takes too long is interrupted as with the stop button, so the test fails with distkit's
diagnosis of the ranks instead of hanging.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

#: Grace period for an interrupted cell to end [s].
_GRACE = 30.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's options."""
    group = parser.getgroup("distkit")
    group.addoption(
        "--distkit-notebooks", action="store_true", help="run each *.ipynb file as a test"
    )
    group.addoption(
        "--distkit-notebook-timeout",
        type=float,
        default=240,
        metavar="SECONDS",
        help="time after which a cell is interrupted (default: %(default)s)",
    )


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect a notebook if the option is set."""
    is_notebook = file_path.suffix == ".ipynb" and ".ipynb_checkpoints" not in file_path.parts
    if is_notebook and parent.config.getoption("--distkit-notebooks"):
        return NotebookFile.from_parent(parent, path=file_path)
    return None


class NotebookFile(pytest.File):
    """A notebook file, with one test."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield the notebook's test."""
        yield NotebookItem.from_parent(self, name="runs")


class NotebookItem(pytest.Item):
    """A test that runs a notebook from top to bottom, with a new kernel in an empty folder."""

    def runtest(self) -> None:
        """Run the notebook."""
        import nbformat

        try:
            notebook = nbformat.read(self.path, as_version=4)  # type: ignore[no-untyped-call]
        except Exception as error:
            raise NotebookFailed(f"Jupyter cannot read the notebook: {error}") from None
        limit = self.config.getoption("--distkit-notebook-timeout")
        with TemporaryDirectory(prefix="distkit-notebook-") as folder:
            execute(notebook, Path(folder), limit)

    def repr_failure(  # type: ignore[override]
        self, excinfo: pytest.ExceptionInfo[BaseException], **_: Any
    ) -> str:
        """Return the failure's message, without the plugin's traceback."""
        if isinstance(excinfo.value, NotebookFailed):
            return f"{self.path.name}: {excinfo.value}"
        return str(super().repr_failure(excinfo))

    def reportinfo(self) -> tuple[Path, None, str]:
        """Return the notebook's name for the report's heading."""
        return self.path, None, self.path.name


class NotebookFailed(Exception):
    """A notebook failed; the message names the cell and the reason."""


def execute(notebook: Any, folder: Path, limit: float = 240) -> None:
    """Run a notebook in a folder, and add the outputs of its cells to it.

    Args:
        notebook: a notebook from ``nbformat.read``.
        folder: the working folder of its cells.
        limit: the time after which a cell is interrupted [s].

    Raises:
        NotebookFailed: A cell raised an error or took too long, or the kernel died.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    current, timer, timed_out = 0, None, 0
    interrupts: list[asyncio.Future[None]] = []

    def interrupt() -> None:
        nonlocal timed_out
        timed_out = current
        interrupts.append(asyncio.ensure_future(client.km.interrupt_kernel()))

    def begin(cell: Any, cell_index: int) -> None:
        nonlocal current, timer
        current = cell_index + 1
        timer = asyncio.get_running_loop().call_later(limit, interrupt)

    client: Any = NotebookClient(
        notebook,
        timeout=limit + _GRACE,
        resources={"metadata": {"path": str(folder)}},
        on_cell_execute=begin,
        on_cell_executed=lambda **_: timer.cancel() if timer else None,
    )
    reason = ""
    try:
        client.execute()
    except CellExecutionError as error:
        reason = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    except CellTimeoutError:
        reason = "It did not end even then."
    except DeadKernelError as error:
        raise NotebookFailed(f"cell {current}: {error}") from error
    if timed_out:
        raise NotebookFailed(
            f"cell {timed_out} took longer than {limit:g} s and was interrupted. {reason}"
        )
    if reason:
        raise NotebookFailed(f"cell {current} failed. {reason}")
