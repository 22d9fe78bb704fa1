"""Files of other programs as a trace: flight-recorder dumps, Chrome and Kineto traces.

Nothing in them is executed. A pickled dump is read by an unpickler that knows plain values only:
numbers, text, truth values, None, and lists, tuples and dicts of them. A small file cannot take
much memory, and what is read is checked as a saved trace is: it can be saved, and loaded again.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import pickle
import pickletools
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from distkit.errors import TraceFileError
from distkit.trace import fields, flight_recorder, kineto
from distkit.trace.file import FORMAT
from distkit.trace.log import Log

Json = dict[str, Any]

#: What a pickle of protocol 2 and later begins with.
_PICKLE = b"\x80"
_GZIP = b"\x1f\x8b"
#: Unpacked, a file has no more bytes than this, and a pickle no more values.
MOST_BYTES, MOST_VALUES = 2**30, 10_000_000
_SUFFIXES = re.compile(r"(\.[a-zA-Z]\w*)+$")
_KNOWN = (
    "distkit reads its own traces (trace.save), PyTorch's flight-recorder dumps (JSON or pickle), "
    "and Chrome traces of torch.profiler or of trace.to_chrome."
)


class PlainUnpickler(pickle.Unpickler):
    """Reads plain values only: whatever would import something, or run it, is refused.

    >>> PlainUnpickler(io.BytesIO(pickle.dumps({"a": [1, (2.5, None)]}))).load()
    {'a': [1, (2.5, None)]}
    >>> PlainUnpickler(io.BytesIO(pickle.dumps(print))).load()
    Traceback (most recent call last):
    _pickle.UnpicklingError: it holds builtins.print, which is no plain value
    """

    def find_class(self, module: str, name: str) -> NoReturn:  # noqa: D102
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which is no plain value")


def is_foreign(path: Path) -> bool:
    """True if a file, or what is in a folder, is not a trace that distkit has saved."""
    if path.is_dir():
        return True
    beginning = _unpacked(path, 256)
    return beginning[:1] in (_PICKLE, b"{", b"[") and f'"{FORMAT}"'.encode() not in beginning


def load(paths: Sequence[Path], kind: type[Log]) -> Log:
    """Read the dumps or traces of the ranks of one run: a file each.

    Args:
        paths: files, or one folder of them; of several, a name's last number is the rank.
        kind: what to make of their events.

    Raises:
        TraceFileError: a file is damaged or of another kind, or two are of the same rank.
        FileNotFoundError: there is no such file.
        IsADirectoryError: a folder has no files.
    """
    files = [file for path in paths for file in (_inside(path) if path.is_dir() else [path])]
    read = {file: _parsed(file) for file in files}
    reader = _reader(read)
    trace: Log = checked(files, lambda: sound(kind(*reader.read(_by_rank(read)))))
    return trace


def _inside(folder: Path) -> list[Path]:
    found = sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))
    if not found:
        empty = "the folder is empty: it should have a file of each rank"
        raise IsADirectoryError(errno.EISDIR, empty, str(folder))
    return found


def _unpacked(path: Path, size: int | None = None) -> bytearray:
    """What is in a file, or the beginning of it."""
    with path.open("rb") as plain:
        packed = plain.read(2) == _GZIP
    content, end = bytearray(), MOST_BYTES + 1 if size is None else size
    try:
        with gzip.open(path) if packed else path.open("rb") as file:
            while part := file.read(min(end - len(content), 2**20)):
                content += part
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceFileError(f"{path}: the file is truncated or damaged. Copy it again.") from error
    if len(content) > MOST_BYTES:
        raise TraceFileError(
            f"{path}: unpacked, it has more than {MOST_BYTES:,} bytes. Record fewer steps."
        )
    return content


def _parsed(path: Path) -> Json:
    content = _unpacked(path)

    def parse() -> Any:
        if content[:1] == _PICKLE:
            _screen(content)
            return _listed(PlainUnpickler(io.BytesIO(content)).load(), iter(range(MOST_VALUES)))
        return json.loads(content)

    found = checked([path], parse)
    if isinstance(found, list):  # Chrome's other form
        found = {"traceEvents": found}
    if not isinstance(found, dict):
        raise TraceFileError(f"{path}: not a trace. {_KNOWN}")
    return found


def _screen(content: bytearray) -> None:
    """Raise ValueError at a number for which the unpickler would reserve memory.

    A pickle numbers what it refers to again, in its order.
    """
    for n, (code, number, at) in enumerate(pickletools.genops(content)):
        if number is not None and code.name in ("PUT", "LONG_BINPUT") and number > n:
            raise ValueError(f"{code.name} at byte {at} has the number {number}, out of order")


def _listed(value: Any, left: Iterator[int]) -> Any:
    """The same with lists for tuples; ``left``: an element for each value that there may be.

    A pickle may refer to one list many times: what is small there can be large to walk through.
    """
    if next(left, None) is None:
        raise ValueError(f"it holds more than {MOST_VALUES:,} values")
    if isinstance(value, (list, tuple)):
        return [_listed(one, left) for one in value]
    if isinstance(value, dict):
        return {name: _listed(one, left) for name, one in value.items()}
    if value is not None and not isinstance(value, (str, int, float)):
        raise TypeError(f"{type(value).__name__} is not JSON serializable")
    return value


def sound(trace: Log) -> Log:
    """The trace, if a saved one may hold the same."""
    for event in trace:
        fields.rank(event.rank, "rank")
        fields.whole(event.seq, "seq", least=-fields.LARGEST)
        fields.number(event.time, "time")
    for look in json.loads(json.dumps(trace.table.looks)):  # lists for tuples, words for states
        fields.look(*look)
    fields.meta(trace.meta, "meta")
    return type(trace).of(trace.table, trace.meta)


def checked(files: Sequence[Path], parse: Callable[[], Any]) -> Any:
    """What is parsed; an error in it is that of the files."""
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
        names = str(files[0]) if len(files) == 1 else f"{files[0].parent}, {len(files)} files"
        raise TraceFileError(f"{names}: damaged, or not a trace ({error}). {_KNOWN}") from error


def _reader(read: Mapping[Path, Json]) -> ModuleType:
    """What reads these files: each must be of the kind that the others are."""
    kinds: dict[ModuleType, Path] = {}
    for path, content in read.items():
        kind = next((m for m in (flight_recorder, kineto) if m.is_one(content)), None)
        if kind is None:
            raise TraceFileError(f"{path}: not a trace. {_KNOWN}")
        kinds[kind] = path
        checked([path], partial(kind.check, content))
    if len(kinds) > 1:
        one, other = (path.name for path in kinds.values())
        raise TraceFileError(
            f"{one} and {other} are of different kinds. Give the files of one kind: "
            "dk.Trace.load([file, …])."
        )
    return next(iter(kinds))


def _by_rank(read: Mapping[Path, Json]) -> dict[int, Json]:
    """The files by the rank that they are of: as they say, else the last number of their name."""
    found: dict[int, Path] = {}
    for path, content in read.items():
        if kineto.is_ours(content):
            if len(read) > 1:
                raise TraceFileError(f"{path} has all ranks of a run. Load it alone.")
            return {0: content}
        rank = _rank(path, content, 0 if len(read) == 1 else None)
        if rank in found:
            raise TraceFileError(
                f"{found[rank].name} and {path.name} are both of rank {rank}. Load each run alone."
            )
        found[rank] = path
    return {rank: read[path] for rank, path in sorted(found.items())}


def _rank(path: Path, content: Json, otherwise: int | None) -> int:
    about = content.get("distributedInfo")
    if isinstance(about, dict) and "rank" in about:
        checked([path], lambda: fields.rank(about["rank"], "distributedInfo.rank"))
        return int(about["rank"])
    numbers = re.findall(r"\d+", _SUFFIXES.sub("", path.name))
    rank = int(numbers[-1]) if numbers else otherwise
    if rank is None or rank >= fields.MOST_RANKS:
        raise TraceFileError(
            f"{path}: of which rank is it? Let its name end in the rank's number: {path.stem}_0"
        )
    return rank
