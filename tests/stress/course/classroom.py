"""A class that submits answers to all exercises; a tenth of the submissions are hostile."""

from __future__ import annotations

import itertools
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from distkit_course.assignments import solved
from distkit_course.exercises import TASKS
from distkit_course.grading import grade
from distkit_course.task import Task

#: Bodies of answers that exhaust the grader's machine or leave processes.
WASTEFUL = {
    "os._exit": "import os; os._exit(0)",
    "an endless loop": "while True: pass",
    "a fork bomb": """
        import os, time
        rank = os.getpid()
        for _ in range(6): os.fork()
        if os.getpid() != rank: time.sleep(600)
        raise ValueError('64 processes are there')""",
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
    "a kill of its parent": "import os; os.kill(os.getppid(), 9)",
}

#: Creates a pickle that writes the pid of the process that loads it to the file MARK.
_PICKLE = """
    import os, pickle, struct, sys
    class Note:
        def __reduce__(self):
            return os.system, ('echo $PPID >> ' + MARK,)
    evil = pickle.dumps(Note())
"""
#: Bodies of answers that try to run code in the grader or to change its verdict.
HOSTILE = WASTEFUL | {
    "a pickle in place of every encoded value": f"""{_PICKLE}
    for module in [m for n, m in sys.modules.items() if n.partition('.')[0] == 'distkit']:
        for name in list(vars(module)):
            if any(word in name for word in ('dump', 'pack', 'encode')):
                setattr(module, name, lambda *args, **options: evil)
    pickle.dumps = lambda *args, **options: evil""",
    "a pickle to every descriptor": f"""{_PICKLE}
    import threading
    for fd in range(3, 200):
        write = lambda fd=fd: os.write(fd, struct.pack('!Q', len(evil)) + evil)
        threading.Thread(target=write, daemon=True).start()
    __import__('time').sleep(0.5)""",
    "a pickle in every file": f"""{_PICKLE}
    for fd in os.listdir('/proc/self/fd'):
        place = os.path.dirname(os.path.realpath('/proc/self/fd/' + fd))
        for file in os.listdir(place) if 'distkit-' in place else ():
            if os.path.isfile(f'{{place}}/{{file}}'): open(f'{{place}}/{{file}}', 'wb').write(evil)
    os.abort()""",
    "a pickle in every message": f"""{_PICKLE}
    from distkit.cluster.rank.rank import Rank
    for kind in 'rows box figure group raising threads unreduced waits failing outcome'.split():
        for what in (evil, (1, evil), [evil] * 3, {{'rank': 0, 'result': evil}}):
            Rank.current.outbox.emit(1, kind, what)
    __import__('time').sleep(0.5)""",
    "frames walked to the criteria": """
        import gc, sys
        frame = sys._getframe()
        while frame:
            for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
                if isinstance(value, list): value *= 2
            frame = frame.f_back
        for one in gc.get_objects():
            if type(one).__name__ in ('Criterion', 'Verdict', 'Task', 'Report'):
                for name, value in {'status': 'pass', 'worth': 1000, 'points': 1000}.items():
                    object.__setattr__(one, name, value)
        return 'wrong'""",
    "a patched judge": """
        import sys
        for name, module in list(sys.modules.items()):
            if name.startswith('distkit_course'):
                for word in ('same', 'call_answer', 'run_answer'):
                    setattr(module, word, lambda *args: True)
                module.FAIL = module.NOT_ATTEMPTED = 'pass'
        return 'wrong'""",
    "overwritten reports": """
        import os, shutil
        for n, name in enumerate(sorted(os.listdir(REPORTS))):
            path = f'{REPORTS}/{name}'
            if os.path.isdir(path): shutil.rmtree(path)
            elif n % 2: open(path, 'w').write('{"points": 1000}')
            else: os.unlink(path); os.makedirs(path + '/full')
        os.makedirs(f'{REPORTS}/zoe.json/full', exist_ok=True)
        raise ValueError('they have been changed')""",
    "reports replaced by pipes": """
        import os
        for name in os.listdir(REPORTS):
            if name.endswith('.json') and os.path.isfile(f'{REPORTS}/{name}'):
                os.unlink(f'{REPORTS}/{name}'); os.mkfifo(f'{REPORTS}/{name}')
        raise ValueError('they have been changed')""",
    "a daemon that writes later": """
        import glob, os, signal, time
        def parent(pid): return int(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1])
        above = os.getppid(), parent(os.getppid())
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for pid in above: os.kill(pid, signal.SIGKILL)
                while True:
                    time.sleep(0.5)
                    for file in glob.glob(f'{REPORTS}/*.json'): open(file, 'w').write('{}')
        time.sleep(600)""",
    "a kill of the judge": """
        import os, signal
        def parent(pid): return int(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1])
        pid = os.getppid()
        while 'judge' not in open(f'/proc/{pid}/cmdline').read(): pid = parent(pid)
        os.kill(pid, signal.SIGKILL)""",
}


def classroom(folder: Path, students: int, log: Callable[[str], None]) -> tuple[list[str], int]:
    """Grade a class; return the wrong results, and the number of loaded pickles.

    In every tenth submission, every second answer is hostile, cycling through the kinds.
    """
    hostile, reports = itertools.cycle(HOSTILE), folder / "reports"
    kinds = [
        {name: next(hostile) for name in [*TASKS][::2]} if n % 10 == 0 else {}
        for n in range(students)
    ]
    files = [folder / f"{n:03}.py" for n in range(students)]
    for file, mine in zip(files, kinds, strict=True):
        texts = [
            hostile_answer(task, mine[name], reports) if name in mine else solved(task)
            for name, task in TASKS.items()
        ]
        file.write_text("\n\n".join(texts))
    errors = []
    for mine, report in zip(kinds, grade(files, reports), strict=True):
        log(f"course: submission {report.submission}, {'hostile' if mine else 'correct'}")
        errors += [f"{report.submission}: {what}" for what in _report_errors(report.criteria, mine)]
    for mine, file in zip(kinds, files, strict=True):
        on_disk = json.loads((reports / f"{file.stem}.json").read_text())
        errors += [
            f"{file.stem}, on disk: {what}" for what in _report_errors(on_disk["criteria"], mine)
        ]
    mark = folder / "MARK"
    return errors, len(mark.read_text().splitlines()) if mark.exists() else 0


def _report_errors(rows: list[dict[str, Any]], kinds: Mapping[str, str]) -> Iterator[str]:
    """Generate the errors in the report on a submission."""
    for name in TASKS:
        criteria = [row for row in rows if row["criterion"].startswith(f"{name}.")]
        passed = bool(criteria) and all(row["status"] in ("pass", "blocked") for row in criteria)
        if not criteria or passed == (name in kinds):
            yield f"{name} ({kinds.get(name, 'right')}): {[row['message'] for row in criteria]}"


def hostile_answer(task: Task, kind: str, reports: Path) -> str:
    """Return a hostile answer.

    Args:
        task: the exercise.
        kind: one of :data:`HOSTILE`.
        reports: the report folder; the file ``MARK`` next to it lists processes that ran code.
    """
    variables = f"REPORTS, MARK = {str(reports)!r}, {str(reports.parent / 'MARK')!r}\n"
    body = variables + textwrap.dedent(HOSTILE[kind]).strip()
    return f"def {task.signature}:\n{textwrap.indent(body, '    ')}\n"
