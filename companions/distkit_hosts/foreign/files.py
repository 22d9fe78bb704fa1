"""Read files of other programs: flight-recorder dumps, profiler traces and pipeline steps.

The content of a file determines its kind, not its name. Nothing in it is executed. Pickled dumps
are read by an unpickler that accepts only plain values: numbers, strings, booleans, None, and
lists, tuples and dicts of them. The result is checked like a saved trace, so it can be saved again.
"""

from __future__ import annotations

import errno
import io
import json
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from msgspec import structs

from distkit.errors import TraceFileError
from distkit.events import Event
from distkit.trace import file
from distkit.trace.file import unpacked
from distkit.trace.info import MAX_RANKS, RankInfo, RunInfo
from distkit.trace.log import Log
from distkit_hosts.foreign import flight_recorder, kineto, pipeline_steps

Json = dict[str, Any]

#: First byte of a pickle of protocol 2 or later.
_PICKLE = b"\x80"
#: First bytes of files that must be unpacked first.
_PACKED = {
    b"PK\x03\x04": "a zip archive",
    b"\x28\xb5\x2f\xfd": "packed by zstd",
    b"\xfd7zXZ": "packed by xz",
    b"BZh": "packed by bzip2",
}
#: Names of events in which torch has not escaped quotes (pytorch#146900).
_NAME = re.compile(r'(?<="name": ").*?(?=",\s*"(?:ph|pid|cat|ts)":)')
#: Suffixes without a digit, which follow the rank's number.
_SUFFIXES = re.compile(r"(\.[a-zA-Z_]+)+$")
_RANK = re.compile(r"rank[ _.=-]?(\d+)", re.IGNORECASE)
_KINDS = flight_recorder, pipeline_steps, kineto
_KNOWN = (
    "distkit reads its own traces (trace.save), PyTorch's flight-recorder dumps (JSON or pickle), "
    "traces of torch.profiler, and recorded steps of pipelines."
)


class PlainUnpickler(pickle.Unpickler):
    """Reads only plain values, and rejects everything that would be imported or executed.

    >>> PlainUnpickler(io.BytesIO(pickle.dumps({"a": [1, (2.5, None)]}))).load()
    {'a': [1, (2.5, None)]}
    >>> PlainUnpickler(io.BytesIO(pickle.dumps(print))).load()
    Traceback (most recent call last):
    _pickle.UnpicklingError: it contains builtins.print, which is not a plain value
    """

    def find_class(self, module: str, name: str) -> NoReturn:  # noqa: D102
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which is not a plain value")


def load(paths: Sequence[Path], kind: type[Log]) -> Log:
    """Read the dumps or traces of the ranks of one run, one file per rank.

    Args:
        paths: files, or one folder of them. The rank is read from the content of a file, or else
            from its name: the number after the word rank, or the last number.
        kind: the class of the result.

    Raises:
        TraceFileError: a file is damaged or of another kind, two are of the same rank, or they have
            no events.
        FileNotFoundError: a file does not exist.
        IsADirectoryError: a folder has no files.
    """
    files = [file for path in paths for file in (_inside(path) if path.is_dir() else [path])]
    read = {file: _parsed(file) for file in files}
    reader = _reader(read)
    events, info = checked(files, lambda: _read(read, reader))
    if not events:
        raise TraceFileError(
            f"{_names(files)}: nothing to show was found in "
            f"{reader.contents(read.values())}. Looked for {reader.LOOKED_FOR}."
        )
    trace: Log = checked(files, lambda: file.checked(kind(events, info)))
    return trace


def _inside(folder: Path) -> list[Path]:
    found = sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    if not found:
        empty = "the folder is empty: it should have a file for each rank"
        raise IsADirectoryError(errno.EISDIR, empty, str(folder))
    return found


def _parsed(path: Path) -> Any:
    """Return the content of a file as JSON's values."""
    content = unpacked(path)
    for beginning, what in _PACKED.items():
        if content.startswith(beginning):
            raise TraceFileError(f"{path} is {what}. Unpack it first, or use gzip.")
    if not content.strip():
        raise TraceFileError(f"{path}: the file is empty. {_KNOWN}")
    if file.is_ours(path):
        raise TraceFileError(
            f"{path} is a distkit trace of all ranks. Load only this file: dk.Trace.load(FILE)."
        )
    found = checked([path], partial(_plain, content))
    return {"traceEvents": found} if isinstance(found, list) else found  # Chrome's other form


def _plain(content: bytes) -> Any:
    if content[:1] == _PICKLE:
        return PlainUnpickler(io.BytesIO(content)).load()
    text = content.decode(json.detect_encoding(content), "replace").lstrip("\ufeff")
    try:
        return json.loads(text, strict=False)
    except ValueError as error:
        with suppress(ValueError):
            return json.loads(_NAME.sub(_escaped, text), strict=False)
        raise error


def _escaped(name: re.Match[str]) -> str:
    return re.sub(r'(?<!\\)"', r"\"", name[0])


def checked(files: Sequence[Path], parse: Callable[[], Any]) -> Any:
    """Return the result of ``parse``; convert its errors to a TraceFileError about the files."""
    try:
        return parse()
    except TraceFileError:
        raise
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        EOFError,
        MemoryError,
        RecursionError,
        pickle.UnpicklingError,
    ) as error:
        raise TraceFileError(
            f"{_names(files)}: damaged, or not a trace ({error}). {_KNOWN}"
        ) from error


def _names(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{files[0].parent}, {len(files)} files"


def _reader(read: Mapping[Path, Any]) -> ModuleType:
    """Return the module that reads these files, which must all be of one kind."""
    kinds: dict[ModuleType, Path] = {}
    for path, content in read.items():
        kind = next((m for m in _KINDS if m.matches(content)), None)
        if kind is None:
            what = ", ".join(map(str, content)) if isinstance(content, dict) else str(content)
            raise TraceFileError(f"{path}: not a trace: it contains {what[:200]}. {_KNOWN}")
        kinds[kind] = path
        checked([path], partial(kind.check, content))
    if len(kinds) > 1:
        one, other = (path.name for path in [*kinds.values()][:2])
        raise TraceFileError(
            f"{one} and {other} are of different kinds. Pass files of one kind: "
            "dk.Trace.load([file, …])."
        )
    return next(iter(kinds))


def _read(read: Mapping[Path, Any], reader: ModuleType) -> tuple[list[Event], RunInfo]:
    """Return the events in files of one kind, and the metadata of their run."""
    if reader is pipeline_steps:
        return pipeline_steps.read(next(iter(read.values())))
    ranks = _by_rank(read)
    events, info = reader.read({rank: read[path] for rank, path in ranks.items()})
    known = {rank: RankInfo(f"rank {rank}", file=path.name) for rank, path in ranks.items()}
    return events, structs.replace(info, ranks=known)


# -- the rank of a file -----------------------------------------------------------------------


def _by_rank(read: Mapping[Path, Any]) -> dict[int, Path]:
    """Return the file of each rank, by the files' content or else by their names."""
    known = {
        path: rank
        for path, content in read.items()
        if (rank := _recorded_rank(content)) is not None
    }
    ranks = known | _by_name([path for path in read if path not in known])
    found: dict[int, Path] = {}
    for path in read:
        if (other := found.setdefault(ranks[path], path)) != path:
            raise TraceFileError(
                f"{other.name} and {path.name} both belong to rank {ranks[path]}. Load each run "
                "separately."
            )
    return dict(sorted(found.items()))


def _recorded_rank(content: Json) -> int | None:
    """Return the rank in the content of a file; None if it has none."""
    about = content.get("distributedInfo")
    if not isinstance(about, dict) or "rank" not in about:
        return None
    return int(about["rank"])


def _labels(paths: Sequence[Path]) -> dict[Path, str]:
    """Return the names of files, with their folders if some are equal."""
    names = {path: path.name for path in paths}
    if len({*names.values()}) == len(paths):
        return names
    return {path: f"{path.parent.name}/{path.name}" for path in paths}


def _by_name(paths: Sequence[Path]) -> dict[Path, int]:
    """Return the ranks in the names of files; 0 for a single file without a number."""
    number = r"\d+$" if len(paths) == 1 else r"\d+"
    found = {path: _rank_in(label, number) for path, label in _labels(paths).items()}
    if len(paths) == 1 and found[paths[0]] is None:
        return {paths[0]: 0}
    if unknown := next((path for path in paths if found[path] is None), None):
        raise TraceFileError(
            f"{unknown}: the file's rank is unknown. End its name with the rank's number: "
            f"{unknown.stem}_0"
        )
    return {path: rank for path, rank in found.items() if rank is not None}


def _rank_in(label: str, number: str) -> int | None:
    r"""Return the number after the word rank in a name, or else the last number.

    >>> _rank_in("nccl_trace_rank_container-node07_40", r"\d+")
    40
    >>> _rank_in("rank3_step100.json", r"\d+")
    3
    """
    name = _SUFFIXES.sub("", label)
    numbers = _RANK.findall(name) or re.findall(number, name)
    last = numbers[-1] if numbers else ""
    return int(last) if 0 < len(last) < 10 and int(last) < MAX_RANKS else None
