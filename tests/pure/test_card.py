"""What a notebook shows while a run goes on, without a notebook."""

from __future__ import annotations

from typing import Any

import IPython.display
import pytest

from distkit.cluster import card
from distkit.cluster.run import Run
from distkit.views import Timeline


class Handle:
    def __init__(self) -> None:
        self.updates: list[Any] = []

    def update(self, shown: Any) -> None:
        self.updates.append(shown)


class SlowRun(Run):
    """A run that outlasts the first look and then finishes."""

    def wait(self, timeout: float | None = None) -> Run:
        if timeout is not None:
            raise TimeoutError
        self._finish()
        return self


def test_a_long_run_keeps_its_picture_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, handle = [], Handle()

    def display(thing: Any, display_id: bool = False) -> Handle:
        shown.append(thing)
        return handle

    monkeypatch.setattr(card, "in_notebook", lambda: True)
    monkeypatch.setattr(IPython.display, "display", display)
    run = SlowRun("train", 1, [], {})
    assert card.follow(run) is run
    (live,) = shown
    assert isinstance(live, Timeline)
    assert handle.updates == [live]  # another widget would leave an empty cell in JupyterLab
    assert live.comm is not None
    assert run._repr_mimebundle_() == {"text/plain": repr(run)}  # not a second time
