"""``distkit hang``: the catalogue of programs that hang, and why they do."""

from __future__ import annotations

import argparse
import warnings
from typing import TYPE_CHECKING, Any

from distkit.cli.files import print_findings
from distkit.errors import CommunicationWarning, DeadlockError, DistkitError, RunError

if TYPE_CHECKING:
    from distkit.cluster.runs.run import Run
    from distkit.hangs import Case


def add_hang(commands: Any) -> None:
    """Tell the parser about ``hang``."""
    hang = commands.add_parser("hang", help="run a program that hangs, and read why it does")
    what = "a program of the catalogue, which is printed without it"
    hang.add_argument("name", nargs="?", metavar="NAME", help=what)
    hang.set_defaults(run=_hang, wrong=hang.error)


def _hang(args: argparse.Namespace, rest: list[str]) -> None:
    from distkit import hangs

    if args.name is None:
        for name, case in hangs.ALL.items():
            print(f"{name:<20} {case.how:<8}  {case.title}")
        return
    if args.name not in hangs.ALL:
        args.wrong(f"unknown hang {args.name!r}: choose from {', '.join(hangs.ALL)}")
    case = hangs.ALL[args.name]
    _print_program(case)
    run, how = _suffer(case)
    print(f"\n{how} after {run.seconds:.2f} s:")
    print_findings(run.findings)
    if (case.kind, case.culprits) not in [(f.kind, f.culprits) for f in run.findings]:
        raise DistkitError(f"there should be a {case.kind} of ranks {list(case.culprits)} in it.")


def _print_program(case: Case) -> None:
    """Title and source, with the line numbers that a finding speaks of."""
    print(f"{case.program.__name__}, on {case.ranks} ranks: {case.title}\n")
    first = case.program.__code__.co_firstlineno
    for number, line in enumerate(case.source.splitlines(), first):
        print(f"{number:>5}  {line}".rstrip())


def _suffer(case: Case) -> tuple[Run, str]:
    """Run a program of the catalogue, and say how it went."""
    from distkit.cluster.runs.run import Run
    from distkit.cluster.runs.run_ranks import run_ranks

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CommunicationWarning)  # it is printed anyway
            return run_ranks(case.program, case.ranks), "It came to its end"
    except RunError as error:
        if not isinstance(error.run, Run):
            raise
        how = "It could not go on" if isinstance(error, DeadlockError) else "It failed"
        return error.run, how
