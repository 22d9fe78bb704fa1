"""Waiting for conditions, and background processes for tests."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil


def wait_until(condition: Callable[[], object], timeout: float = 10.0) -> None:
    """Wait until a condition is true, up to the time limit [s]."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"the condition was not met within {timeout:g} s"
        time.sleep(0.005)


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process is running; a zombie is not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def background_process(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a process, and terminate it when the block ends."""
    with subprocess.Popen(command, text=True, **options) as process:
        try:
            yield process
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


def until_line(process: subprocess.Popen[str], end: str) -> Iterator[str]:
    """Yield the lines of a process's output, up to the first that contains a text."""
    assert process.stdout is not None
    for line in process.stdout:
        yield line
        if end in line:
            return
