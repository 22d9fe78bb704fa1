"""A teacher's notebooks are tests: one that hangs fails with the diagnosis."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

ROOT = Path(__file__).parents[2]
CLUSTER = """
import distkit as dk, torch, torch.distributed as dist
cluster = dk.Cluster(2)
"""
HANGS = """
def cross():
    dist.recv(torch.zeros(1), 1 - dist.get_rank())
cluster.run(cross)
"""


def write(path: Path, *cells: str, tags: list[str] | None = None) -> None:
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
    notebook.cells[-1].metadata.tags = tags or []
    nbformat.write(notebook, path)


@pytest.fixture
def run(
    tmp_path: Path, jupyter_home: Path, leftovers: Callable[[], list[str]]
) -> Callable[..., tuple[dict[str, str], str]]:
    """Run pytest on the notebooks; return their outcomes and its output."""

    def run(*options: str) -> tuple[dict[str, str], str]:
        command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--color=no"]
        done = subprocess.run(
            [*command, "--rootdir", tmp_path, "-c", "/dev/null", *options, tmp_path],
            capture_output=True,
            text=True,
        )
        assert not leftovers()
        message = [line.split() for line in done.stdout.splitlines() if ".ipynb::" in line]
        outcomes = {Path(words[1].split("::")[0]).name: words[0] for words in message}
        return outcomes, " ".join(done.stdout.split())

    return run


def test_each_notebook_is_a_test(run: Callable[..., tuple[dict[str, str], str]], tmp_path: Path):
    write(tmp_path / "good.ipynb", CLUSTER, "assert cluster.run(dist.get_rank).results == [0, 1]")
    write(tmp_path / "meant.ipynb", "1 / 0", tags=["raises-exception"])
    write(tmp_path / "hangs.ipynb", CLUSTER, HANGS)
    write(tmp_path / "dies.ipynb", "import os; os.kill(os.getpid(), 9)")
    (tmp_path / "bad.ipynb").write_text("{}")
    outcomes, message = run("--distkit-notebooks")
    failed = dict.fromkeys(["bad.ipynb", "dies.ipynb", "hangs.ipynb"], "FAILED")
    assert outcomes == failed | dict.fromkeys(["good.ipynb", "meant.ipynb"], "PASSED")
    assert "rank 0 waits in recv(src=1) at In[2]:2" in message  # and not after a timeout
    assert "bad.ipynb: Jupyter cannot read the notebook" in message
    assert "dies.ipynb: cell 1: Kernel died" in message


def test_cell_beyond_the_time_limit_is_interrupted(
    run: Callable[..., tuple[dict[str, str], str]], tmp_path: Path
):
    write(tmp_path / "loops.ipynb", "while True:\n    pass")
    outcomes, message = run("--distkit-notebooks", "--distkit-notebook-timeout=3")
    assert outcomes == {"loops.ipynb": "FAILED"}
    assert "cell 1 took longer than 3 s and was interrupted" in message
    assert "KeyboardInterrupt" in message


def test_notebooks_are_not_collected_by_default(
    run: Callable[..., tuple[dict[str, str], str]], tmp_path: Path
):
    write(tmp_path / "dies.ipynb", "import os; os.kill(os.getpid(), 9)")
    outcomes, message = run()
    assert not outcomes and "no tests ran" in message


def test_lessons_of_a_checkout_need_no_other_plugin() -> None:
    """With only distkit and pytest installed."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-p", "distkit.pytest_plugin", "--distkit-notebooks", "notebooks/"],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(".ipynb::runs") == len(list(ROOT.glob("notebooks/*.ipynb")))
