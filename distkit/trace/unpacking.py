"""Reading files of traces, gzipped or not, up to a limit: a small file can unpack to a huge one."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NoReturn, cast

from distkit.errors import TraceFileError

#: Unpacked, a file has no more bytes than this.
MOST_BYTES = 2**30

_GZIP = b"\x1f\x8b"


def unpacked(path: Path, size: int | None = None) -> bytearray:
    """The bytes of a file, or the first ``size`` of them.

    Raises:
        TraceFileError: it is damaged, or has more than :data:`MOST_BYTES`.
        OSError: it cannot be read.
    """
    content, end = bytearray(), MOST_BYTES + 1 if size is None else size
    with _opened(path) as file:
        while part := file.read(min(end - len(content), 2**20)):
            content += part
    if len(content) > MOST_BYTES:
        _too_large(path)
    return content


def lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, as :func:`unpacked` has its bytes."""
    left = MOST_BYTES
    with _opened(path) as file:
        while line := file.readline(left + 1):
            left -= len(line)
            if left < 0:
                _too_large(path)
            yield line


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    with path.open("rb") as plain:
        is_packed = plain.read(2) == _GZIP
    try:
        with gzip.open(path) if is_packed else path.open("rb") as file:
            yield cast("BinaryIO", file)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceFileError(
            f"{path}: the file is truncated or damaged. Copy it again, or write it once more."
        ) from error


def _too_large(path: Path) -> NoReturn:
    raise TraceFileError(
        f"{path}: unpacked, it has more than {MOST_BYTES:,} bytes. Record fewer steps."
    )
