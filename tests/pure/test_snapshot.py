"""The static picture of a widget is the last one drawn."""

from __future__ import annotations

import threading
from typing import Any

from distkit.views.widget.snapshot import NotebookSnapshot


class Handle:
    """A fake display handle."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def update(self, bundle: dict[str, str], raw: bool) -> None:
        self.sent.append(bundle["text/plain"])


def test_slow_drawing_does_not_replace_a_newer_one() -> None:
    state, drawing, finish = ["old"], threading.Event(), threading.Event()

    def draw() -> tuple[str, str]:
        now = state[0]
        if now == "old":
            drawing.set()
            finish.wait(10)
        return "<svg/>", now

    snapshot = NotebookSnapshot(draw)
    handle: Any = Handle()
    snapshot._handle = handle
    slow = threading.Thread(target=snapshot.refresh)
    slow.start()
    assert drawing.wait(10)
    state[0] = "new"
    quick = threading.Thread(target=snapshot.refresh)
    quick.start()
    quick.join(0.1)  # it may or may not have finished
    finish.set()
    slow.join(10)
    quick.join(10)
    assert handle.sent == ["old", "new"]
