"""The commands of this companion: ``distkit lab-hosts``."""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any


def add(commands: Any) -> None:
    """Tell the parser of ``distkit`` about them."""
    add_lab_hosts(commands)


# -- distkit lab-hosts --------------------------------------------------------------------------


def add_lab_hosts(commands: Any) -> None:
    """Tell the parser about ``lab-hosts``."""
    lab_hosts = commands.add_parser(
        "lab-hosts",
        help="several hosts on this machine, each with its own network and processes",
        usage="distkit lab-hosts [--slurm] [NAME ...] [-- COMMAND ...]",
    )
    what = "the hosts' names (alpha beta gamma); a command after -- runs on one more, the head"
    lab_hosts.add_argument("names", nargs="*", metavar="NAME", help=what)
    lab_hosts.add_argument("--slurm", action="store_true", help="start Slurm, with these nodes")
    lab_hosts.set_defaults(run=_lab_hosts)


def _lab_hosts(args: argparse.Namespace, rest: list[str]) -> int:
    from distkit_hosts.laboratory import Laboratory, guide

    names = args.names or ["alpha", "beta", "gamma"]
    with Laboratory(names, outside=not rest and os.geteuid() == 0) as lab:
        lab.ssh()
        if args.slurm:
            lab.slurm()
        if rest:
            return lab.run("head", rest).returncode
        print(guide.explain(lab), flush=True)
        while True:
            signal.pause()
