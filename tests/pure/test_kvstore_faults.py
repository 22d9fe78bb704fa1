"""Servers that end: every acknowledged push counts exactly once.

A sample of :mod:`tests.stress.kvstore.schedules`: 100 of its random schedules.
"""

from __future__ import annotations

import pytest

from distkit.kvstore.protocol.server import Entry
from distkit.kvstore.transport.session import Backup, ServerSession
from tests.stress.kvstore.schedules import random_schedule_errors


@pytest.mark.parametrize(
    ("broken", "name", "instead"),
    [
        (Entry, "has_accepted", lambda self, push: False),  # counts what comes again
        (Backup, "copy", lambda self, request: []),  # loses what it acknowledged
        (Backup, "hold", lambda self, answers: list(answers)),  # acknowledges what may be lost
        (Backup, "lost", lambda self: []),  # waits for a backup that has ended
        (ServerSession, "_take_over", lambda self, server: self.stores[server]),
    ],
)
def test_schedules_at_random_find_what_is_broken(monkeypatch, broken, name, instead) -> None:
    monkeypatch.setattr(broken, name, instead)
    assert any(is_wrong(seed) for seed in range(100))


def is_wrong(seed: int) -> bool:
    """Whether a schedule shows that something is broken: by its rules, or by an exception."""
    try:
        return bool(random_schedule_errors(seed))
    except Exception:
        return True


def test_schedules_at_random_find_nothing() -> None:
    assert [seed for seed in range(100) if random_schedule_errors(seed)] == []
