"""``distkit replay``: a saved trace as a page in the browser, and what is wrong in it.

Needs neither torch nor Jupyter.
"""

from __future__ import annotations

import argparse
import gzip
import tempfile
import webbrowser
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkit.cli.files import check_folder, print_findings, replay_page, summary
from distkit.errors import DistkitError, TraceFileError

if TYPE_CHECKING:
    from distkit.trace.trace import Trace


def add_replay(commands: Any) -> None:
    """Tell the parser about ``replay``."""
    replay = commands.add_parser(
        "replay",
        help="open a saved trace in the browser; needs no torch",
        usage="distkit replay FILE [--html OUT] [--no-browser]",
    )
    replay.add_argument(
        "file", type=Path, metavar="FILE", help="written by trace.save(path) or distkit trace"
    )
    replay.add_argument(
        "--html", type=Path, metavar="OUT", help="where the page goes (a temporary file)"
    )
    replay.add_argument("--no-browser", action="store_true", help="write the page, open nothing")
    replay.set_defaults(run=_replay, wrong=replay.error)


def _replay(args: argparse.Namespace, rest: list[str]) -> None:
    check_folder(args.html, args.wrong)
    trace = _load(args.file)
    print(f"{trace.meta.get('name') or args.file.stem}: {summary(trace)}.")
    from distkit.diagnosis.diagnose import diagnose

    print_findings(diagnose(trace))
    page = args.html or Path(tempfile.mkdtemp(prefix="distkit-"), f"{args.file.stem}.html")
    replay_page({args.file.stem: trace}, page)
    if not args.no_browser and not webbrowser.open(page.resolve().as_uri()):
        print("No browser could be started here: open that address in one.")


def _load(file: Path) -> Trace:
    from distkit.trace.trace import Trace

    try:
        return Trace.load(file)
    except OSError as error:
        raise DistkitError(f"{file} cannot be read ({error.strerror}).") from error
    except TraceFileError as error:
        if b'"traceEvents"' in _beginning(file):
            raise DistkitError(
                f"{file}: this is a Chrome trace, which holds less than distkit's own. Open it in "
                "https://ui.perfetto.dev, or save the run with trace.save(path) and replay that."
            ) from error
        raise


def _beginning(file: Path, size: int = 1 << 16) -> bytes:
    """The first bytes of a file, unpacked if it is gzipped."""
    for opened in (gzip.open, open):
        try:
            with opened(file, "rb") as f:
                return bytes(f.read(size))
        except (OSError, EOFError, zlib.error):
            continue
    return b""
