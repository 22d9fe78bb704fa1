"""How much memory a lesson takes with all that it needs: JupyterLab's server, kernel, cluster.

The first lesson runs once more within what Binder grants, where a cgroup can be made.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import nbformat
import psutil

from benchmarks import lab
from benchmarks.course.lessons import FIRST, LESSONS, none
from benchmarks.driver import MARK, end, marked
from benchmarks.figure import Figure, figure
from benchmarks.kernel import Kernel
from benchmarks.memory import pss
from distkit.cluster import machine
from distkit.errors import DistkitError

#: From one look at the memory to the next [s].
PERIOD = 0.3

#: What Binder grants a server at most [bytes], beside one processor; it guarantees 450 MiB.
BINDER = 2 << 30


#: Why a limit is not reached.
FLOOR = "0.52 GB before there is a rank: JupyterLab, a kernel and what ranks fork from, with torch"


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Each lesson once; the same every time, so ``reps`` do not matter."""
    peaks, failed = {}, {}
    for path in LESSONS:
        peaks[path.stem], failed[path.stem] = run(path)
        say(f"course: {path.stem}: {peaks[path.stem]:.0f} MB {failed[path.stem]}")
    most = max(peaks, key=lambda name: peaks[name])
    what = "peak memory (PSS) of server, kernel and cluster"
    figures = [
        _peak(f"{what}: the lesson that takes most, {most}", peaks[most], 1600, 1000),
        _peak(f"{what}: {FIRST.stem}", peaks[FIRST.stem], 600, 450),
    ]
    names = (
        "lesson 1 on Binder (2 GiB, one processor): failures",
        "lesson 1 on Binder: memory charged at most",
    )
    with cgroup(BINDER) as group:
        if group is None:
            note = "no cgroup can be made here"
            figures += [Figure(name, "", None, absolute=True, note=note) for name in names]
        else:
            failed["on Binder"] = run(FIRST, _within(group))[1]
            used = [group / name for name in ("memory.peak", "memory.max_usage_in_bytes")]
            charged = int(next(path for path in used if path.exists()).read_text()) / 1e6
            figures += [
                none(names[0], bool(failed["on Binder"])),
                _peak(names[1], charged, 600, 450),
            ]
            say(f"course: on Binder: {charged:.0f} MB {failed['on Binder']}")
    return figures, {"peaks": peaks, "failed": failed}


def _peak(name: str, value: float, must: float, aim: float) -> Figure:
    note = FLOOR if value > must else ""
    return figure(name, "MB", [value], must=must, aim=aim, absolute=True, note=note)


def run(lesson: Path, before: Sequence[str] = ()) -> tuple[float, str]:
    """Run a lesson in JupyterLab: the peak of its memory [MB], and what went wrong."""
    mark, peaks, over = uuid.uuid4().hex, [0.0], threading.Event()

    def watch() -> None:
        while not over.wait(PERIOD):
            peaks.append(_total(marked(mark)))

    watcher = threading.Thread(target=watch)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        root = shutil.copytree(lesson.parent, Path(folder, "notebooks"))
        environ = {**os.environ, MARK: mark, **lab.surroundings(Path(folder))}
        with lab.serve(root, Path(folder), environ, before) as server:
            watcher.start()
            try:
                run_cells(Kernel.start(server.url, server.token), lesson)
                why = ""
            except (DistkitError, OSError) as error:
                why = f"{type(error).__name__}: {error}"[-2000:]
            finally:
                over.set()
                watcher.join()
        end(mark)
    return max(peaks), why


def run_cells(kernel: Kernel, lesson: Path) -> None:
    """Run a lesson's cells.

    Raises:
        DistkitError: one raised an error, and was not meant to.
    """
    notebook = nbformat.read(lesson, as_version=4)  # type: ignore[no-untyped-call]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            meant = "raises-exception" in cell.metadata.get("tags", [])
            with suppress(DistkitError) if meant else nullcontext():
                kernel.run(cell.source)


def _total(processes: list[psutil.Process]) -> float:
    found = 0.0
    for process in processes:
        with suppress(OSError, DistkitError):  # it has ended
            found += pss(process.pid) / 1e6
    return found


@contextmanager
def cgroup(nbytes: int) -> Iterator[Path | None]:
    """A cgroup within this process's own that has so much memory; None where there can be none."""
    group = next(iter(machine.cgroups("memory")), Path("/")) / f"distkit-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        limits = [group / name for name in ("memory.max", "memory.limit_in_bytes")]
        next(path for path in limits if path.exists()).write_text(str(nbytes))
    except (OSError, StopIteration):
        with suppress(OSError):
            group.rmdir()
        yield None
        return
    try:
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            psutil.Process(int(pid)).wait(10)
        group.rmdir()


def _within(group: Path) -> list[str]:
    """What puts a command into a cgroup, on one processor."""
    one = min(os.sched_getaffinity(0))
    enter = 'echo $$ >"$0/cgroup.procs" && exec "$@"'
    return ["sh", "-c", enter, str(group), "taskset", "--cpu-list", str(one)]
