"""What this machine allows: files that may be open at once."""

from __future__ import annotations

import resource

import pytest

from distkit.cluster import machine
from distkit.errors import StartError


@pytest.mark.parametrize(
    ("soft", "hard", "processes", "fits"),
    [
        (1024, 4096, 5, True),
        (1024, -1, 100, True),
        (-1, -1, 1000, True),
        (80, 4096, 5, False),
        (200, 200, 5, True),
        (40, 40, 1, False),
        (1024, 1024, 200, False),
        (150, 150, 5, False),
    ],
)
def test_too_few_files_are_said_at_once(
    soft: int, hard: int, processes: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr("psutil.Process.num_fds", lambda self: 40)
    if fits:
        machine.check_files(processes)
        return
    with pytest.raises(StartError, match=rf"may open {soft}(?s:.*)ulimit -n \d+"):
        machine.check_files(processes)
