"""What the commands share: files that they write, and what they print."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from distkit.errors import DistkitError

if TYPE_CHECKING:
    from distkit.diagnosis.findings import Finding
    from distkit.trace.trace import Trace


def replay_page(traces: dict[str, Trace], file: Path) -> None:
    """Write the stand-alone page and say where it is."""
    from distkit.views.widget.page import to_html

    write(file, lambda: to_html(traces, file))
    print(f"Replay: {file.resolve().as_uri()}")


def check_folder(file: Path | None, wrong: Callable[[str], NoReturn]) -> None:
    """Find out before the work, not after it, that its result cannot be written."""
    if file is None:
        return
    if file.is_dir():
        wrong(f"{file} is a folder: name a file")
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        wrong(f"{file}: cannot write a file there")


def write(file: Path, how: Callable[[], object]) -> None:
    """Write a file; that it cannot be written is an error with a message."""
    try:
        how()
    except OSError as error:
        raise DistkitError(f"{file} cannot be written ({error.strerror}).") from error


def print_findings(findings: Iterable[Finding]) -> None:
    """What a diagnosis found, each with its remedy."""
    for finding in findings:
        _print_wrapped(f"{finding.message}\n{finding.remedy}")


def _print_wrapped(text: str) -> None:
    """Each line of a text as a paragraph that fits the terminal, the first one marked."""
    width = shutil.get_terminal_size().columns
    for i, line in enumerate(text.splitlines()):
        start = "    " if i else "  - "
        print("\n".join(textwrap.wrap(line, width, initial_indent=start, subsequent_indent="    ")))
