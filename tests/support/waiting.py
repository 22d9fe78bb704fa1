"""How tests wait until something is so, and end what they have started."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil


def until(condition: Callable[[], object], timeout: float = 10.0) -> None:
    """Wait until something is so, at most so many seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not so within {timeout:g} s"
        time.sleep(0.005)


def alive(process: psutil.Process) -> bool:
    """False if a process has ended, also if that was a moment ago, or is not yet waited for."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def background(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that is terminated in the end, also when the test fails while it runs."""
    with subprocess.Popen(command, text=True, **options) as process:
        try:
            yield process
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


def until_line(process: subprocess.Popen[str], end: str) -> Iterator[str]:
    """The lines that a process prints, up to the first that contains this."""
    assert process.stdout is not None
    for line in process.stdout:
        yield line
        if end in line:
            return
