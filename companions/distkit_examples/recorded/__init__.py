"""Larger recorded runs, written by tools/record; they ship with distkit and open without torch."""

from __future__ import annotations

from pathlib import Path

from distkit.trace.trace import Trace

#: The files of the runs by name.
RECORDED = {file.stem: file for file in sorted(Path(__file__).parent.glob("*.trace"))}


def recorded(name: str) -> Trace:
    """Return the trace of a run that is included in distkit.

    Args:
        name: a key of ``RECORDED``.

    Raises:
        ValueError: The name is unknown.

    >>> trace = recorded("ring_16")
    >>> len(trace.messages), trace.info.name
    (480, 'A ring all-reduce on 16 ranks')
    """
    if name not in RECORDED:
        raise ValueError(f"unknown recorded run {name!r}. Choose from: {', '.join(RECORDED)}.")
    return Trace.load(RECORDED[name])
