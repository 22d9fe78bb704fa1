"""Roles of forked children: an engine, a plain rank, the controller, or a kvstore node.

Each function is called in a fresh fork of the zygote, with its lifeline first.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import secrets
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from distkit.cluster import machine
from distkit.cluster.processes.channel import Channel

#: How many numbers the controller may use for its sockets; it uses 18.
PORTS = 20


def controller(lifeline: Channel, folder: str, period: int, misses: int) -> None:
    """Run ipyparallel's own IPController, on Unix sockets in the cluster's private folder.

    Not on TCP: it picks free ports before it binds them, and twenty starting at once take
    each other's. Both of its locks are on as well: CURVE keeps strangers out, the HMAC key
    signs every message.

    ``period`` is the heartbeat's in milliseconds: an engine counts only after its first
    beat. ``misses`` is how many beats may fail: large, since a starved laptop is not a dead engine,
    and the deaths of processes are noticed through the fork server at once.
    """
    from ipyparallel.controller.app import IPController

    _end_with(lifeline)
    machine.raise_files()  # it needs more of them than its surroundings may give
    app = IPController.instance(log_level=logging.WARN)
    app.initialize(
        [
            *_places(folder, folder),
            "--IPController.use_threads=True",
            "--IPController.transport=ipc",
            f"--ip={folder}/s",
            f"--IPController.ports=1-{PORTS}",
            "--IPController.enable_curve=True",
            f"--HeartMonitor.period={period}",
            f"--HeartMonitor.max_heartmonitor_misses={misses}",
            "--IPController.db_class=NoDB",
            f"--Session.key={secrets.token_hex(16)}",
        ]
    )
    files = Path(folder, "security").glob("ipcontroller-*.json")
    for n in range(1, PORTS + 1):  # it binds s-1 and tells others s:1
        with suppress(FileExistsError):
            Path(folder, f"s:{n}").symlink_to(f"s-{n}")
    lifeline.send({f.stem.rsplit("-", 1)[1]: json.loads(f.read_text()) for f in files})

    def end_with_monitor(number: int, frame: object) -> None:
        """Without a heart monitor calls still reach ranks, but no new rank registers."""
        if not app.heartmonitor_process.is_alive():
            os._exit(1)

    signal.signal(signal.SIGCHLD, end_with_monitor)  # before start(), which forks the monitor
    app.start()


def _places(profile: str, folder: str) -> list[str]:
    """The folders for ipyparallel: not the user's home, which may be full or read-only."""
    return [f"--ProfileDir.location={profile}", f"--BaseIPythonApplication.ipython_dir={folder}"]


def engine(
    lifeline: Channel, spec: Any, connection: dict[str, Any], profile: str, folder: str
) -> None:
    """Be a rank that runs cells, and an ipyparallel engine: real IPEngine, real kernel.

    ``profile`` is ipyparallel's profile folder, ``folder`` the cluster's own.
    """
    from ipykernel.iostream import OutStream
    from ipyparallel.engine.app import IPEngine

    from distkit.cluster.rank.rank import Rank

    class PythonOutput(OutStream):
        """Streams what Python prints; what C++ prints stays in the log, for crash reports."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, watchfd=False, **kwargs)  # type: ignore[no-untyped-call]

    rank = Rank(spec, lifeline, runs_cells=True)
    rank.start()
    rank.group.join()
    app = IPEngine.instance(
        enable_nanny=False,
        id=spec.rank,
        work_dir=str(Path.cwd()),  # or it is where ipyparallel was imported
        user_ns=rank.namespace,
        connection_info_env=json.dumps(connection),
        log_level=logging.ERROR,
        out_stream_factory=PythonOutput,
    )
    app.initialize(_places(profile, folder))
    sys.path[:] = spec.path  # from here on imports are the user's
    app.start()


def execute(payload: bytes, options: dict[str, Any]) -> None:
    """Run one cell on this engine's rank; called through ipyparallel.

    How it went is told down the rank's lifeline, as are its events and prints.
    """
    from distkit.cluster.rank.rank import Rank

    Rank.here.execute(payload, options)


def plain(lifeline: Channel, spec: Any, folder: str) -> None:
    """Be a rank of one run: run its function, and wait to be ended."""
    from distkit.cluster.rank.rank import Rank

    payload, options = pickle.loads(lifeline.recv())
    rank = Rank(spec, lifeline)
    rank.start()
    sys.path[:] = spec.path  # from here on imports are the user's
    rank.execute(payload, options)
    threading.Event().wait()  # to end now would break the connections of ranks still at work


def _end_with(lifeline: Channel, hear: Callable[[Any], None] = lambda word: None) -> None:
    """Hear what comes down the lifeline; end this process and its children when it breaks."""
    lifeline.listen(hear, partial(os.killpg, 0, signal.SIGKILL))


def node(lifeline: Channel, node: Any, folder: str, recording: bool) -> None:
    """Be a server or the scheduler of a parameter server, for one run."""
    from distkit import kvstore
    from distkit.recording import recorder

    mine = recorder.Recorder(node.id)
    recorder.set_current(mine if recording else None)
    flusher = recorder.Flusher(mine, lambda kind, what: lifeline.send((kind, what)))

    service = kvstore.Service(node)

    def obey(word: str | tuple[Any, ...]) -> None:
        if isinstance(word, tuple):  # a worker has ended
            service.leave(*word[1:])
            return
        flusher.flush()
        if word == "rest":  # the run is being ended, and the consequences are not recorded
            service.resting = True
            recorder.set_current(None)
        lifeline.send(("flushed", word))

    _end_with(lifeline, obey)
    service.report = lambda what, which: lifeline.send((what, which))
    service.run()
