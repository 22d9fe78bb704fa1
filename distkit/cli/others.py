"""``distkit lab`` and ``distkit bench``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from distkit.errors import DistkitError

BENCHMARKS = ("start", "memory", "tap", "orphans", "step", "hang", "views", "allreduce", "kvstore",
              "simulate", "published")  # fmt: skip


def add_lab(commands: Any) -> None:
    """Tell the parser about ``lab``."""
    lab = commands.add_parser(
        "lab", help="open the notebooks in JupyterLab",
        usage="distkit lab [NOTEBOOK] [-- OPTION ...]",
    )  # fmt: skip
    what = "a notebook or a folder; options after -- are JupyterLab's"
    lab.add_argument("notebook", nargs="?", type=Path, metavar="NOTEBOOK", help=what)
    lab.set_defaults(run=_lab)


def add_bench(commands: Any) -> None:
    """Tell the parser about ``bench``."""
    bench = commands.add_parser("bench", help="measure distkit beside what else there is")
    bench.add_argument("name", metavar="NAME", choices=[*BENCHMARKS, "all"],
                       help=", ".join(BENCHMARKS) + " or all")  # fmt: skip
    bench.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    bench.add_argument("--reps", type=int, metavar="N", help="repetitions of each measurement")
    bench.set_defaults(run=_bench, wrong=bench.error)


def _lab(args: argparse.Namespace, rest: list[str]) -> None:
    from importlib.util import find_spec

    if find_spec("jupyterlab") is None:
        raise DistkitError("JupyterLab is not installed here. Run: pip install jupyterlab")
    target = args.notebook or _welcome()
    if not target.exists():
        raise DistkitError(f"{target}: there is no such notebook or folder.")
    if os.geteuid() == 0 and "--allow-root" not in rest:  # in a container one usually is
        rest = [*rest, "--allow-root"]
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", str(target), *rest])


def _welcome() -> Path:
    """The first notebook of the checkout that distkit runs from."""
    found = Path(__file__).resolve().parents[2] / "notebooks" / "00_welcome.ipynb"
    if found.exists():
        return found
    raise DistkitError(
        "the notebooks are not installed with distkit: get them with its source, "
        "and name a notebook or a folder: distkit lab FOLDER"
    )


def _bench(args: argparse.Namespace, rest: list[str]) -> None:
    from distkit import bench

    if args.reps is not None and args.reps < 1:
        args.wrong("--reps must be at least 1")
    names = BENCHMARKS if args.name == "all" else (args.name,)
    report = bench.measure(names, args.reps, lambda line: print(line, file=sys.stderr, flush=True))
    print(report.to_json() if args.json else report)
