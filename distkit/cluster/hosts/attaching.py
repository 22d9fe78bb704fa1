"""Agents in the engines of an ipyparallel cluster that somebody else has started."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from distkit.cluster.hosts.launching import Launch
from distkit.errors import StartError

#: An engine answers within this time [s], unless it is busy.
_ANSWER = 30.0


class InEngines(Launch):
    """An agent of each engine.

    Args:
        client: an ``ipyparallel.Client``.
    """

    def __init__(self, client: Any, where: dict[str, Any], fail: Callable[[str], None]) -> None:
        super().__init__(where, fail)
        self._client = client

    def start(self) -> None:
        """Begin; returns at once."""
        threading.Thread(target=self._begin, daemon=True).start()

    def _begin(self) -> None:
        from ipyparallel import TimeoutError as NoAnswer

        asked = {n: self._client[n].apply_async(_begin, self.where, n) for n in self._client.ids}
        for engine, answer in asked.items():
            try:
                if said := answer.get(timeout=_ANSWER):
                    self.fail(f"engine {engine}: {said}")
            except NoAnswer:
                self.fail(f"engine {engine} does not answer within {_ANSWER:.0f} s. Is it busy?")
            except Exception as error:
                self.fail(f"engine {engine} could not begin: {type(error).__name__}: {error}")


def connect(name: str) -> Any:
    """A client of somebody's cluster, by the name of its profile or its cluster id.

    Raises:
        StartError: there is none, or it has no engines.
    """
    import ipyparallel

    said = ""
    for way in ({"profile": name}, {"cluster_id": name}):
        try:
            client = ipyparallel.Client(**way, timeout=10)
        except Exception as error:
            said += f"\n    {way}: {error}"
            continue
        if client.ids:
            return client
        said += f"\n    {way}: it has no engines"
    raise StartError(
        f"there is no ipyparallel cluster {name!r} to attach to: {said}\nStart one with ipcluster "
        "start, or give a client: dk.Cluster.attach(ipyparallel.Client(…))."
    )


def _begin(where: dict[str, Any], order: int) -> str:
    """In an engine: start an agent that ends with it; what is wrong, or ""."""
    import importlib.util
    import json
    import os
    import platform
    import subprocess
    import sys
    import threading

    if importlib.util.find_spec("distkit") is None:
        return (
            f"there is no distkit on {platform.node()}. Install it there: {sys.executable} -m pip "
            "install distkit"
        )
    about = json.dumps({**where, "order": order, "parent": os.getpid()})
    process = subprocess.Popen(
        [sys.executable, "-m", "distkit.cluster.hosts.agent"],
        env={**os.environ, "DISTKIT_AGENT": about},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    threading.Thread(target=process.wait, daemon=True).start()  # or it stays as a zombie
    return ""


_begin.__module__ = "__main__"  # or engines would import this module, which may be missing there
