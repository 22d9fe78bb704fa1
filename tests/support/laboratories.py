"""Laboratories for tests, and the processes in them."""

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
    """Create a laboratory, or skip the test if this is not possible."""
    try:
        lab = Laboratory(*args, **kwargs)
    except LaboratoryError as error:
        pytest.skip(str(error))
    with lab:
        yield lab


def namespace(pid: int | str) -> int:
    """Return the inode of a process's network namespace."""
    return Path(f"/proc/{pid}/ns/net").stat().st_ino


def processes_in(namespaces: set[int]) -> list[str]:
    """Return the processes in these network namespaces."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if namespace(folder.name) in namespaces:
                found.append(f"{folder.name}: {folder.joinpath('cmdline').read_text()}")
    return found


def run_shell(lab: Laboratory, host: str, command: str, **options: Any) -> str:
    """Run a shell command on a host and return its output."""
    completed = lab.run(host, ["sh", "-c", command], capture_output=True, text=True, **options)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.strip()


def needs(program: str, package: str) -> pytest.MarkDecorator:
    """Skip a test if a program is not installed."""
    missing = not shutil.which(program, path=PATH)
    return pytest.mark.skipif(missing, reason=f"{program} is not installed ({package})")


@contextmanager
def hide_folder(lab: Laboratory, host: str, folder: Path) -> Iterator[None]:
    """Mount an empty file system over a folder on a host."""
    lab._admin(host, "mount", "-t", "tmpfs", "tmpfs", str(folder))
    yield
    lab._admin(host, "umount", "--lazy", str(folder))


@contextmanager
def shrink_filesystem(lab: Laboratory, host: str, folder: str) -> Iterator[None]:
    """Shrink a file system on a host to 512 KiB."""
    remount = "mount", "--options-mode=ignore", "-o"
    lab._admin(host, *remount, "remount,size=512k", folder)
    yield
    lab._admin(host, *remount, "remount,size=50%", folder)
