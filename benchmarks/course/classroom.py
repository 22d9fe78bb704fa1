"""A class that submits answers to all exercises; a tenth of it does harm."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.course.lessons import none
from benchmarks.figure import Figure
from distkit import run_ranks
from distkit.exercises import TASKS
from distkit.exercises.assignments import solved
from distkit.exercises.grading import grade
from distkit.exercises.task import Task

#: Bodies of functions that would harm a grader. GRADES is the path of a file with grades.
HOSTILE = {
    "os._exit": "import os; os._exit(0)",
    "an endless loop": "while True: pass",
    "a fork bomb": """
        import os, time
        for _ in range(6): os.fork()
        time.sleep(600)""",
    "endless printing": "while True: print('x' * 1_000_000)",
    "endless writing": """
        import os
        while True: os.write(1, b'x' * 1_000_000)""",
    "too much memory": """
        held = []
        while True: held.append(bytearray(50_000_000))""",
    "daemon threads": """
        import threading, time
        for _ in range(20): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        os = __import__('os'); os.abort()""",
    "a child that ignores SIGTERM": """
        import subprocess
        command = ['sh', '-c', 'trap "" TERM; sleep 600']
        subprocess.Popen(command, start_new_session=True)
        raise ValueError('it is still there')""",
    "a socket left listening": """
        import os, socket, time
        server = socket.create_server(('127.0.0.1', 0))
        if os.fork() == 0: time.sleep(600)
        raise ValueError('it still listens')""",
    "a write to the grades": "open(GRADES, 'w').write('{}')",
    "a kill of what it is forked from": "import os; os.kill(os.getppid(), 9)",
}


def measure(reps: int, say: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """A class of ``reps`` students."""
    lost, left = classroom(reps, say)
    several = f"{reps} submissions x {len(TASKS)} exercises, a tenth hostile"
    return [
        none(f"results lost, of {several}", len(lost)),
        none("processes left by these submissions", left),
    ], {"lost": lost}


def classroom(students: int, say: Callable[[str], None]) -> tuple[list[str], int]:
    """Results that are not as they should be, and processes left; every tenth is hostile."""
    run_ranks(int, 1)  # what ranks are forked from stays as long as this process
    before, lost = _processes(), []
    harm = itertools.cycle(HOSTILE)
    with tempfile.TemporaryDirectory(prefix="distkit-bench-") as folder:
        for n in range(students):
            kind = next(harm) if n % 10 == 0 else ""
            say(f"course: submission {n}, {kind or 'well-meant'}")
            lost += [f"{n}: {what}" for what in _submission(Path(folder, f"{n}.py"), kind)]
    return lost, len(_processes()) - len(before)


def _submission(file: Path, kind: str) -> Iterator[str]:
    """Grade one: every other exercise of a hostile one does harm, all else is right."""
    names, report = list(TASKS), file.with_suffix(".json")
    hostile = set(names[::2]) if kind else set()
    texts = (harmful(TASKS[n], kind, report) if n in hostile else solved(TASKS[n]) for n in names)
    file.write_text("\n\n".join(texts))
    grade(file, report)
    rows = json.loads(report.read_text())["criteria"]
    for name in names:
        of = [row for row in rows if row["criterion"].startswith(f"{name}.")]
        passed = bool(of) and all(row["status"] in ("pass", "blocked") for row in of)
        if not of or passed == (name in hostile):
            yield f"{name} ({kind or 'right'}): {[row['message'] for row in of]}"


def harmful(task: Task, kind: str, grades: Path) -> str:
    """An answer that does harm."""
    body = textwrap.dedent(HOSTILE[kind]).strip().replace("GRADES", repr(str(grades)))
    return f"def {task.signature}:\n{textwrap.indent(body, '    ')}\n"


def _processes() -> set[int]:
    """All below this process, but those that are ending."""
    below = psutil.Process(os.getpid()).children(recursive=True)
    _, alive = psutil.wait_procs(below, timeout=2)
    return {p.pid for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE}
