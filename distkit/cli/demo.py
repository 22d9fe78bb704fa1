"""``distkit demo`` and ``distkit hang``: demonstrations, and programs that hang and why they do."""

from __future__ import annotations

import argparse
import warnings
from typing import TYPE_CHECKING, Any

from distkit.cli.traces import print_findings
from distkit.errors import CommunicationWarning, DeadlockError, DistkitError, RunError

if TYPE_CHECKING:
    from distkit.cluster.runs.run import Run
    from distkit.hangs import Case

import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from distkit.cli.traces import check_folder, replay_page

if TYPE_CHECKING:
    from distkit.cluster.cluster import Cluster
    from distkit.demos import Demo, Progress

    #: Shows that something is going on: its name and title in, its progress out.
    Bar = Callable[[str, str], AbstractContextManager[Progress]]


def add_demo(commands: Any) -> None:
    """Tell the parser about ``demo``."""
    demo = commands.add_parser("demo", help="see ranks send, reduce and train, on real data")
    names = "p2p, all_reduce, sync_sgd, parameter_server or all (the default)"
    demo.add_argument("names", nargs="*", metavar="NAME", default=["all"], help=names)
    demo.add_argument("--html", type=Path, metavar="FILE", help="write a replay page of the traces")
    ranks = "ranks (4), or workers of the parameter server (2)"
    demo.add_argument("--ranks", type=int, metavar="N", help=ranks)
    demo.set_defaults(run=_demo, wrong=demo.error)


def _demo(args: argparse.Namespace, rest: list[str]) -> None:
    from distkit import demos

    names = list(dict.fromkeys([*args.names, *rest]))
    unknown = [name for name in names if name not in demos.ALL and name != "all"]
    if unknown:
        args.wrong(f"unknown demo {unknown[0]!r}: choose from {', '.join(demos.ALL)}, or all")
    check_folder(args.html, args.wrong)
    chosen = [name for name in demos.ALL if name in names or "all" in names]
    shown: list[Demo] = []
    try:
        with _bars() as bar:
            for demo in _perform(chosen, args.ranks, bar):
                shown.append(demo)
    finally:
        for demo in shown:
            _print_demo(demo)
    if args.html:
        print()
        replay_page({k: trace for demo in shown for k, trace in demo.traces.items()}, args.html)


def _perform(names: list[str], ranks: int | None, bar: Bar) -> Iterator[Demo]:
    """The demos one after the other; those that only need ranks share a cluster."""
    from distkit import demos

    served = [name for name in names if name == "parameter_server"]
    plain = [name for name in names if name not in served]
    for together, roles in (
        (plain, {"ranks": demos.RANKS if ranks is None else ranks}),
        (served, {"workers": 2 if ranks is None else ranks, "servers": 2}),
    ):
        if together:
            with _cluster(bar, roles) as cluster:
                for name in together:
                    demo = demos.ALL[name]
                    with bar(name, (demo.__doc__ or "").partition(":")[0]) as progress:
                        yield demo(cluster, progress)


@contextmanager
def _cluster(bar: Bar, roles: dict[str, Any]) -> Iterator[Cluster]:
    from distkit.cluster.cluster import Cluster

    with Cluster(**roles) as cluster:
        with bar("starting", ", ".join(f"{n} {role}" for role, n in roles.items())) as progress:
            cluster.wait()
            progress(1)
        yield cluster


def _print_demo(demo: Demo) -> None:
    """A demo's title and lines; pictures fit any terminal, sentences are wrapped to it."""
    print(f"\n{demo.title}")
    width = shutil.get_terminal_size().columns
    for line in demo.lines:
        inner = " " * (len(line) - len(line.lstrip()) + 4)
        print("\n".join(textwrap.wrap(f"  {line}", width, subsequent_indent=inner)))


# -- showing that something goes on -------------------------------------------------


def _bars() -> AbstractContextManager[Bar]:
    """Progress bars on a terminal, lines elsewhere; both on stderr."""
    from rich.console import Console

    console = Console(stderr=True)
    return _rich_bars(console) if console.is_interactive else nullcontext(_line)


@contextmanager
def _rich_bars(console: Any) -> Iterator[Bar]:
    from rich import progress as rich

    columns = [
        rich.TextColumn("{task.fields[name]:<16} {task.description}"),
        rich.BarColumn(None),
        rich.TaskProgressColumn(),
        rich.TimeElapsedColumn(),
    ]
    with rich.Progress(*columns, console=console, expand=True) as bars:

        @contextmanager
        def bar(name: str, title: str) -> Iterator[Progress]:
            task = bars.add_task(title, name=name, total=None)
            try:
                yield lambda done: bars.update(task, total=1, completed=done)
            finally:
                bars.stop_task(task)

        yield bar


@contextmanager
def _line(name: str, title: str) -> Iterator[Progress]:
    started = time.perf_counter()
    yield lambda done: None
    print(f"{name:<16} {title}: {time.perf_counter() - started:.1f} s", file=sys.stderr)


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
