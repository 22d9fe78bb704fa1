"""Deaths of servers: every acknowledged push counts exactly once.

The tests run 100 random schedules of :mod:`tests.stress.kvstore.schedules`.
"""

from __future__ import annotations

import pytest

from distkit.kvstore.protocol.server import Entry
from distkit.kvstore.transport.session import Backup, ServerSession
from tests.stress.kvstore.schedules import random_schedule_errors


@pytest.mark.parametrize(
    ("target", "name", "replacement"),
    [
        (Entry, "has_accepted", lambda self, push: False),  # counts repeated requests
        (Backup, "copy", lambda self, request: []),  # loses acknowledged pushes
        (Backup, "hold", lambda self, responses: [*responses]),  # acknowledges before replication
        (Backup, "handle_loss", lambda self: []),  # waits for a backup that has exited
        (ServerSession, "_take_over", lambda self, server: self.stores[server]),
    ],
)
def test_random_schedules_find_injected_bugs(monkeypatch, target, name, replacement) -> None:
    monkeypatch.setattr(target, name, replacement)
    assert any(is_wrong(seed) for seed in range(100))


def is_wrong(seed: int) -> bool:
    """Return whether a schedule violates a rule or raises."""
    try:
        return bool(random_schedule_errors(seed))
    except Exception:
        return True


def test_random_schedules_find_no_violation() -> None:
    assert [seed for seed in range(100) if random_schedule_errors(seed)] == []
