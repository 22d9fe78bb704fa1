"""Folders of runs: access, and removal of stale ones."""

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


def test_unlocked_folder_is_removed(temporary: Path) -> None:
    folder, held = folders.make()
    folders.sweep(str(temporary))
    assert Path(folder).exists()
    os.close(held)
    folders.sweep(str(temporary))
    assert not Path(folder).exists()


def test_folder_stays_locked_while_children_of_the_owner_live(
    temporary: Path,
) -> None:
    folder, held = folders.make()
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], pass_fds=[held], stdin=subprocess.PIPE
    )
    os.close(held)
    folders.sweep(str(temporary))
    assert Path(folder).exists()
    child.kill()
    child.communicate()
    folders.sweep(str(temporary))
    assert not Path(folder).exists()


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
    folders.sweep(str(temporary))
    assert sorted(temporary.rglob("*")) == before


def test_folder_that_others_may_enter_is_not_ours(tmp_path: Path) -> None:
    assert folders.is_ours(tmp_path)
    tmp_path.chmod(0o755)
    assert not folders.is_ours(tmp_path)
    assert not folders.is_ours(tmp_path / "none")


def test_low_disk_space_raises_before_start(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.statvfs_result((4096, 4096, 100, 0, 10, 100, 100, 100, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(StartError, match=r"1\.91 MiB needed, 40 KiB free(?s:.*)TMPDIR"):
        folders.make(4)
    assert not list(temporary.iterdir())
