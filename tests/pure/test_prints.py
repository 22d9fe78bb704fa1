"""Output of ranks: whole lines, limited in number."""

from __future__ import annotations

from distkit.cluster.runs.prints import BURST, LAST, SHARE, OutputLimiter, Prints, Text


def lines(count: int, rank: int = 0) -> list[Text]:
    return [(rank, "stdout", str(number)) for number in range(count)]


def test_fragments_are_joined_to_lines() -> None:
    prints = Prints()
    for piece in ("a", "b\nc\n\nd", "e\r", "f"):
        prints.add(1, "stdout", piece)
    prints.add(0, "stderr", "10%\r20%\r\n")
    prints.end()
    assert [*prints.take()] == [
        (1, "stdout", "ab"),
        (1, "stdout", "c"),
        (1, "stdout", ""),
        (0, "stderr", "20%"),
        (1, "stdout", "f"),
    ]
    assert prints.all_of(1) == "ab\nc\n\nde\rf"


def test_kept_output_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr("distkit.cluster.runs.prints.MAX_KEPT", 10)
    prints = Prints()
    for _ in range(5):
        prints.add(0, "stdout", "1234")
    assert prints.all_of(0) == "1234123412\n… 10 characters were discarded …\n"
    assert prints.all_of(1) == ""


def test_long_output_is_truncated_and_its_end_shown() -> None:
    page = OutputLimiter()
    assert [*page.admit(iter(lines(5_000)), 1.0)] == lines(SHARE)
    assert [*page.admit(iter(lines(7, rank=1)), 1.5)] == lines(7, rank=1)
    note, *last = page.rest()
    left_out = 5_000 - SHARE - LAST
    assert note == (0, "stdout", f"… {left_out:,} lines are not shown: see run.output[0] …")
    assert last == lines(5_000)[-LAST:]
    assert not [*page.rest()]


def test_ranks_share_the_output_limit() -> None:
    page = OutputLimiter()
    shown = [len([*page.admit(iter(lines(5_000, rank)), 1.0)]) for rank in range(4)]
    assert shown == [SHARE, SHARE, BURST - 2 * SHARE, 0]
    long = [(0, "stdout", "x" * 10_000)] * 500
    assert sum(len(line) for _, _, line in OutputLimiter().admit(iter(long), 1.0)) < 100 * SHARE


def test_endless_output_stays_small_and_is_reported() -> None:
    page, shown, silent = OutputLimiter(), 0, 0.0
    heard = 0.0
    for tick in range(36_000):  # an hour
        now = 1 + tick / 10
        if got := [*page.admit(iter(lines(10)), now)]:
            shown, heard = shown + len(got), now
        silent = max(silent, now - heard)
    assert shown < 25_000
    assert silent < 65
