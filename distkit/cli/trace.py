"""``distkit trace``: a script of your own on some ranks, recorded."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkit.cli.files import check_folder, replay_page, summary, write
from distkit.errors import RunError

if TYPE_CHECKING:
    from distkit.trace.trace import Trace


def add_trace(commands: Any) -> None:
    """Tell the parser about ``trace``."""
    trace = commands.add_parser(
        "trace",
        help="run a torchrun-style script and record what its ranks say",
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
        args.wrong(f"{command[0]}: there is no such script")
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
