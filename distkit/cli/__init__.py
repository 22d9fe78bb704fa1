"""The command line: ``distkit demo``, ``trace``, ``replay``, ``hang``, ``lab`` and ``bench``.

What a command needs is imported when it runs, so that ``distkit --help`` is quick. Errors that
distkit raises on purpose become one message and exit status 1; wrong arguments give 2, Ctrl-C 130.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from distkit.cli.checkout import add_bench, add_lab
from distkit.cli.demo import add_demo, add_hang
from distkit.cli.traces import add_replay, add_trace
from distkit.errors import DistkitError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: the words after ``distkit``; this process's own when None.

    Raises:
        SystemExit: the arguments are wrong (status 2), or only help was asked for (0).
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show ░ shows ?
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    args = _parser().parse_args(words[:cut])
    try:
        return int(args.run(args, words[cut + 1 :]) or 0)
    except KeyboardInterrupt:
        print("\ndistkit: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, head or less, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except DistkitError as error:
        print(f"distkit: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    from distkit import __version__

    about = "Real torch.distributed ranks, and a record of their communication."
    parser = argparse.ArgumentParser(prog="distkit", description=about)
    parser.add_argument("--version", action="version", version=f"distkit {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in (add_demo, add_trace, add_replay, add_hang, add_lab, add_bench):
        add(commands)
    return parser
