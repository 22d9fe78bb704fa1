"""``%%ranks`` in a notebook. One kernel executes all cells, and each test checks some of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

CELLS = {
    "load": "import distkit as dk\nimport torch.distributed as dist",
    "too early": "%%ranks\nrank",
    "cluster": "cluster = dk.Cluster(3)",
    "in the notebook": "dist.get_rank()",
    "a result": "cluster.run(cluster.stop is None)",
    "notebook error": "1 / 0",
    "all": "%%ranks\nx = rank * 10\nx",
    "results": "_.results",
    "some": "%%ranks 0,2\ny = x + 1\nprint('only', rank)",
    "exits": "def leave():\n    exit()\n\ncluster.run(leave)",
    "unwaited": "%%ranks\n\nt = torch.ones(1)\nw = dist.all_reduce(t, async_op=True)",
    "span": "%%ranks 1 2\nrank, x",
    "missing": "%%ranks 1\ny",
    "none": "%%ranks\nx = x",
    "given": "%%ranks\nworld_size, dist.get_rank() == rank, torch.ones(1).item()",
    "sum": "%%ranks\nt = torch.full((2,), float(rank))\ndist.all_reduce(t)\nt.tolist()",
    "sum again": "%%ranks\nt = torch.full((2,), float(rank))\ndist.all_reduce(t)\nt.tolist()",
    "lines": "sorted({e.where for e in _.trace})",
    "function": "%%ranks\ndef divide(by):\n    return 1 / by",
    "raises": "%%ranks\n\nif rank == 1:\n    divide(0)",
    "still": "%%ranks\nx",
    "hangs": "%%ranks\ndist.recv(torch.zeros(1), src=(rank + 1) % 3)",
    "alone": "%%ranks 0\ndist.barrier()",
    "lost": "%%ranks\n'x' in globals()",
    "data": "data = 3",
    "the notebook's": "%%ranks\ndata + 1",
    "nobody's": "%%ranks\nnowhere",
    "no such rank": "%%ranks 7\n1",
    "negative": "%%ranks -1\n1",
    "no number": "%%ranks first\n1",
    "syntax": "%%ranks\nif rank\n    1",
    "step": "%%ranks --step\nt = torch.ones(2)\ndist.all_reduce(t, dist.ReduceOp.MAX)\nt[0].item()",
    "stepper": "stepper = _\n[str(s) for s in stepper.moment.rank_states]",
    "finish": "stepper.finish().results",
    "step some": "%%ranks 1 --step\nrank",
    "seeded": "%%ranks 1 --seed 3\ntorch.rand(1).item()",
    "seeded again": "%%ranks --seed 3\ntorch.rand(1).item()",
    "no seed": "%%ranks --seed three\nrank",
    "execute": "cluster.execute('rank + 1', ranks=[2]).results",
    "execute wrong": "cluster.execute('\\n1 / rank', ranks=[0])",
    "other cluster": "small = dk.Cluster(2)",
    "the latest": "%%ranks\nworld_size",
    "stop small": "small.stop()",
    "the one before": "%%ranks 0\nworld_size",
    "stop": "cluster.stop()",
    "too late": "%%ranks\nrank",
}


class Cell:
    """The output of a cell."""

    def __init__(self, cell: Any) -> None:
        self.number, self.outputs = cell.execution_count, cell.outputs

    def text(self, kind: str, name: str) -> str:
        return "".join(o[kind] for o in self.outputs if o.get("name") == name)

    @property
    def printed(self) -> list[str]:
        return sorted(self.text("text", "stdout").splitlines())

    @property
    def usage(self) -> str:
        """The printed errors, and the text of cards."""
        data = (o.get("data", {}) for o in self.outputs)
        cards = (d["text/plain"] for d in data if "distkit-notice" in d.get("text/html", ""))
        return "\n".join([self.text("text", "stderr"), *cards]).strip()

    @property
    def result(self) -> dict[str, str]:
        shown = (o.data for o in self.outputs if "data" in o)
        return {kind: value for data in shown for kind, value in data.items()}

    @property
    def error(self) -> str:
        """The displayed error, without colors."""
        (found,) = (o for o in self.outputs if o.output_type == "error")
        return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(found.traceback))

    def line(self, n: int) -> str:
        return f"In[{self.number}]:{n}"


@pytest.fixture(scope="module")
def cells(jupyter_home: Path) -> dict[str, Cell]:
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, CELLS.values())])
    NotebookClient(notebook, timeout=240, kernel_name="python3", allow_errors=True).execute()
    return {name: Cell(cell) for name, cell in zip(CELLS, notebook.cells, strict=True)}


def test_each_rank_prints_its_last_value(cells: dict[str, Cell]) -> None:
    assert cells["all"].printed == ["[rank 0] 0", "[rank 1] 10", "[rank 2] 20"]
    assert cells["results"].result["text/plain"] == "[0, 10, 20]"
    assert cells["none"].printed == []
    assert cells["given"].printed == [f"[rank {r}] (3, True, 1.0)" for r in range(3)]


def test_errors_in_the_notebook_are_short_and_explained(cells: dict[str, Cell]) -> None:
    assert "the notebook, which is not a rank" in cells["in the notebook"].error
    assert "run() needs a function or the path of a script, got False" in cells["a result"].error
    assert all(len(cells[c].error.splitlines()) < 8 for c in ("in the notebook", "a result"))
    assert "ZeroDivisionError: division by zero" in cells["notebook error"].error


def test_function_that_calls_exit_is_explained(cells: dict[str, Cell]) -> None:
    message = " ".join(cells["exits"].error.split())
    assert "leave() cannot be sent to the ranks: the captured variable 'exit'" in message


def test_warning_names_the_lines_of_the_cell(cells: dict[str, Cell]) -> None:
    message = " ".join(cells["unwaited"].usage.split())
    assert message.startswith(
        f"{cells['unwaited'].line(1)}: CommunicationWarning: ranks 0, 1 and 2"
    )
    assert f"never waited for all_reduce(async_op=True) at {cells['unwaited'].line(4)}" in message


def test_cell_runs_on_selected_ranks(cells: dict[str, Cell]) -> None:
    assert cells["some"].printed == ["[rank 0] only 0", "[rank 2] only 2"]
    assert cells["span"].printed == ["[rank 1] (1, 10)", "[rank 2] (2, 20)"]


def test_variables_persist_on_their_ranks(cells: dict[str, Cell]) -> None:
    assert "rank 1 raised NameError: name 'y' is not defined" in cells["missing"].error
    assert cells["still"].printed == ["[rank 0] 0", "[rank 1] 10", "[rank 2] 20"], "after errors"
    assert "the variables of %%ranks cells are lost" in cells["hangs"].usage
    assert cells["lost"].printed == [f"[rank {r}] False" for r in range(3)]


def test_run_is_shown_with_cell_lines(cells: dict[str, Cell]) -> None:
    assert cells["sum"].printed == [f"[rank {r}] [3.0, 3.0]" for r in range(3)]
    assert "image/svg+xml" in cells["sum"].result
    assert cells["lines"].result["text/plain"] == f"['{cells['sum again'].line(3)}']"


def test_traceback_has_cell_lines(cells: dict[str, Cell]) -> None:
    raising, function = cells["raises"], cells["function"]
    message = f"RankError: rank 1 raised ZeroDivisionError: division by zero at {function.line(3)}"
    assert raising.error.startswith(f"{message}. ")
    assert f'File "In[{raising.number}]", line 4, in <module>\n    divide(0)' in raising.error
    assert f'File "In[{function.number}]", line 3, in divide\n    return 1 / by' in raising.error


def test_traceback_hides_internal_frames(cells: dict[str, Cell]) -> None:
    for name in ("raises", "hangs", "no such rank", "the notebook's"):
        assert not re.search(r"run_cell_magic|distkit-cell|t/ipython\.py|exec\(", cells[name].error)


def test_hang_is_explained(cells: dict[str, Cell]) -> None:
    message = " ".join(cells["hangs"].error.split())
    waits = [
        f"rank {r} waits in recv(src={(r + 1) % 3}) at {cells['hangs'].line(2)}" for r in range(3)
    ]
    assert f"DeadlockError: {', '.join(waits)}: each waits for the next" in message
    assert all(len(line) <= 100 for line in cells["hangs"].error.splitlines())
    card = cells["hangs"].result["text/html"]
    assert "<code>dist.recv(torch.zeros(1), src=(rank + 1) % 3)</code>" in card
    assert "<b>Remedy:</b> Let one of them send first." in card
    alone = " ".join(cells["alone"].error.split())
    assert "but ranks 1 and 2 have finished without calling it" in alone


def test_notebook_variable_on_a_rank_is_explained(cells: dict[str, Cell]) -> None:
    assert "data is a variable of the notebook" in cells["the notebook's"].error
    assert "name 'nowhere' is not defined" in cells["nobody's"].error
    assert "variable of the notebook" not in cells["nobody's"].error


def test_unknown_ranks_raise(cells: dict[str, Cell]) -> None:
    for name in ("no such rank", "negative"):
        assert re.match(
            r"ClusterError: rank -?\d+ does not exist: the ranks are 0 to 2\.",
            cells[name].error,
        )
    assert "argument ranks: invalid int value: 'first'" in cells["no number"].usage


def test_syntax_error_points_to_the_line_of_the_cell(cells: dict[str, Cell]) -> None:
    end = cells["syntax"].error.strip().splitlines()[-4:]
    assert f"In[{cells['syntax'].number}]:2" in end[0]
    assert end[1].strip() == "if rank"
    assert end[3] == "SyntaxError: expected ':'"


def test_cell_without_a_cluster_raises(cells: dict[str, Cell]) -> None:
    for name in ("too early", "too late"):
        assert cells[name].usage == (
            "UsageError: no cluster is running. Start one first: cluster = dk.Cluster(4)"
        )


def test_latest_cluster_is_used(cells: dict[str, Cell]) -> None:
    assert cells["the latest"].printed == ["[rank 0] 2", "[rank 1] 2"]
    assert cells["the one before"].printed == ["[rank 0] 3"]


def test_cell_can_be_stepped(cells: dict[str, Cell]) -> None:
    shown = cells["step"].result
    assert "image/svg+xml" in shown and "application/vnd.jupyter.widget-view+json" in shown
    paused = f"paused before all_reduce(max) at {cells['step'].line(3)}"
    rank_states = cells["stepper"].result["text/plain"]
    assert [f"rank {r}: {paused}" in rank_states for r in range(3)] == [True] * 3
    assert cells["finish"].printed == [f"[rank {r}] 1.0" for r in range(3)]
    assert cells["finish"].result["text/plain"] == "[1.0, 1.0, 1.0]"
    assert cells["step some"].printed == ["[rank 1] 1"]


def test_execute_behaves_like_the_magic(cells: dict[str, Cell]) -> None:
    assert cells["execute"].result["text/plain"] == "[None, None, 3]"
    assert f"ZeroDivisionError: division by zero at {cells['execute wrong'].line(2)}" in (
        cells["execute wrong"].error
    )


def test_seed_makes_a_cell_reproducible(cells: dict[str, Cell]) -> None:
    (numbers,) = cells["seeded"].printed
    assert numbers in cells["seeded again"].printed
    assert len({line.split("] ")[1] for line in cells["seeded again"].printed}) == 3
    assert "argument --seed: invalid int value: 'three'" in cells["no seed"].usage
