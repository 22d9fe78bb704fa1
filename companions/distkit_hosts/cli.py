"""The commands ``distkit doctor`` and ``distkit trace -- torchrun …``."""

from __future__ import annotations

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkit import cli
from distkit_hosts.torchrun import launching

if TYPE_CHECKING:
    from distkit.trace.trace import Trace


def add(commands: Any) -> None:
    """Add ``doctor`` to the commands of ``distkit``."""
    doctor = commands.add_parser(
        "doctor",
        help="check whether ranks can run here, or on several machines",
        description="The exit status is 0 if ranks can run, and 1 if a check fails.",
    )
    doctor.add_argument(
        "--hosts",
        type=lambda text: [host for host in text.split(",") if host],
        default=[],
        metavar="A,B,C",
        help="other machines to check, including the connections between them; named as for ssh",
    )
    doctor.add_argument(
        "--ssh",
        metavar="COMMAND",
        default="ssh",
        help="the command that connects to them, including options (default: ssh)",
    )
    doctor.add_argument("--python", metavar="PATH", help="path of Python on these machines")
    doctor.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    doctor.set_defaults(run=_doctor)


# -- distkit doctor -----------------------------------------------------------------------------


def _doctor(args: argparse.Namespace, command: list[str]) -> int:
    from distkit_hosts.checkup.examine import doctor

    report = doctor(args.hosts, ssh_cmd=shlex.split(args.ssh), python=args.python)
    print(report.to_json() if args.json else report)
    return 0 if report.ok else 1


# -- distkit trace -- torchrun -------------------------------------------------------------------


def trace(args: argparse.Namespace, command: list[str]) -> int:
    """Record ranks that a launcher, such as torchrun, starts; return the launcher's exit status."""
    folder = args.out.with_suffix("") if args.out.suffix == ".gz" else args.out
    args.out = folder.with_name(f"{folder.name}.gz")
    for file in (args.out, args.html):
        cli.check_folder(file, args.usage_error)
    printed = set[str]()
    explain = partial(_explain, folder, printed)
    status = launching.run(launching.with_recorder(command, folder.absolute()), on_signal=explain)
    result = explain()
    if result is not None:
        cli.save_trace(result, args)
    return status


def _explain(folder: Path, printed: set[str]) -> Trace | None:
    """Print new findings about the ranks recorded in a folder, and return their trace, if any.

    ``printed`` contains the messages of the findings that were printed before.
    """
    from distkit._format import named
    from distkit_hosts.torchrun import rankfile

    if not folder.is_dir() or not rankfile.find_files([folder]):
        print(
            "No rank was recorded, because the script did not start on any rank.", file=sys.stderr
        )
        return None
    trace = cli.open_trace([folder])
    missing = [rank for rank in range(trace.info.world_size) if rank not in trace.info.ranks]
    if missing:
        print(
            f"The files of {named(missing)} are not in {folder}: copy the files from the other "
            f"hosts there, then run: distkit replay {folder}"
        )
    findings = [f for f in trace.diagnose() if f.message not in printed]
    printed.update(f.message for f in findings)
    cli.print_findings(findings)
    return trace
