"""Runs programs on ranks of plain torch; imports neither distkit nor the suite.

Reads a job as JSON from standard input, and writes how each program's ranks ended to
``PROGRAM.json``, next to the program. torch is imported once; the ranks are forks.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from datetime import timedelta
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing.connection import wait
from pathlib import Path
from traceback import format_exception_only
from typing import TypedDict

import torch.distributed as dist

FORK = multiprocessing.get_context("fork")

#: A rank that still runs after this multiple of torch's timeout is killed.
KILL_AFTER = 3.0

#: Time that a rank stays alive after it returns, so that its peers can connect [s].
GRACE = 1.0


class Job(TypedDict):
    """The programs to run.

    Args:
        programs: files that define ``program``, each with its number of ranks.
        timeout: torch's timeout [s].
        barrier: whether each program ends with a ``monitored_barrier``, with half the timeout.
        at_once: the number of programs that run concurrently.
    """

    programs: list[tuple[str, int]]
    timeout: float
    barrier: bool
    at_once: int


class End(TypedDict):
    """The end of a rank.

    Args:
        how: "returned", "raised", "signal 9", or "running" if it was killed at the end.
        barrier: whether the rank reached the ``monitored_barrier``.
        errors: times since the start [s] and texts of its exceptions, without tracebacks.
        log: its output, including tracebacks.
    """

    how: str
    barrier: bool
    errors: list[tuple[float, str]]
    log: str


def main() -> None:
    """Run the programs of a job, each in its own process."""
    job: Job = json.load(sys.stdin)
    running = {}
    for file, ranks in job["programs"]:
        process = FORK.Process(target=run, args=(Path(file), ranks, job))
        process.start()
        running[process.sentinel] = process
        if len(running) == job["at_once"]:
            for sentinel in wait(list(running)):
                running.pop(sentinel).join()
    for process in running.values():
        process.join()


def run(file: Path, ranks: int, job: Job) -> None:
    """Fork the ranks of a program, and write how they ended."""
    begin = time.monotonic()
    processes = [
        FORK.Process(target=run_rank, args=(file, rank, ranks, job, begin)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.0, begin + KILL_AFTER * job["timeout"] - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    ends = [_end(file, rank, code) for rank, code in enumerate(codes)]
    file.with_suffix(".json").write_text(json.dumps(ends), encoding="utf-8")


def run_rank(file: Path, rank: int, ranks: int, job: Job, begin: float) -> None:
    """Run the program as one rank, with its output in a file."""
    log = os.open(_rank_file(file, rank, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)

    def log_error(error: BaseException) -> None:
        text = "".join(format_exception_only(error)).strip()
        with _rank_file(file, rank, "errors").open("a", encoding="utf-8") as errors:
            errors.write(json.dumps((round(time.monotonic() - begin, 2), text)) + "\n")

    def thread_raised(args: threading.ExceptHookArgs) -> None:
        log_error(args.exc_value or args.exc_type())
        threading.__excepthook__(args)

    threading.excepthook = thread_raised
    try:
        _rank(file, rank, ranks, job)
    except Exception as error:
        log_error(error)
        raise


def _rank(file: Path, rank: int, ranks: int, job: Job) -> None:
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    store = dist.FileStore(str(file.with_suffix(".store")), ranks)
    timeout = timedelta(seconds=job["timeout"])
    store.set_timeout(timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    module.program()
    if job["barrier"]:
        _rank_file(file, rank, "barrier").touch()
        dist.monitored_barrier(timeout=timeout / 2, wait_all_ranks=True)
    time.sleep(GRACE)
    if dist.is_initialized():
        dist.destroy_process_group()


def _end(file: Path, rank: int, code: int | None) -> End:
    errors = _rank_file(file, rank, "errors")
    lines = errors.read_text(encoding="utf-8").splitlines() if errors.exists() else []
    return {
        "how": _describe(code),
        "barrier": _rank_file(file, rank, "barrier").exists(),
        "errors": [json.loads(line) for line in lines],
        "log": _rank_file(file, rank, "log").read_text(encoding="utf-8", errors="replace"),
    }


def _describe(code: int | None) -> str:
    if code is None:
        return "running"
    return f"signal {-code}" if code < 0 else "raised" if code else "returned"


def _rank_file(file: Path, rank: int, suffix: str) -> Path:
    return file.with_suffix(f".{rank}.{suffix}")


if __name__ == "__main__":
    main()
