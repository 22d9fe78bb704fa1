"""Defines the roles of forked children: engine, plain rank, controller, and kvstore node.

A role's function is called in a new fork of the fork server; its first argument is the lifeline.
The fork server calls :func:`preload` before it forks ranks, so all ranks share its modules and
hooks.
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
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from distkit.cluster.processes.channel import Channel

#: The modules that ranks import, and those that engines and their controller import. None of
#: them may start a thread or open a socket when it is imported.
_RANK_MODULES = ("numpy.random", "torch.nn.parallel", "distkit.cluster.rank.rank")
_ENGINE_MODULES = (
    "ipykernel.debugger",
    "ipyparallel.controller.app",
    "ipyparallel.engine.app",
    "IPython.core.completerlib",
    "IPython.extensions.storemagic",
    "tornado.platform.asyncio",
)

#: Number of "ports" (Unix sockets) available to the controller, which uses 18.
PORTS = 20


@cache
def preload() -> None:
    """Import the modules that ranks need, and hook torch; forked ranks inherit both."""
    for name in _RANK_MODULES:
        import_module(name)
    from distkit.recording.tap import tap

    tap.install()


@cache
def preload_engines() -> None:
    """Import the modules that engines and their controller need, before any is forked."""
    # no debugger is attached to an engine: debugpy would cost each engine 0.1 s and 15 MB
    sys.modules["debugpy"] = None  # type: ignore[assignment]
    for name in _ENGINE_MODULES:
        import_module(name)
    del sys.modules["debugpy"]


def controller(lifeline: Channel, folder: str, period: int, misses: int) -> None:
    """Run ipyparallel's IPController on Unix sockets in the cluster's private folder.

    TCP is not used, because the controller picks free ports some time before it binds them, so
    concurrent starts may collide. CURVE authenticates the connections, and every message is signed
    with an HMAC key.

    ``period`` is the heartbeat period [ms]. It should be short, because an engine is registered
    only after its first heartbeat. ``misses`` is the number of heartbeats that an engine may miss.
    """
    from ipyparallel.controller.app import IPController

    _exit_with(lifeline)
    app = IPController.instance(log_level=logging.WARN)
    app.initialize(
        [
            *_folder_options(folder, folder),
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
    for n in range(1, PORTS + 1):  # the controller binds s-1, but announces s:1
        with suppress(FileExistsError):
            Path(folder, f"s:{n}").symlink_to(f"s-{n}")
    lifeline.send({f.stem.rsplit("-", 1)[1]: json.loads(f.read_text()) for f in files})
    app.start()


def _folder_options(profile: str, folder: str) -> list[str]:
    """Return the options that keep ipyparallel files out of the user's home.

    The home may be full or read-only.
    """
    return [f"--ProfileDir.location={profile}", f"--BaseIPythonApplication.ipython_dir={folder}"]


def engine(
    lifeline: Channel, spec: Any, connection: dict[str, Any], profile: str, folder: str
) -> None:
    """Run a rank that executes cells: an ipyparallel engine (IPEngine with an IPython kernel).

    ``profile`` is the ipyparallel profile folder, ``folder`` the cluster's folder.
    """
    from ipykernel.iostream import OutStream
    from ipyparallel.engine.app import IPEngine

    from distkit.cluster.rank.rank import Rank

    class PythonOutput(OutStream):
        """Stream of Python's output, without descriptors 1 and 2, which are already redirected."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, watchfd=False, **kwargs)  # type: ignore[no-untyped-call]

    rank = Rank(spec, lifeline, runs_cells=True)
    rank.start()
    _exit_with(lifeline, rank.handle_command)
    rank.group.join()
    app = IPEngine.instance(
        enable_nanny=False,
        id=spec.rank,
        work_dir=str(Path.cwd()),  # the default is the folder in which ipyparallel was imported
        user_ns=rank.namespace,
        connection_info_env=json.dumps(connection),
        log_level=logging.ERROR,
        out_stream_factory=PythonOutput,
    )
    app.initialize(_folder_options(profile, folder))
    sys.path[:] = spec.path  # from now on, imports use the user's path
    app.start()


def execute(payload: bytes, options: dict[str, Any]) -> None:
    """Run one cell on this engine's rank; called through ipyparallel.

    The outcome, events and output are sent over the rank's lifeline.
    """
    from distkit.cluster.rank.rank import Rank

    Rank.current.execute(payload, options)


def plain_rank(lifeline: Channel, spec: Any, folder: str) -> None:
    """Run the function of one run as a rank, then wait to be killed."""
    from distkit.cluster.rank.rank import Rank

    rank = Rank(spec, lifeline)
    rank.start()  # while other ranks are still being forked
    payload, options = pickle.loads(lifeline.recv())
    _exit_with(lifeline, rank.handle_command)
    sys.path[:] = spec.path  # from now on, imports use the user's path
    rank.execute(payload, options)
    threading.Event().wait()  # exiting now would break the connections of other ranks


def _exit_with(lifeline: Channel, on_message: Callable[[Any], None] = lambda message: None) -> None:
    """Handle the lifeline's messages; when it closes, kill this process and its children."""
    lifeline.listen(on_message, partial(os.killpg, 0, signal.SIGKILL))


def node(lifeline: Channel, node: Any, folder: str, recording: bool) -> None:
    """Run a server or the scheduler of a parameter server, for one run."""
    from distkit import kvstore
    from distkit.recording import recorder

    node_recorder = recorder.Recorder(node.id)
    recorder.set_current(node_recorder if recording else None)
    flusher = recorder.Flusher(node_recorder, lambda kind, data: lifeline.send((kind, data)))

    service = kvstore.Service(node)

    def handle_command(command: str | tuple[Any, ...]) -> None:
        if isinstance(command, tuple):  # a node has exited
            service.handle_departure(*command[1:])
            return
        flusher.flush()
        if command == "quiesce":  # the run is ending: do not record what follows
            service.quiesced = True
            recorder.set_current(None)
        lifeline.send(("flushed", command))

    _exit_with(lifeline, handle_command)
    service.report = lambda kind, data: lifeline.send((kind, data))
    service.run()
