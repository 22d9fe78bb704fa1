"""``distkit lab`` and ``distkit bench``: what the checkout has beside the package."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

from distkit.errors import DistkitError

#: The checkout that distkit runs from has the notebooks and the benchmarks beside the package.
CHECKOUT = Path(__file__).resolve().parents[2]
#: The copies' folder in the checkout, which git ignores, and what it knows of their originals.
FOLDER, RECORD = "my-notebooks", ".originals.json"


def add_lab(commands: Any) -> None:
    """Tell the parser about ``lab``."""
    lab = commands.add_parser(
        "lab",
        help="open the notebooks in JupyterLab",
        usage="distkit lab [NOTEBOOK] [-- OPTION ...]",
    )
    what = "a notebook or a folder; options after -- are JupyterLab's"
    lab.add_argument("notebook", nargs="?", type=Path, metavar="NOTEBOOK", help=what)
    lab.set_defaults(run=_lab)


def add_bench(commands: Any) -> None:
    """Tell the parser about ``bench``."""
    bench = commands.add_parser("bench", help="measure distkit and compare it with other programs")
    bench.add_argument("name", metavar="NAME", help="a file of the checkout's benchmarks/, or all")
    bench.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    bench.add_argument("--reps", type=int, metavar="N", help="repetitions of each measurement")
    bench.set_defaults(run=_bench, wrong=bench.error)


#: As ``python -m jupyterlab``, but a random.py in the reader's folder is not Python's random.
JUPYTERLAB = "import sys; del sys.path[0]; from jupyterlab.labapp import main; sys.exit(main())"


def _lab(args: argparse.Namespace, rest: list[str]) -> None:
    from importlib.util import find_spec

    if find_spec("jupyterlab") is None:
        raise DistkitError("JupyterLab is not installed here. Run: pip install jupyterlab")
    target = args.notebook or _welcome()
    if args.notebook is None:  # the notebooks point to distkit's sources
        rest = [f"--ServerApp.root_dir={CHECKOUT}", *rest]
    if not target.exists():
        raise DistkitError(f"{target}: there is no such notebook or folder.")
    if os.geteuid() == 0 and "--allow-root" not in rest:  # in a container one usually is
        rest = [*rest, "--allow-root"]
    os.execv(sys.executable, [sys.executable, "-c", JUPYTERLAB, str(target), *rest])


def _welcome() -> Path:
    """The reader's copy of the first notebook of the checkout that distkit runs from."""
    if CHECKOUT.joinpath("notebooks").is_dir():
        folder, older = copies(CHECKOUT)
        for name in older:
            print(
                f"{folder.name}/{name}: yours is kept; there is a newer one in notebooks/. "
                "Rename yours to get it."
            )
        return folder / "00_welcome.ipynb"
    raise DistkitError(
        "the notebooks are not installed with distkit: get them with its source, "
        "and name a notebook or a folder: distkit lab FOLDER"
    )


def copies(checkout: Path) -> tuple[Path, list[str]]:
    """Bring the copies up to date; their folder, and those that are older than their originals.

    A copy that its reader has changed, if only by running it, is never touched.
    """
    folder = checkout / FOLDER
    folder.mkdir(exist_ok=True)
    record = folder / RECORD
    known: dict[str, str] = json.loads(record.read_text()) if record.exists() else {}
    older = []
    for original in sorted((checkout / "notebooks").glob("*.ipynb")):
        copy, now = folder / original.name, _digest(original)
        if not copy.exists() or _digest(copy) == known.get(copy.name):
            shutil.copyfile(original, copy)
            known[copy.name] = now
        elif known.get(copy.name) != now:
            older.append(copy.name)
    record.write_text(json.dumps(known, indent=1))
    return folder, older


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _bench(args: argparse.Namespace, rest: list[str]) -> None:
    if not CHECKOUT.joinpath("benchmarks").is_dir():
        raise DistkitError(
            "the benchmarks are not installed with distkit: get them with its source, "
            "and install that: pip install --editable FOLDER"
        )
    sys.path.insert(0, str(CHECKOUT))
    import benchmarks

    if args.name not in (*benchmarks.ALL, "all"):
        args.wrong(f"there is no benchmark {args.name!r}: {', '.join(benchmarks.ALL)} or all")
    if args.reps is not None and args.reps < 1:
        args.wrong("--reps must be at least 1")
    names = benchmarks.ALL if args.name == "all" else [args.name]
    say = partial(print, file=sys.stderr, flush=True)
    report = benchmarks.measure(names, args.reps, say)
    print(report.to_json() if args.json else report)
