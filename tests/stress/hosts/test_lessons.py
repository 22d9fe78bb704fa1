"""The lessons, unchanged, with their ranks on three machines: by SSH, MPI and Slurm.

A lesson runs in a folder that the machines do not share, as a site's environment variables say.
"""

from __future__ import annotations

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

#: The environment of a site by its launcher.
SITES = {
    "ssh": {"DISTKIT_HOSTS": ",".join(HOSTS)},
    "mpi": {"DISTKIT_ENGINES": "mpi", "DISTKIT_HOSTS": ",".join(HOSTS)},
    "slurm": {"DISTKIT_ENGINES": "slurm", "DISTKIT_OPTIONS": '{"options": "--spread-job"}'},
}

#: The programs of launchers, which may be missing.
LAUNCHERS = [
    "ssh",
    pytest.param("mpi", marks=needs("mpiexec", "openmpi-bin")),
    pytest.param("slurm", marks=needs("slurmctld", "slurm-wlm")),
]

#: The lessons.
LESSONS = sorted(p for n in (0, 1, 2, 3, 4, 12) for p in ROOT.glob(f"notebooks/{n:02}_*.ipynb"))

#: A cell takes at most so long [s].
PATIENCE = 300


@pytest.fixture(scope="module")
def lab() -> Iterator[Laboratory]:
    with laboratory() as lab:
        yield lab


@pytest.fixture(scope="module")
def slurm(lab: Laboratory) -> None:
    lab.slurm()


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
    """Run a lesson on the head of a laboratory; what went wrong, "" for nothing."""
    folder = f"/tmp/{launcher}"  # the head's own
    environ = {
        **open_mpi_environ(),
        **SITES[launcher],
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "companions")]),
        "IPYTHONDIR": f"{folder}/ipython",
        "JUPYTER_RUNTIME_DIR": f"{folder}/runtime",
    }
    execute = f"{sys.executable} -m jupyter execute --timeout={PATIENCE} {lesson.name}"
    ran = lab.run(
        "head",
        ["sh", "-c", f"mkdir -p {folder} && cd {folder} && cp {lesson} . && {execute}"],
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    return ran.stderr.strip()[-2000:] if ran.returncode else ""
