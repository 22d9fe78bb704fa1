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

from distkit.cluster import limits
from distkit.errors import DistkitError, TraceFileError
from distkit.experiments.controls import named
from distkit.experiments.fingerprint import fingerprint
from distkit.experiments.results import Record, SavedRun
from distkit.recording import trouble
from distkit.trace.trace import Trace
from distkit.views.scene.units import count

#: The file of a folder that tells of its runs.
RUNS = "runs.jsonl"


class Folder:
    """Finished runs: a line of JSON for each, and its trace beside it.

    A line counts once its trace is there and the line itself is complete, so that a run that was
    interrupted, however, is made again.

    Args:
        path: of the folder, which is made if it is not there.
        fn: the function that will run.

    Raises:
        DistkitError: the folder cannot be used, or a line in it is damaged.
    """

    def __init__(self, path: Path, fn: Callable[..., Any]) -> None:
        self._path, self._file, self._name = path, path / RUNS, named(fn)
        self._now = {
            "function": fingerprint(fn),
            "trouble": repr(trouble.current()),
            "torch": version("torch"),
            "processors": limits.cpus(),
        }
        try:
            path.mkdir(parents=True, exist_ok=True)
            lines = self._file.read_text("utf-8").splitlines(True) if self._file.exists() else []
        except OSError as error:
            raise DistkitError(f"sweep(folder={str(path)!r}): {error.strerror}.") from error
        whole = [line for line in lines if line.endswith("\n")]  # else it was being written
        if len(whole) < len(lines):
            self._file.write_text("".join(whole), "utf-8")
        self._lines = [self._read(number, line) for number, line in enumerate(whole, 1)]

    def _read(self, number: int, line: str) -> dict[str, Any]:
        try:
            told = json.loads(line)
            key, by = json.dumps(told["setting"]), {**told["by"]}
            kept = self._path / str(told["trace"])
            return {**told, "key": key, "by": by, "trace": kept, "n": {**told["measured"]}}
        except (ValueError, TypeError, LookupError) as error:
            raise DistkitError(
                f"{self._file}, line {number}: this is not a run of a sweep ({error}). Remove the "
                "line, and its run is made again."
            ) from error

    def find(self, setting: Mapping[str, Any]) -> Record | None:
        """The run that was made with this setting, by this function on this machine."""
        for told in self._like(setting):
            if told["by"] == self._now:
                try:
                    kept = SavedRun(Trace.load(told["trace"]))
                except (TraceFileError, OSError) as error:
                    warnings.warn(f"{error} Its run is made again.", stacklevel=5)
                    continue
                return Record(dict(setting), kept, told["measured"], told["values"])
        return None

    def _like(self, setting: Mapping[str, Any]) -> list[dict[str, Any]]:
        key = json.dumps(self._plain(setting))
        return [
            told for told in self._lines[::-1] if (told["name"], told["key"]) == (self._name, key)
        ]

    def tell_outdated(self, settings: Iterable[Mapping[str, Any]]) -> None:
        """Warn of what has changed since runs with these settings were made."""
        changed: dict[str, int] = {}
        for likes in filter(None, map(self._like, settings)):
            if all(told["by"] != self._now for told in likes):
                differ = [n for n, now in self._now.items() if likes[0]["by"].get(n) != now]
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
            "setting": self._plain(record.parameters),
            "by": self._now,
            "measured": record.measured,
            "values": record.values,
            "trace": trace,
        }
        record.run.trace.save(self._path / trace)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _plain(self, setting: Mapping[str, Any]) -> dict[str, Any]:
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
