"""Read and write the record of one rank, a file that is readable even after a crash.

The first line states the format. Named entries follow: first ``about``, then mostly ``rows``. Each
is msgpack with a length and a checksum, so that an entry truncated by a crash is detected. Reading
a file executes nothing. Events reach the file a few tenths of a second after they occur. Until
then, they are in the black box, a file next to it (``NAME.box``). ``NAME.fault`` contains
the faulthandler report of the signal that killed the rank. A rank that exits normally removes both
files.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from distkit.errors import TraceFileError
from distkit.recording.encoding import (
    DECODE_ERRORS,
    Row,
    decode,
    decode_rows,
    encode,
    encode_rows,
    rows_in,
)

#: Suffix of the name of a rank's file, and first line of the file, with the version of the format.
SUFFIX, MAGIC = ".rank", b"distkit-rank 2\n"
#: Maximum number of events in a rank's file; further events are only counted.
MAX_ROWS = 1_000_000

_HEAD = struct.Struct("<II")  # size and checksum of a chunk


def clock() -> str:
    """Return the identity of this process's monotonic clock."""
    kernel = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{kernel.read_text().strip()} {Path('/proc/self/ns/time').readlink()}"
    except OSError:  # not Linux, or an old kernel
        return socket.gethostname()


def pid_namespace() -> str:
    """Return the identity of this process's pid namespace; each container has its own."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def is_here(header: Mapping[str, Any]) -> bool:
    """Return whether the pid in a rank's record is valid in this process."""
    return bool(header["clock"] == clock() and header["pid_namespace"] == pid_namespace())


def is_running(pid: int, latest_start: float = float("inf")) -> bool:
    """Return whether a process is running.

    Args:
        pid: the process's id.
        latest_start: the latest possible start time on the wall clock [s].
    """
    import psutil  # on first use: ranks do not need it

    try:
        process = psutil.Process(pid)
        return bool(
            process.create_time() <= latest_start and process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.NoSuchProcess:
        return False


# -- writing -------------------------------------------------------------------------------------


class RankFile:
    """Writes the record of this rank. Writing never raises, so the rank survives a full disk.

    Args:
        path: the path of the file, which must not exist.
        header: see :class:`Record`.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path, self.lost, self._count = path, 0, 0
        self._file, self._write_lock = path.open("xb", buffering=0), threading.Lock()
        self._file.write(MAGIC)
        self.note("about", header)

    def write_rows(self, rows: list[Row]) -> None:
        """Add events."""
        accepted = rows[: MAX_ROWS - self._count]
        self._count += len(accepted)
        if accepted:
            self.note("rows", encode_rows(accepted))
        self.lost += len(rows) if self._file.closed else len(rows) - len(accepted)

    def close(self) -> None:
        """Close the file."""
        with self._write_lock:
            self._file.close()

    def note(self, name: str, value: Any) -> None:
        """Append an entry, unless the file is closed, as after a failed write."""
        packed = encode((name, value))
        chunk = _HEAD.pack(len(packed), zlib.crc32(packed)) + packed
        with self._write_lock:
            if self._file.closed:
                return
            try:
                while chunk:
                    chunk = chunk[os.write(self._file.fileno(), chunk) :]
            except OSError as error:
                self._file.close()
                message = f"distkit: {self.path} cannot be written ({error.strerror})"
                print(f"{message}. This rank is no longer recorded.", file=sys.stderr)


# -- reading -------------------------------------------------------------------------------------


@dataclass
class Record:
    """The content of a rank's file.

    Args:
        path: the path of the file.
        header: ``rank``, ``world_size``, ``host``, ``pid``, ``parent`` (the parent's pid),
            ``pid_namespace`` (pids are unique within one), ``launcher``, ``clock`` (the same for
            processes with the same monotonic clock), ``began`` (the monotonic and the wall clock at
            the start [s]), ``folder`` (the current folder), ``program``, ``socket`` (the path of
            the rank's socket, or "" if it has none).
        rows: the events.
        notes: the values of the other entries, by name and in order.
        fault: the faulthandler report of the received signals.
        is_growing: whether the rank is known to be running.
        size: the number of bytes of the file that have been read.
    """

    path: Path
    header: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    notes: dict[str, list[Any]] = field(default_factory=dict)
    fault: str = ""
    is_growing: bool = False
    size: int = len(MAGIC)

    def update(self) -> list[tuple[str, Any]]:
        """Read the rest of the file and return its entries, with decoded ``rows``.

        Raises:
            TraceFileError: the file is damaged.
        """
        with self.path.open("rb") as file:
            file.seek(self.size)
            content = memoryview(file.read())
        entries = list[tuple[str, Any]]()
        try:
            for chunk in _chunks(content):
                self.size += _HEAD.size + len(chunk)
                name, value = decode(chunk)
                entries.append((name, decode_rows(value) if name == "rows" else value))
                self._add(*entries[-1])
        except (msgspec.MsgspecError, LookupError, TypeError, ValueError) as error:
            raise TraceFileError(f"{self.path}: damaged ({error}). Copy it again.") from error
        return entries

    def _add(self, name: str, value: Any) -> None:
        if name == "rows":
            self.rows += value
        elif name == "about":
            self.header = value
        else:
            self.notes.setdefault(name, []).append(value)

    def latest(self, name: str, default: Any = None) -> Any:
        """Return the latest value of an entry, or ``default`` if there is none."""
        return self.notes[name][-1] if name in self.notes else default

    @property
    def rank(self) -> int:
        """The rank in the process group or, before there is one, the launcher's rank."""
        return int(self.latest("world", (self.header["rank"],))[0])

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return int(self.latest("world", (0, self.header["world_size"]))[1])

    @property
    def until(self) -> float:
        """The time of the last heartbeat or event on the rank's clock [s]."""
        beat = self.latest("beat", (self.header["began"][0],))[0]
        return float(max(beat, self.rows[-1][3] if self.rows else beat))


def find_files(paths: Iterable[Path]) -> list[Path]:
    """Return the rank files among the given files and in the given folders."""
    files = [
        f
        for p in paths
        for f in (sorted(p.glob(f"*{SUFFIX}")) if p.is_dir() else [p])
        if _is_rank_file(f)
    ]
    return list(dict.fromkeys(files))


def _is_rank_file(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC) - 2) == MAGIC[:-2]


def read(path: Path) -> Record:
    """Read the file of a rank and the files next to it.

    Raises:
        TraceFileError: the file is damaged or empty, is not a rank file, or was written by a
            different version of distkit.
        OSError: the file cannot be read.
    """
    # read these files first, because an exiting rank removes them once its own file is complete
    fault, box = _read_sibling(path, ".fault"), _read_sibling(path, ".box")
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise TraceFileError(
                f"{path}: not a rank file, or written by a different version of distkit. Load it "
                "with that version."
            )
    record = Record(path)
    record.update()
    if not record.header:
        raise TraceFileError(
            f"{path}: the file is empty. Its rank has just started, or exited during startup."
        )
    record.fault = fault.decode(errors="replace")[:20_000]
    if len(record.rows) < MAX_ROWS:  # add events that had not reached the file
        with suppress(*DECODE_ERRORS):  # the black box is truncated
            record.rows += rows_in(box, 1, len(record.rows))
    return record


def _read_sibling(path: Path, suffix: str) -> bytes:
    """Return the content of a file next to a rank's file; b"" if the rank has removed it."""
    try:
        return path.with_suffix(suffix).read_bytes()
    except FileNotFoundError:
        return b""


def _chunks(content: memoryview) -> Iterator[memoryview]:
    """Yield the chunks up to the first incomplete one."""
    while len(content) >= _HEAD.size:
        size, checksum = _HEAD.unpack_from(content)
        packed = content[_HEAD.size : _HEAD.size + size]
        if len(packed) < size or zlib.crc32(packed) != checksum:
            return
        yield packed
        content = content[_HEAD.size + size :]
