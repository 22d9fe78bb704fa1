"""The cockpit: a program, where each rank is in it, and the buttons that let them go on.

The projection is in projection.py, the browser's painter in js/, the static picture's marks in
scene.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import traitlets

from distkit.errors import DistkitError
from distkit.views.cockpit.projection import Stepping
from distkit.views.cockpit.scene import to_svg, to_table
from distkit.views.scene.frame import Json
from distkit.views.timeline.static import MAX_BARS
from distkit.views.timeline.view import Timeline
from distkit.views.widget.assets import css, esm
from distkit.views.widget.live import Notifier, Steppable, Worker

#: What the browser may call of a run, and with what of the message.
BUTTONS = {
    "next": ("rank",),
    "seek": ("position",),
    "play": ("speed",),
    "back": (),
    "pause": (),
    "finish": (),
}


def _snapshot(_: object, cockpit: Cockpit) -> Json:
    return cockpit._steps()


class Cockpit(Timeline):
    """Steps through a distributed program: its source with a marker per rank, and the buttons.

    Each rank has a card with what it waits for and the values of its tensors; the timeline
    of what was said so far lies underneath. Closing it leaves the run as it is.

    Args:
        source: a run that goes on step by step, such as ``cluster.step(fn)``.
    """

    _esm = esm("cockpit")
    _css = css("cockpit")
    _unwatch: Callable[[], None] | None = None
    #: Made when the browser asks, so that a page opened late gets everything so far.
    steps = traitlets.Any().tag(sync=True, to_json=_snapshot)

    def __init__(self, source: Steppable) -> None:
        self._source, self._trouble, self._stepped, self._seen = source, "", 0, 0
        self._stepping = Stepping()
        self._stepping.changes(source, trouble="")
        self._moves, self._looks = Worker(), Worker()  # one may look around while ranks move
        self._stays = False  # the picture in the notebook is that of the end
        self._notifier = Notifier(self._refresh)
        super().__init__(source)
        self.on_msg(self._hear)
        self._unwatch = source.watch(self._notifier.notify)
        self._notifier.notify()

    # -- to the browser -----------------------------------------------------------

    def _refresh(self) -> None:
        """Tell what changed, and what was said until then, in one message."""
        with self._lock:
            changes = self._stepping.changes(self._source, trouble=self._trouble)
            events = self._source.trace.events if "moments" in changes else ()
            patch = self._bars.take(events[self._seen :])
            self._seen = max(self._seen, len(events))
            if changes:
                more = {f"step{self._stepped}": changes}
                self._stepped += 1
                self._publish(patch, **more)
        if self._source.finished and (changes or not self._stays):
            self._stays = True
            self._still.renew()

    def _steps(self) -> Json:
        with self._lock:
            return {**self._stepping.snapshot(), "next": self._stepped}

    # -- from the browser ---------------------------------------------------------

    def _hear(self, _: Any, content: Json, __: Any) -> None:
        """Have a command obeyed by a thread: the kernel's own must not wait for ranks."""
        self.send({"heard": content.get("id")})
        if content.get("do") == "hello":  # is anybody there?
            return
        lane = self._looks if content.get("do") in ("back", "seek", "pause") else self._moves
        lane.do(partial(self._obey, content))

    def _obey(self, command: Json) -> None:
        try:
            self._do(command)
            self._trouble = ""
        except DistkitError as error:
            said = str(error)
            self._trouble = "" if said == self._source.error else said  # that is told anyway
        except Exception as error:  # a mistake of ours: say so rather than nothing
            self._trouble = f"{type(error).__name__}: {error}"
        self._notifier.notify()
        self.send({"did": command.get("id")})

    def _do(self, command: Json) -> None:
        button = command.get("do")
        if button not in BUTTONS:
            raise ValueError(f"the cockpit has no button {button!r}")
        getattr(self._source, button)(*map(command.get, BUTTONS[button]))

    def close(self) -> None:
        """Take the widget off the page; the run stays as it is."""
        unwatch, self._unwatch = self._unwatch, None
        if unwatch is not None:
            unwatch()
            for thread in (self._moves, self._looks, self._notifier):
                thread.close()
        super().close()

    # -- elsewhere ------------------------------------------------------------------

    def __repr__(self) -> str:
        return to_table(self._steps(), self._bars.columns.picture(3 * MAX_BARS))

    def _svg(self) -> str:
        return to_svg(self._steps(), self._bars.columns.picture(3 * MAX_BARS))
