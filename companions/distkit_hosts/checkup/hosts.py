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
from typing import Any

from distkit.cluster import machine
from distkit_hosts.checkup import probe
from distkit_hosts.checkup.facts import Json

#: ssh gives up after this long; the first answer takes at most this long [s].
CONNECT, FIRST = 5, 10.0

#: Any other answer takes at most this long [s].
PATIENCE = 3 * probe.PATIENCE

#: A machine's GPUs are found by two calls of nvidia-smi; all facts about it take at most this [s].
EXAMINE = 2 * machine.SMI_TIMEOUT + PATIENCE

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
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._said = ""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C is not meant for it
        )
        assert self._process.stdin and self._process.stdout
        self._to, self._from = self._process.stdin, self._process.stdout
        self._thread = threading.Thread(target=self._hear, daemon=True)
        self._thread.start()
        self._say(SOURCE)

    def ask(self, do: str, patience: float, **given: Any) -> Any:
        """Ask, and wait this many seconds for the answer.

        Raises:
            Lost: there is none.
        """
        self._say(json.dumps({"do": do, **given}) + "\n")
        try:
            text = self._answers.get(timeout=patience)
        except queue.Empty:
            raise Lost(f"no answer within {patience:g} s") from None
        if text is None:
            code = self._process.wait()
            raise Lost(self._said.rstrip(".") or f"it ended with exit status {code}")
        answer = json.loads(text)
        if "error" in answer:
            raise Lost(answer["error"])
        return answer["answer"]

    def _say(self, text: str) -> None:
        with suppress(OSError):  # it has ended: that is told when it is asked
            self._to.write(text)
            self._to.flush()

    def _hear(self) -> None:
        for line in self._from:
            if line.startswith(probe.MARK):
                self._answers.put(line[len(probe.MARK) :])
            elif not line.startswith("Warning: "):
                self._said = line.strip() or self._said
        self._answers.put(None)

    def close(self) -> None:
        """End the probe."""
        self._process.kill()
        self._process.wait()
        self._thread.join(1)
        self._from.close()
        with suppress(OSError):  # it has not read all
            self._to.close()


class Hosts:
    """Several machines that are asked at once; those that do not answer are left out from then on.

    Args:
        commands: what starts the probe of each, by label.
        lost: called with each that is left out: its label, and the words.
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
        given: Callable[[str], Json] = lambda label: {},
        patience: float = PATIENCE,
    ) -> dict[str, Any]:
        """Ask all, with what is given for each; the answers, by label."""
        return self.each(lambda host: host.ask(do, patience, **given(host.label)))

    def each(self, work: Callable[[Host], Any]) -> dict[str, Any]:
        """Work with all; the results, by label."""
        results: dict[str, Any] = {}

        def one(host: Host) -> None:
            try:
                results[host.label] = work(host)
            except Lost as error:
                del self.alive[host.label]
                self._lost(host.label, str(error))

        list(self._pool.map(one, list(self.alive.values())))
        return {label: results[label] for label in self.alive}


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
