"""What the forked children do: be an engine, a plain rank, the controller, or a kvstore node.

Each function is called in a fresh fork of the zygote, with its lifeline first.
"""

from __future__ import annotations

import io
import json
import logging
import os
import queue
import secrets
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from distkit.cluster.channel import Channel

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
    app = IPController.instance(log_level=logging.WARN)
    app.initialize([
        f"--ProfileDir.location={folder}", "--IPController.use_threads=True",
        "--IPController.transport=ipc", f"--ip={folder}/s", f"--IPController.ports=1-{PORTS}",
        "--IPController.enable_curve=True", f"--HeartMonitor.period={period}",
        f"--HeartMonitor.max_heartmonitor_misses={misses}", "--IPController.db_class=NoDB",
        f"--Session.key={secrets.token_hex(16)}",
    ])  # fmt: skip
    files = Path(folder, "security").glob("ipcontroller-*.json")
    for n in range(1, PORTS + 1):  # it binds s-1 and tells others s:1
        with suppress(FileExistsError):
            Path(folder, f"s:{n}").symlink_to(f"s-{n}")
    lifeline.send({f.stem.rsplit("-", 1)[1]: json.loads(f.read_text()) for f in files})
    app.start()


def engine(lifeline: Channel, spec: Any, connection: dict[str, Any], ident: str,
           generation: int | None, profile: str, folder: str) -> None:  # fmt: skip
    """Be a rank, and an ipyparallel engine: real IPEngine, real kernel.

    ``generation`` is the group to join before registering, None to wait for the first run;
    ``profile`` is ipyparallel's profile folder, ``folder`` the cluster's own.
    """
    import torch
    import torch.distributed as dist
    from ipykernel.iostream import OutStream
    from ipyparallel.engine.app import IPEngine

    from distkit.cluster.rank import Rank

    class PythonOutput(OutStream):
        """Streams what Python prints; what C++ prints stays in the log, for crash reports."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, watchfd=False, **kwargs)  # type: ignore[no-untyped-call]

    rank = Rank(spec, lifeline)
    rank.start()
    if generation is not None:
        rank.group.join(generation)
    namespace = {"torch": torch, "dist": dist, "rank": spec.rank, "world_size": spec.world_size}
    app = IPEngine.instance(
        enable_nanny=False, id=spec.rank, ident=ident, user_ns=namespace,
        connection_info_env=json.dumps(connection), log_level=logging.ERROR,
        out_stream_factory=PythonOutput,
    )  # fmt: skip
    app.initialize([f"--ProfileDir.location={profile}"])
    app.start()


def execute(payload: bytes, options: dict[str, Any]) -> dict[str, Any]:
    """Run one function on this engine's rank; called through ipyparallel."""
    from ipyparallel.engine.datapub import publish_data

    from distkit.cluster.rank import Rank

    def emit(kind: str, what: Any) -> None:
        publish_data({kind: what})

    return Rank.here.execute(payload, options, emit)


def plain(lifeline: Channel, spec: Any, folder: str) -> None:
    """Be a rank without ipyparallel: run one function, send back how it went, and end."""
    from distkit.cluster.rank import Rank

    payload, options = lifeline.recv()
    rank = Rank(spec, lifeline)
    rank.start()
    out = _Outbox(lifeline)
    sys.stdout, sys.stderr = _Stream(out, "stdout"), _Stream(out, "stderr")
    outcome = rank.execute(payload, options, out.emit)
    sys.stdout.flush()
    sys.stderr.flush()
    out.emit("outcome", outcome)
    threading.Event().wait()  # to end now would break the connections of ranks still at work


class _Outbox:
    """Sends down the lifeline from a thread of its own, where no signal breaks a message in two."""

    def __init__(self, lifeline: Channel) -> None:
        self._lifeline = lifeline
        self._waiting: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._send, name="distkit-outbox", daemon=True).start()

    def emit(self, kind: str, what: Any) -> None:
        """Have it sent, after what came before."""
        self._waiting.put((kind, what))

    def _send(self) -> None:
        with suppress(OSError):  # the starter is gone, and so will be this process
            while True:
                self._lifeline.send(self._waiting.get())


class _Stream(io.TextIOBase):
    """Standard output that goes down the lifeline, a line at a time."""

    def __init__(self, out: _Outbox, name: str) -> None:
        self._out, self._name, self._text = out, name, ""
        self._lock = threading.RLock()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            self._text += text
            if "\n" in text:
                self.flush()
        return len(text)

    def flush(self) -> None:
        with self._lock:
            text, self._text = self._text, ""
            if text:
                self._out.emit("text", (self._name, text))


def _end_with(lifeline: Channel, hear: Callable[[Any], None] = lambda word: None) -> None:
    """Hear what comes down the lifeline; end this process and its children when it breaks."""

    def watch() -> None:
        try:
            while True:
                hear(lifeline.recv())
        except EOFError:
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="distkit-lifeline", daemon=True).start()


def node(lifeline: Channel, node: Any, folder: str) -> None:
    """Be a server or the scheduler of a parameter server; serves run after run."""
    from distkit import kvstore
    from distkit.trace import recorder

    mine = recorder.Recorder(node.id)
    recorder.set_current(mine)
    flusher = recorder.Flusher(mine, lambda *rows: lifeline.send(("rows", rows)))

    def flush(run: int) -> None:
        flusher.flush()
        lifeline.send(("flushed", run))

    _end_with(lifeline, flush)
    kvstore.serve(node).run()
