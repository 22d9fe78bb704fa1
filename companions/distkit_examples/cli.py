"""The command ``distkit demo``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distkit import cli

if TYPE_CHECKING:
    from distkit.trace.trace import Trace


def add(commands: Any) -> None:
    """Add the command to the parser of ``distkit``."""
    demo = commands.add_parser("demo", help="run demos that send, reduce and train on real data")
    demo.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        choices=["p2p", "all_reduce", "sync_sgd", "parameter_server", "all"],
        default="all",
        help="p2p, all_reduce, sync_sgd, parameter_server or all (the default)",
    )
    demo.add_argument("--html", type=Path, metavar="FILE", help="write a replay page to this file")
    demo.set_defaults(run=_demo, usage_error=demo.error)


def _demo(args: argparse.Namespace, remainder: list[str]) -> None:
    from distkit_examples import demos

    cli.check_folder(args.html, args.usage_error)
    traces: dict[str, Trace] = {}
    about: dict[str, str] = {}
    for name in demos.ALL if "all" in args.names else args.names:
        lines, recorded = demos.ALL[name]()
        traces |= recorded
        about |= dict.fromkeys(recorded, str(demos.ALL[name].__doc__))
        print(f"\n{name}: {demos.ALL[name].__doc__}")
        for line in lines:
            cli.print_wrapped(f"  {line}", len(line) - len(line.lstrip()) + 4)
    if args.html:
        print()
        traces = dict(sorted(traces.items(), key=lambda item: "ring" not in item[0]))  # ring first
        cli.replay_page(
            traces,
            args.html,
            title="Messages between ranks",
            about=about,
            first=("stage", "servers"),
        )
