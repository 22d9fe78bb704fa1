"""Laboratories for tests, and the processes left in them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from distkit.errors import LaboratoryError
from distkit_hosts.laboratory import Laboratory
from distkit_hosts.laboratory.starting import PATH


@contextmanager
def laboratory(*args: Any, **kwargs: Any) -> Iterator[Laboratory]:
    """Create a laboratory, or skip the test."""
    try:
        lab = Laboratory(*args, **kwargs)
    except LaboratoryError as error:
        pytest.skip(str(error))
    with lab:
        yield lab


def namespace(pid: int | str) -> int:
    """Return the inode of a process's network namespace."""
    return Path(f"/proc/{pid}/ns/net").stat().st_ino


def inhabitants(namespaces: set[int]) -> list[str]:
    """Return the processes in these network namespaces."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if namespace(folder.name) in namespaces:
                found.append(f"{folder.name}: {folder.joinpath('cmdline').read_text()}")
    return found


def say(lab: Laboratory, host: str, command: str, **options: Any) -> str:
    """Run a shell command on a host and return its output."""
    ran = lab.run(host, ["sh", "-c", command], capture_output=True, text=True, **options)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def needs(program: str, package: str) -> pytest.MarkDecorator:
    """Skip a test where a program is not installed."""
    missing = not shutil.which(program, path=PATH)
    return pytest.mark.skipif(missing, reason=f"there is no {program} here ({package})")


@contextmanager
def hidden(lab: Laboratory, host: str, folder: Path) -> Iterator[None]:
    """Put an empty folder in the place of one that a host shares."""
    lab._admin(host, "mount", "-t", "tmpfs", "tmpfs", str(folder))
    yield
    lab._admin(host, "umount", "--lazy", str(folder))


@contextmanager
def shrunk(lab: Laboratory, host: str, folder: str) -> Iterator[None]:
    """Leave half a megabyte in a file system of a host."""
    remount = "mount", "--options-mode=ignore", "-o"
    lab._admin(host, *remount, "remount,size=512k", folder)
    yield
    lab._admin(host, *remount, "remount,size=50%", folder)
