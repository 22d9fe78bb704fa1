"""Waiting for conditions, and background processes of tests."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil


def until(condition: Callable[[], object], timeout: float = 10.0) -> None:
    """Wait until a condition holds, up to the time limit [s]."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not so within {timeout:g} s"
        time.sleep(0.005)


def alive(process: psutil.Process) -> bool:
    """Return whether a process runs; False also for zombies."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def background(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a process that is terminated when the test ends."""
    with subprocess.Popen(command, text=True, **options) as process:
        try:
            yield process
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


def until_line(process: subprocess.Popen[str], end: str) -> Iterator[str]:
    """Read a process's output up to the first line with a text."""
    assert process.stdout is not None
    for line in process.stdout:
        yield line
        if end in line:
            return
