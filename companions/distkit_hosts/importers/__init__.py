"""Read traces from files that other programs or recorded ranks have written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distkit.trace.log import Log
from distkit_hosts.importers import files
from distkit_hosts.torchrun import merge, rankfile


def load(paths: Sequence[Path], kind: type[Log]) -> Log:
    """Read files, or a folder of files; see :meth:`distkit.Trace.load`."""
    if ranks := rankfile.find_files(paths):
        return merge.merged_trace([rankfile.read(path) for path in ranks], kind)
    return files.load(paths, kind)
