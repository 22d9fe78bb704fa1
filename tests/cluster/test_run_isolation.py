"""Runs do not share modules, stores or settings."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import distkit as dk
from distkit.cluster import Run


@pytest.fixture(scope="module")
def cluster() -> Iterator[dk.Cluster]:
    with dk.Cluster(2) as cluster:
        yield cluster


# -- modules -----------------------------------------------------------------------


def write_script(folder: Path, value: int) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "common_name.py").write_text(f"VALUE = {value}\ncount = 0\n")
    (folder / "part").mkdir(exist_ok=True)
    (folder / "part/deep.py").write_text(f"VALUE = {value}\n")
    script = folder / "train.py"
    script.write_text(
        "import common_name, part.deep\ncommon_name.count += 1\n"
        "print(common_name.VALUE, part.deep.VALUE, common_name.count)\n"
    )
    return script


def printed_lines(run: Run) -> set[str]:
    return set("".join(run.output).split("\n")) - {""}


def test_modules_of_the_same_name_do_not_collide(cluster: dk.Cluster, tmp_path: Path) -> None:
    first, second = write_script(tmp_path / "a", 1), write_script(tmp_path / "b", 2)
    assert printed_lines(cluster.run(first)) == {"1 1 1"}
    assert printed_lines(cluster.run(second)) == {"2 2 1"}
    write_script(tmp_path / "a", 345)
    assert printed_lines(cluster.run(first)) == {"345 345 1"}


def test_traceback_quotes_the_current_version_of_a_script(
    cluster: dk.Cluster, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch.distributed as dist\ndist.barrier()\n1 / 0\n")
    for _ in range(2):
        with pytest.raises(dk.errors.RankError):
            cluster.run(script)
    script.write_text("import nomod\n")
    with pytest.raises(dk.errors.RankError, match=r"in <module>\n    import nomod\n"):
        cluster.run(script)


def count() -> int:
    return dist.distributed_c10d._get_default_store().add("n", 1)


def test_run_has_a_fresh_store_and_cells_keep_theirs(cluster: dk.Cluster) -> None:
    cell = "dist.distributed_c10d._get_default_store().add('n', 1)"
    assert sorted(cluster.execute(cell).results) == [1, 2]
    for _ in range(2):
        assert sorted(cluster.run(count).results) == [1, 2]
    assert sorted(cluster.execute(cell).results) == [3, 4]


def test_settings_of_a_script_do_not_affect_the_next_run(
    cluster: dk.Cluster, tmp_path: Path
) -> None:
    (tmp_path / "untidy.py").write_text(
        "import logging, os, sys, warnings, torch\n"
        "os.environ.update(RANK='77', MINE='1'); os.chdir('/'); sys.path.insert(0, '/nowhere')\n"
        "sys.argv.append('x'); logging.basicConfig(level='DEBUG'); warnings.simplefilter('error')\n"
        "torch.set_default_dtype(torch.float64); torch.set_grad_enabled(False)\n"
        "torch.use_deterministic_algorithms(True); torch.set_default_device('meta')\n"
    )

    def state() -> list[object]:
        import logging
        import warnings

        return [
            {name: value for name, value in os.environ.items() if name != "MASTER_PORT"},
            str(Path.cwd()),
            sys.path,
            sys.argv,
            len(logging.root.handlers),
            logging.root.level,
            len(warnings.filters),
            torch.ones(1).dtype,
            torch.ones(1).device.type,
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
        ]

    before = cluster.run(state).results
    cluster.run(tmp_path / "untidy.py")
    assert cluster.run(state).results == before


# -- programs that start ranks -----------------------------------------------------


def test_program_that_launches_ranks_gets_a_hint(cluster: dk.Cluster) -> None:
    def launch_ranks() -> None:
        raise subprocess.CalledProcessError(1, [sys.executable, "-m", "torch.distributed.run"])

    with pytest.raises(dk.errors.RankError, match="Run their function with cluster"):
        cluster.run(launch_ranks)
