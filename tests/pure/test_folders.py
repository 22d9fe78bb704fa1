"""Run folders: access, space and removal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distkit.cluster.processes import cleanup
from distkit.errors import StartError


def test_only_folders_with_the_prefix_are_removed(temporary: Path) -> None:
    prefix, other_prefix = cleanup.new_prefix(), cleanup.new_prefix()
    removed, kept = Path(cleanup.make_folder(prefix)), Path(cleanup.make_folder(other_prefix))
    (removed / "socket").write_text("")
    cleanup.remove_folders(prefix)
    assert list(temporary.iterdir()) == [kept]


def test_low_disk_space_raises_before_start(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.statvfs_result((4096, 4096, 100, 0, 10, 100, 100, 100, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(StartError, match=r"1\.91 MiB needed, 40 KiB free(?s:.*)TMPDIR"):
        cleanup.make_folder("distkit-", 4)
    assert not list(temporary.iterdir())
