"""A folder that keeps the runs of a sweep, so that an interrupted one goes on where it stopped."""

from __future__ import annotations

import json
import os
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import distkit
from distkit.cluster import limits
from distkit.cluster.plan import Plan
from distkit.errors import DistkitError, TraceFileError
from distkit.recording import trouble
from distkit.trace.trace import Trace
from distkit.views.scene.units import count
from distkit_experiments.controls import RANKS, named
from distkit_experiments.fingerprint import fingerprint
from distkit_experiments.results import Record, SavedRun

#: The file of a folder that tells of its runs.
RUNS = "runs.jsonl"


class Folder:
    """Finished runs: a line of JSON for each, and its trace beside it.

    A line counts once its trace is there and the line itself is complete, so that a run that was
    interrupted, however, is made again.

    Args:
        path: of the folder, which is made if it is not there.
        fn: the function that will run.
        plan: of the cluster for a number of ranks.

    Raises:
        DistkitError: the folder cannot be used, or a line in it is damaged.
    """

    def __init__(self, path: Path, fn: Callable[..., Any], plan: Callable[[int], Plan]) -> None:
        self._path, self._file, self._name, self._plan = path, path / RUNS, named(fn), plan
        self._now = {
            "function": fingerprint(fn),
            "trouble": repr(trouble.current()),
            "torch": version("torch"),
            "distkit": distkit.__version__,
            "processors": limits.cpus(),
        }
        try:
            path.mkdir(parents=True, exist_ok=True)
            lines = self._file.read_bytes().splitlines(True) if self._file.exists() else []
            if lines and not lines[-1].endswith(b"\n"):  # it was being written
                os.truncate(self._file, sum(map(len, lines[:-1])))
                lines.pop()
        except OSError as error:
            raise DistkitError(f"sweep(folder={str(path)!r}): {error.strerror}.") from error
        self._lines = [self._read(number, line) for number, line in enumerate(lines, 1)]

    def _read(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            told = json.loads(line.decode())
            kept = {n: {**told[n]} for n in ("by", "measured", "values")}
            key, trace = json.dumps(told["setting"]), self._path / str(told["trace"])
            return {**kept, "name": told["name"], "key": key, "trace": trace}
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise DistkitError(
                f"{self._file}, line {number}: this is not a run of a sweep ({error}). Remove the "
                "line, and its run is made again."
            ) from error

    def find(self, setting: Mapping[str, Any]) -> Record | None:
        """The run that was made with this setting, by this function on this machine."""
        for told in self._like(setting):
            if told["by"] == self._by(setting):
                try:
                    kept = SavedRun(Trace.load(told["trace"]))
                except (TraceFileError, OSError) as error:
                    warnings.warn(f"{error} Its run is made again.", stacklevel=5)
                    continue
                return Record(dict(setting), kept, told["measured"], told["values"])
        return None

    def _like(self, setting: Mapping[str, Any]) -> list[dict[str, Any]]:
        key = json.dumps(_plain_all(setting))
        return [
            told for told in self._lines[::-1] if (told["name"], told["key"]) == (self._name, key)
        ]

    def _by(self, setting: Mapping[str, Any]) -> dict[str, Any]:
        """What a run with this setting is made by."""
        plan = self._plan(setting[RANKS])
        ours = {n: getattr(plan, n) for n in ("backend", "servers", "threads")}
        return {**self._now, "device": " ".join(plan.devices), **ours}

    def tell_outdated(self, settings: Iterable[Mapping[str, Any]]) -> None:
        """Warn of what has changed since runs with these settings were made."""
        changed: dict[str, int] = {}
        for setting in filter(self._like, settings):
            likes, by = self._like(setting), self._by(setting)
            if all(told["by"] != by for told in likes):
                differ = [n for n, now in by.items() if likes[0]["by"].get(n) != now]
                words = " and ".join(self._name if n == "function" else n for n in differ)
                changed[words] = changed.get(words, 0) + 1
        for words, n in changed.items():
            warnings.warn(
                f"{words} changed since {count(n, 'run')} in {self._path} "
                f"{'was' if n == 1 else 'were'} made: made again.",
                stacklevel=4,
            )

    def add(self, record: Record) -> None:
        """Keep a run that has ended well."""
        trace = f"{uuid.uuid4().hex[:12]}.trace"
        line = {
            "name": self._name,
            "setting": _plain_all(record.parameters),
            "by": self._by(record.parameters),
            "measured": record.measured,
            "values": record.values,
            "trace": trace,
        }
        record.run.trace.save(self._path / trace)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _plain_all(setting: Mapping[str, Any]) -> dict[str, Any]:
    """A setting that compares equal in another session."""
    return {name: _plain(name, setting[name]) for name in sorted(setting)}


def _plain(name: str, value: Any) -> Any:
    if callable(value):
        return f"{getattr(value, '__name__', value)} {fingerprint(value)}"
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        raise TypeError(
            f"sweep(folder=…) cannot recognize {name}={value!r} in another session. Give numbers, "
            "text, lists of them or functions, or leave out the folder."
        ) from None
