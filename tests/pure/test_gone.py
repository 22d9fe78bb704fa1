"""What was removed says in one sentence what to do instead."""

from __future__ import annotations

import pytest

from distkit import cli


def test_a_removed_command_says_what_to_do_instead(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", "script", "lesson.ipynb", "train"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("distkit: distkit export was removed: ") and "torchrun" in said
