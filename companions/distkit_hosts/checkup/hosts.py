"""Probes on several machines, and questions to all of them at once."""

from __future__ import annotations

import json
import os
import queue
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from distkit.cluster import machine
from distkit_hosts.checkup import probe
from distkit_hosts.checkup.facts import Json

#: ssh itself gives up after so long [s]; a host's first answer may take so long.
CONNECT, FIRST = 5, 10.0

#: Any other answer may take so long, beyond what the question itself takes [s].
PATIENCE = 3 * probe.PATIENCE

#: What is sent to every machine.
SOURCE = "\f".join(Path(str(m.__file__)).read_text("utf-8") for m in (machine, probe))


class Lost(Exception):
    """A host that does not answer; the words are ssh's, or the probe's."""


class Host:
    """The probe on one machine.

    Args:
        label: what the host is called in findings.
        command: what starts the probe: it reads requests from its input.
    """

    def __init__(self, label: str, command: Sequence[str]) -> None:
        self.label = label
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._said: list[str] = []
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C is not meant for it
        )
        self._threads = [threading.Thread(target=t, daemon=True) for t in (self._hear, self._warn)]
        for thread in self._threads:
            thread.start()
        self._say(SOURCE)

    def ask(self, do: str, patience: float, **given: Any) -> Any:
        """Ask, and wait so many seconds for the answer.

        Raises:
            Lost: there is none.
        """
        self._say(json.dumps({"do": do, **given}) + "\n")
        try:
            text = self._lines.get(timeout=patience)
        except queue.Empty:
            raise Lost(f"no answer within {patience:g} s") from None
        if text is None:
            raise Lost(self._why())
        answer = json.loads(text)
        if "error" in answer:
            raise Lost(answer["error"])
        return answer["answer"]

    def _say(self, text: str) -> None:
        with suppress(OSError):  # it has ended: that is told when it is asked
            self._stream("stdin").write(text)
            self._stream("stdin").flush()

    def _hear(self) -> None:
        for line in self._stream("stdout"):
            if line.startswith(probe.MARK):
                self._lines.put(line[len(probe.MARK) :])
        self._lines.put(None)

    def _warn(self) -> None:
        self._said += [line.strip() for line in self._stream("stderr") if line.strip()]

    def _why(self) -> str:
        code = self._process.wait()
        self._threads[1].join(1)
        last = [line for line in self._said if not line.startswith("Warning: ")][-1:]
        return last[0].rstrip(".") if last else f"it ended with exit status {code}"

    def close(self) -> None:
        """End the probe."""
        with suppress(OSError):
            self._stream("stdin").close()
        try:
            self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(1)
        for name in ("stdout", "stderr"):
            self._stream(name).close()

    def _stream(self, name: str) -> IO[str]:
        stream: IO[str] = getattr(self._process, name)
        return stream


class Hosts:
    """Several machines that are asked at once; those that do not answer are left out from then on.

    Args:
        commands: what starts the probe of each, by label.
        lost: told of each that is left out: its label, and the words.
    """

    def __init__(self, commands: dict[str, list[str]], lost: Callable[[str, str], None]) -> None:
        self._lost, self._pool = lost, ThreadPoolExecutor(len(commands))
        self._all = [Host(label, command) for label, command in commands.items()]
        self.alive = {host.label: host for host in self._all}

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        list(self._pool.map(Host.close, self._all))
        self._pool.shutdown()

    def ask(
        self,
        do: str,
        given: Callable[[str], Json | None] = lambda label: {},
        patience: float = PATIENCE,
    ) -> dict[str, Any]:
        """Ask those for which something is given; the answers, by label."""
        return self.each(lambda host, what: host.ask(do, patience, **what), given)

    def each(
        self,
        work: Callable[[Host, Json], Any],
        given: Callable[[str], Json | None] = lambda label: {},
    ) -> dict[str, Any]:
        """Work with those for which something is given; the results, by label."""
        results: dict[str, Any] = {}

        def one(host: Host, what: Json) -> None:
            try:
                results[host.label] = work(host, what)
            except Lost as error:
                del self.alive[host.label]
                self._lost(host.label, str(error))

        asked = [(host, given(host.label)) for host in self.alive.values()]
        todo = [(host, what) for host, what in asked if what is not None]
        list(self._pool.map(lambda pair: one(*pair), todo))
        return {label: results[label] for label in self.alive if label in results}


def command(destination: str, ssh: Sequence[str], pythons: Sequence[str]) -> list[str]:
    """What starts a probe on another machine, with the first of these Pythons that is there.

    >>> command("me@alpha", ["ssh"], ["python3"])[:2]
    ['ssh', 'me@alpha']
    """
    names = " ".join(map(shlex.quote, pythons))
    start = f'exec "$p" -uc {shlex.quote(probe.START)} {len(SOURCE)}'
    script = (
        f'for p in {names}; do command -v "$p" >/dev/null 2>&1 && {start}; done; '
        f'echo "no Python: {names}" >&2; exit 127'
    )
    return [*ssh, destination, f"exec sh -c {shlex.quote(script)}"]


def own_command() -> list[str]:
    """What starts a probe here, where it finds what this process finds."""
    path = os.pathsep.join(filter(None, sys.path))
    return ["env", f"PYTHONPATH={path}", sys.executable, "-uc", probe.START, str(len(SOURCE))]
