"""A dataset in several files, each read only by the replicas that need it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

#: Arrays of a file, of equal length: inputs and targets, for example.
Arrays = tuple[Any, ...]

#: The cache when no file is in memory.
_NO_FILE: tuple[Path | None, Arrays] = None, ()


class Files(Dataset[tuple[Tensor, ...]]):
    """A dataset of samples in files, in file order, with one file at a time in memory.

    Args:
        paths: files that every rank can read, in the same order on every rank.
        read: returns the arrays of a file, samples along the first dimension. By default it reads
            ``.npy`` and ``.npz`` (all arrays, in their order), never pickled objects.
        count: returns the number of samples of a file; by default it calls ``read``.

    Raises:
        FileNotFoundError: A file does not exist on this rank.

    Example:
        >>> data = Files(["a.npz", "b.npz"])                    # doctest: +SKIP
        >>> len(data), data[0]                                  # doctest: +SKIP
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        read: Callable[[Path], Arrays] | None = None,
        count: Callable[[Path], int] | None = None,
    ) -> None:
        self.paths = tuple(map(Path, paths))
        if missing := [str(path) for path in self.paths if not path.is_file()]:
            raise FileNotFoundError(
                f"files not found: {', '.join(missing)}. Every rank reads the files: put them in a "
                "folder that all ranks share."
            )
        self._reader, self._cached = read or read_arrays, _NO_FILE
        self.sizes = tuple(map(count, self.paths) if count else map(self._count, self.paths))
        #: Name and number of samples of each file.
        self.files = tuple(zip(map(str, self.paths), self.sizes, strict=True))
        self._ends = list(accumulate(self.sizes))
        self._latest = 0  # the file read last, which determines the shape of batches of 0 rows

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, row: int) -> tuple[Tensor, ...]:
        return tuple(part[0] for part in self.take([range(len(self))[row]]))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cached": _NO_FILE}  # other processes read the files again

    def take(self, rows: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the samples of these rows, as one batch."""
        runs = groupby(rows, key=lambda row: bisect_right(self._ends, row))
        parts = [self._take_from(file, list(group)) for file, group in runs] or [
            self._take_from(self._latest, [])
        ]
        return tuple(map(torch.cat, zip(*parts, strict=True)))

    def _take_from(self, file: int, rows: list[int]) -> tuple[Tensor, ...]:
        self._latest, first = file, self._ends[file] - self.sizes[file]
        indices = np.array(rows, dtype=np.int64) - first
        return tuple(torch.as_tensor(a[indices]) for a in self._read(self.paths[file]))

    def _read(self, path: Path) -> Arrays:
        if self._cached[0] != path:
            self._cached = path, self._reader(path)
        return self._cached[1]

    def _count(self, path: Path) -> int:
        return len(self._read(path)[0])


def read_arrays(path: Path) -> Arrays:
    """Return the arrays of a ``.npy`` or ``.npz`` file.

    Raises:
        ValueError: The file has another format, or contains pickled objects.
    """
    if path.suffix == ".npy":
        return (np.load(path, mmap_mode="r"),)
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return tuple(arrays[name] for name in arrays.files)
    raise ValueError(
        f"{path} is neither .npy nor .npz. Pass a function that reads it and returns a tuple of "
        "arrays: Files(paths, read=function)."
    )
