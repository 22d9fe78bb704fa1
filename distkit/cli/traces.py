"""``distkit trace`` records a script of your own; ``distkit replay`` shows a saved trace.

``replay`` opens a page in the browser and prints what is wrong in the run. It needs no torch.

Other commands share what writes files and prints findings.
"""

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

import argparse
import gzip
import tempfile
import webbrowser
import zlib
from typing import TYPE_CHECKING, Any

from distkit.errors import RunError, TraceFileError

if TYPE_CHECKING:
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
    """The findings of a diagnosis, each with its remedy."""
    for finding in findings:
        _print_wrapped(f"{finding.message}\n{finding.remedy}")


def _print_wrapped(text: str) -> None:
    """Each line of a text as a paragraph that fits the terminal, the first one marked."""
    width = shutil.get_terminal_size().columns
    for i, line in enumerate(text.splitlines()):
        start = "    " if i else "  - "
        print("\n".join(textwrap.wrap(line, width, initial_indent=start, subsequent_indent="    ")))


def add_trace(commands: Any) -> None:
    """Tell the parser about ``trace``."""
    trace = commands.add_parser(
        "trace",
        help="run a torchrun-style script and record its communication",
        usage="distkit trace [--ranks N] [--seed S] [--out FILE] [--html FILE]"
        " -- script.py [ARGUMENT ...]",
    )
    trace.add_argument("--ranks", type=int, default=4, metavar="N", help="how many ranks (4)")
    trace.add_argument(
        "--seed",
        type=int,
        metavar="S",
        help="of the ranks' random numbers, to run it again as it was",
    )
    trace.add_argument(
        "--out",
        type=Path,
        default=Path("trace.gz"),
        metavar="FILE",
        help="where the trace goes (trace.gz)",
    )
    trace.add_argument("--html", type=Path, metavar="FILE", help="write a replay page, too")
    trace.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    trace.set_defaults(run=_trace, wrong=trace.error)


def _trace(args: argparse.Namespace, rest: list[str]) -> None:
    command = [*args.command, *rest]
    if not command:
        args.wrong("name the script: distkit trace -- train.py")
    if not Path(command[0]).is_file():
        args.wrong(f"{command[0]}: no such script")
    for file in (args.out, args.html):
        check_folder(file, args.wrong)
    from distkit.cluster.runs.run import Run
    from distkit.cluster.runs.run_ranks import run_ranks

    try:
        run = run_ranks(command[0], args.ranks, *command[1:], seed=args.seed)
    except (RunError, KeyboardInterrupt) as error:
        unfinished = getattr(error, "run", None)
        if isinstance(unfinished, Run):  # how far it came is what one wants to see
            _keep(unfinished.trace, args)
        raise
    _keep(run.trace, args)


def _keep(trace: Trace, args: argparse.Namespace) -> None:
    """Save a trace and say what is in it."""
    write(args.out, lambda: trace.save(args.out))
    print(f"{summary(trace)}. Saved in {args.out}.")
    if args.html:
        replay_page({Path(args.out).stem: trace}, args.html)


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


def summary(trace: Trace) -> str:
    """The contents of a trace, in one line."""
    from distkit.events import COLLECTIVES
    from distkit.views.scene.units import count

    shared = {trace.matches[s.rank, s.seq] for s in trace.spans if s.op in COLLECTIVES}
    lost = f", {trace.dropped} events dropped" if trace.dropped else ""
    return (
        f"{count(len(trace.ranks), 'rank')}, {trace.seconds:.2f} s: "
        f"{count(len(trace.messages), 'message')}, {count(len(shared), 'collective')}{lost}"
    )
