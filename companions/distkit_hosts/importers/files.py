"""Read files from other programs: flight-recorder dumps and profiler traces, one for each rank.

The type of a file is detected from its content, not its name. Nothing in it is executed. Pickled
dumps are read by an unpickler that accepts only plain values: numbers, strings, booleans, None,
and lists, tuples and dicts of these. The result is checked like a saved trace, so it can be saved
as one.
"""

from __future__ import annotations

import errno
import io
import json
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from msgspec import structs

from distkit.errors import TraceFileError
from distkit.events import Event
from distkit.trace import file
from distkit.trace.file import unpack
from distkit.trace.info import MAX_RANKS, RankInfo, RunInfo
from distkit.trace.log import Log
from distkit_hosts.importers import flight_recorder, kineto

#: First byte of a pickle that uses protocol 2 or later.
_PICKLE = b"\x80"
#: The name of an event; torch does not escape quotes in it (pytorch#146900).
_NAME = re.compile(r'(?<="name": ").*?(?=",\s*"(?:ph|pid|cat|ts)":)')
#: Digit-free suffixes after the rank number.
_SUFFIXES = re.compile(r"(\.[a-zA-Z_]+)+$")
_RANK = re.compile(r"rank[ _.=-]?(\d+)", re.IGNORECASE)
_KNOWN = (
    "distkit reads its own traces (trace.save), PyTorch's flight-recorder dumps (JSON or pickle) "
    "and torch.profiler traces."
)
_File = flight_recorder.Dump | kineto.Profile


class PlainUnpickler(pickle.Unpickler):
    """Reads only plain values, and rejects anything that would be imported or executed.

    >>> PlainUnpickler(io.BytesIO(pickle.dumps({"a": [1, (2.5, None)]}))).load()
    {'a': [1, (2.5, None)]}
    >>> PlainUnpickler(io.BytesIO(pickle.dumps(print))).load()
    Traceback (most recent call last):
    _pickle.UnpicklingError: it contains builtins.print, which is not a plain value
    """

    def find_class(self, module: str, name: str) -> NoReturn:  # noqa: D102
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which is not a plain value")


def load(paths: Sequence[Path], kind: type[Log]) -> Log:
    """Read one run's dumps or traces, one file per rank.

    Args:
        paths: files, or one folder of files. The rank is read from the content of a file or, if it
            is not there, from the name: the number after the word "rank", or the last number.
        kind: the class of the result.

    Raises:
        TraceFileError: a file is damaged or has an unsupported type, the files have different
            types, the rank of a file is unknown, two files belong to the same rank, or the files
            contain no events.
        FileNotFoundError: a file does not exist.
        IsADirectoryError: a folder contains no files.
    """
    files = [file for path in paths for file in (_files_in(path) if path.is_dir() else [path])]
    contents = {path: checked([path], partial(_parse, path)) for path in files}
    events, info = checked(files, lambda: _read(contents))
    if not events:
        raise TraceFileError(
            f"{_names(files)}: no torch.distributed calls were found. Record a step that "
            "communicates."
        )
    trace: Log = checked(files, lambda: file.round_trip(kind(events, info)))
    return trace


def _files_in(folder: Path) -> list[Path]:
    found = sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    if not found:
        empty = "the folder is empty: it should contain a file for each rank"
        raise IsADirectoryError(errno.EISDIR, empty, str(folder))
    return found


def _parse(path: Path) -> _File:
    """Detect which type of dump or trace a file contains, and parse it."""
    if file.is_trace_file(path):
        raise TraceFileError(
            f"{path} is a distkit trace of all ranks. Load only this file: dk.Trace.load(FILE)."
        )
    content = unpack(path)
    if content[:1] == _PICKLE:
        value = PlainUnpickler(io.BytesIO(content)).load()
    else:
        value = _from_json(content.decode("utf-8-sig", "replace"))
    if isinstance(value, dict) and "entries" in value:
        return flight_recorder.parse(value)
    if isinstance(value, dict) and "traceEvents" in value:
        return kineto.parse(value)
    content_summary = ", ".join(map(str, value)) if isinstance(value, dict) else str(value)
    raise TraceFileError(f"{path}: not a trace: it contains {content_summary[:200]}. {_KNOWN}")


def _from_json(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except ValueError:
        escaped = _NAME.sub(lambda name: re.sub(r'(?<!\\)"', r"\"", name[0]), text)
        return json.loads(escaped, strict=False)


def checked(files: Sequence[Path], parse: Callable[[], Any]) -> Any:
    """Return the result of ``parse``; convert unexpected errors to a TraceFileError."""
    try:
        return parse()
    except (TraceFileError, OSError):
        raise
    except Exception as error:  # a damaged file can raise any exception
        raise TraceFileError(
            f"{_names(files)}: damaged, or not a trace ({error}). {_KNOWN}"
        ) from error


def _names(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{len(files)} files, starting with {files[0]}"


def _read(contents: Mapping[Path, Any]) -> tuple[list[Event], RunInfo]:
    """Return the events in files of a single type, and the metadata of their run."""
    kinds = {type(content): path.name for path, content in contents.items()}
    if len(kinds) > 1:
        raise TraceFileError(
            f"{' and '.join(kinds.values())} are different types of files. Pass files of a "
            "single type: dk.Trace.load([file, …])."
        )
    reader = kineto if kineto.Profile in kinds else flight_recorder
    paths = _paths_by_rank(contents)
    events, info = reader.read({rank: contents[path] for rank, path in paths.items()})
    ranks = {rank: RankInfo(f"rank {rank}", file=path.name) for rank, path in paths.items()}
    return events, structs.replace(info, ranks=ranks)


# -- the rank of a file -----------------------------------------------------------------------


def _paths_by_rank(contents: Mapping[Path, _File]) -> dict[int, Path]:
    """Return the file of each rank; ranks are read from the content or, failing that, the name."""
    found: dict[int, Path] = {}
    for path, content in contents.items():
        rank = content.distributedInfo.rank if isinstance(content, kineto.Profile) else None
        if rank is None:
            rank = _rank_in(path.name)
        if rank is None:
            raise TraceFileError(
                f"{path}: the file's rank is unknown. End its name with the rank number: "
                f"{path.stem}_0"
            )
        if rank in found:
            raise TraceFileError(
                f"{found[rank].name} and {path.name} both belong to rank {rank}. Load each run "
                "separately."
            )
        found[rank] = path
    return dict(sorted(found.items()))


def _rank_in(name: str) -> int | None:
    """Return the number after the word "rank" in a name, or the last number if it is absent.

    >>> _rank_in("nccl_trace_rank_container-node07_40")
    40
    >>> _rank_in("rank3_step100.json")
    3
    """
    name = _SUFFIXES.sub("", name)
    numbers = _RANK.findall(name) or re.findall(r"\d+", name)
    last = numbers[-1] if numbers else ""
    return int(last) if 0 < len(last) < 10 and int(last) < MAX_RANKS else None
