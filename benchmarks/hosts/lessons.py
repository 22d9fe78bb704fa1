"""The lessons, unchanged, with their ranks on three machines: by SSH, MPI and Slurm.

A lesson runs in a folder that the machines do not share, as a site's environment variables say.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure, figure
from benchmarks.hosts.life import AS_ROOT, HOSTS, ROOT, laboratory
from distkit_hosts.laboratory import Laboratory

#: The environment of a site by its launcher.
SITES = {
    "ssh": {"DISTKIT_HOSTS": ",".join(HOSTS)},
    "mpi": {"DISTKIT_ENGINES": "mpi", "DISTKIT_HOSTS": ",".join(HOSTS)},
    "slurm": {"DISTKIT_ENGINES": "slurm", "DISTKIT_OPTIONS": '{"options": "--spread-job"}'},
}

#: The lessons.
LESSONS = sorted(p for n in (0, 1, 2, 3, 4, 12) for p in ROOT.glob(f"notebooks/{n:02}_*.ipynb"))

#: A cell takes at most so long [s].
PATIENCE = 300


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Each lesson by each launcher, once; the same every time, so ``reps`` do not matter."""
    said = {}
    with laboratory() as lab:
        lab.slurm()
        for launcher in SITES:
            for lesson in LESSONS:
                began = time.perf_counter()
                what = f"{lesson.stem} by {launcher}"
                said[what] = run(lab, launcher, lesson)
                word = "passed" if not said[what] else f"failed:\n{said[what]}"
                say(f"hosts: {what}: {word} ({time.perf_counter() - began:.0f} s)")
    failed = float(sum(map(bool, said.values())))
    name = f"lessons that fail on three hosts, of {len(said)} runs"
    return [figure(name, "lessons", [failed], absolute=True, must=0, aim=0)], {"said": said}


def run(lab: Laboratory, launcher: str, lesson: Path) -> str:
    """Run a lesson on the head of a laboratory; what went wrong, "" for nothing."""
    folder = f"/tmp/{launcher}"  # the head's own
    environ = {
        **os.environ,
        **AS_ROOT,
        **SITES[launcher],
        "PYTHONPATH": f"{ROOT}:{ROOT}/companions",
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
