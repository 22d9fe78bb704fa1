"""Output from ranks: complete lines, limited in number."""

from __future__ import annotations

import pytest

from distkit.cluster.runs import received as module
from distkit.cluster.runs.received import OutputBuffer


def test_fragments_are_joined_to_lines() -> None:
    buffer = OutputBuffer()
    for fragment in ("a", "b\nc\n\nd", "e\r", "f"):
        buffer.add(1, "stdout", fragment)
    buffer.add(0, "stderr", "10%\r20%\r\n")
    buffer.end()
    assert buffer.pop_lines() == [
        (1, "stdout", "ab"),
        (1, "stdout", "c"),
        (1, "stdout", ""),
        (0, "stderr", "20%"),
        (1, "stdout", "f"),
    ]
    assert buffer.output_of(1) == "ab\nc\n\nde\rf"


def test_kept_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OUTPUT", 10)
    buffer = OutputBuffer()
    for _ in range(5):
        buffer.add(0, "stdout", "1234")
    assert buffer.output_of(0) == "1234123412\n… 10 characters were discarded …\n"
    assert buffer.output_of(1) == ""


def test_notebook_shows_the_first_lines_of_each_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "in_notebook", lambda: True)
    monkeypatch.setattr(module, "MAX_LINES", 2)
    buffer = OutputBuffer()
    for _ in range(3):
        buffer.add(0, "stdout", "a\nb\n")
        buffer.print_now()
    buffer.add(1, "stdout", "x\n")
    buffer.print_now()
    *first, other = capsys.readouterr().out.splitlines()
    assert first == ["[rank 0] a", "[rank 0] b", "[rank 0] … more lines are in run.output[0] …"]
    assert other == "[rank 1] x"
    assert buffer.output_of(0) == "a\nb\n" * 3
