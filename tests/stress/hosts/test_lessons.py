"""Lessons run unchanged with their ranks on three machines, started by SSH, MPI or Slurm.

An environment variable configures the cluster. The machines do not share the lesson's folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.driver import open_mpi_environ
from benchmarks.hosts import HOSTS, ROOT, laboratory
from distkit_hosts.laboratory import Laboratory
from tests.support.laboratories import needs
from tests.support.slurm import start_slurm

#: The cluster options of a site, by launcher.
SITES = {
    "ssh": {"hosts": HOSTS},
    "mpi": {"engines": "mpi", "hosts": HOSTS},
    "slurm": {"engines": "slurm", "options": "--spread-job"},
}

#: The launchers; some need programs that may not be installed.
LAUNCHERS = [
    "ssh",
    pytest.param("mpi", marks=needs("mpiexec", "openmpi-bin")),
    pytest.param("slurm", marks=needs("slurmctld", "slurm-wlm")),
]

LESSONS = sorted(p for n in (0, 1, 2, 3, 4, 12) for p in ROOT.glob(f"notebooks/{n:02}_*.ipynb"))

#: Timeout of a cell [s].
CELL_TIMEOUT = 300


@pytest.fixture(scope="module")
def lab() -> Iterator[Laboratory]:
    with laboratory() as lab:
        yield lab


@pytest.fixture(scope="module")
def slurm(lab: Laboratory) -> None:
    start_slurm(lab)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_lesson_runs_unchanged_on_three_hosts(
    lab: Laboratory, launcher: str, lesson: Path, request: pytest.FixtureRequest
) -> None:
    if launcher == "slurm":
        request.getfixturevalue("slurm")
    assert run(lab, launcher, lesson) == ""


def run(lab: Laboratory, launcher: str, lesson: Path) -> str:
    """Run a lesson on the head of a laboratory and return its error, or ""."""
    folder = f"/tmp/{launcher}"  # private to the head
    environ = {
        **open_mpi_environ(),
        "DISTKIT_CLUSTER": json.dumps(SITES[launcher]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "companions")]),
        "IPYTHONDIR": f"{folder}/ipython",
        "JUPYTER_RUNTIME_DIR": f"{folder}/runtime",
    }
    execute = f"{sys.executable} -m jupyter execute --timeout={CELL_TIMEOUT} {lesson.name}"
    completed = lab.run(
        "head",
        ["sh", "-c", f"mkdir -p {folder} && cd {folder} && cp {lesson} . && {execute}"],
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    return completed.stderr.strip()[-2000:] if completed.returncode else ""
