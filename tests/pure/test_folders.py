"""Removal of stale folders."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from distkit.cluster.processes import folders
from distkit.errors import StartError


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own paths are too long for sockets
    monkeypatch.setattr(tempfile, "tempdir", str(here))
    return here


def release(held: int | None) -> None:
    assert held is not None
    os.close(held)


def test_unlocked_folder_is_removed(temporary: Path) -> None:
    folder, held = folders.make()
    assert folders.has_owner(folder)
    assert folders.sweep(str(temporary)) == []
    also = folders.hold(folder)
    release(held)
    assert folders.sweep(str(temporary)) == []
    release(also)
    assert folders.sweep(str(temporary)) == [Path(folder).name]
    assert not folders.has_owner(folder)


def test_folder_stays_locked_while_children_of_the_owner_live(
    temporary: Path,
) -> None:
    folder, held = folders.make()
    assert held is not None
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], pass_fds=[held], stdin=subprocess.PIPE
    )
    os.close(held)
    assert folders.sweep(str(temporary)) == []
    child.kill()
    child.communicate()
    assert folders.sweep(str(temporary)) == [Path(folder).name]


def test_foreign_folders_are_not_touched(temporary: Path) -> None:
    target = Path(temporary, "target")
    target.mkdir()
    Path(target, folders.OWNER).write_text("1")
    Path(temporary, "distkit-abcdefgh").symlink_to(target)  # a link instead of a folder
    Path(temporary, "distkit-00000000").write_text("a file")
    for name in ("distkit-11111111", "distkit-long-name", "other-22222222"):
        Path(temporary, name).mkdir()
        Path(temporary, name, "theirs").write_text("kept")
    Path(temporary, "distkit-long-name", folders.OWNER).write_text("1")
    Path(temporary, "distkit-33333333").mkdir(0o700)  # its creator continues in a moment
    before = sorted(temporary.rglob("*"))
    assert folders.sweep(str(temporary)) == []
    assert sorted(temporary.rglob("*")) == before


def test_missing_temporary_folder_is_ignored() -> None:
    assert folders.sweep("/nowhere/at/all") == []


def test_low_disk_space_raises_before_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders.check_space(str(tmp_path), 4)
    full = os.statvfs_result((4096, 4096, 100, 0, 10, 100, 100, 100, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(StartError, match=r"has 40 KiB free, and 4 (?s:.*)1\.91 MiB(?s:.*)TM"):
        folders.check_space(str(tmp_path), 4)
