"""What was removed says in one sentence what to do instead."""

from __future__ import annotations

import pytest

import distkit as dk
from distkit import cli


def test_a_removed_command_says_what_to_do_instead(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", "script", "lesson.ipynb", "train"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("distkit: distkit export was removed: ") and "torchrun" in said


def test_a_removed_name_says_what_to_do_instead() -> None:
    with pytest.raises(AttributeError, match=r"measure_modes was removed: .*torch.compile"):
        dk.simulation.measure_modes  # noqa: B018
