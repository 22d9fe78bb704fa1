"""The command line: ``distkit demo``, ``trace``, ``hang``, ``lab`` and ``bench``.

What a command needs is imported when it runs, so that ``distkit --help`` is quick. Errors that
distkit raises on purpose become one message and exit status 1; wrong arguments give 2, Ctrl-C 130.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from distkit.errors import CommunicationWarning, DeadlockError, DistkitError, RunError
from distkit.events import COLLECTIVES

if TYPE_CHECKING:
    from distkit.cluster.cluster import Cluster
    from distkit.cluster.run import Run
    from distkit.demos import Demo, Progress
    from distkit.events import Trace
    from distkit.hangs import Case

    #: Shows that something is going on: its name and title in, its progress out.
    Bar = Callable[[str, str], AbstractContextManager[Progress]]

BENCHMARKS = ("start", "memory", "tap", "orphans", "step", "hang", "views")


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

    about = "Real torch.distributed ranks, and what they said to each other."
    parser = argparse.ArgumentParser(prog="distkit", description=about)
    parser.add_argument("--version", action="version", version=f"distkit {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in (_add_demo, _add_trace, _add_hang, _add_lab, _add_bench):
        add(commands)
    return parser


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser("demo", help="see ranks send, reduce and train, on real data")
    names = "p2p, all_reduce, sync_sgd, parameter_server or all (the default)"
    demo.add_argument("names", nargs="*", metavar="NAME", default=["all"], help=names)
    demo.add_argument("--html", type=Path, metavar="FILE", help="write a replay page of the traces")
    ranks = "ranks (4), or workers of the parameter server (2)"
    demo.add_argument("--ranks", type=int, metavar="N", help=ranks)
    demo.set_defaults(run=_demo, wrong=demo.error)


def _add_trace(commands: Any) -> None:
    trace = commands.add_parser(
        "trace", help="run a torchrun-style script and record what its ranks say",
        usage="distkit trace [--ranks N] [--out FILE] [--html FILE] -- script.py [ARGUMENT ...]",
    )  # fmt: skip
    trace.add_argument("--ranks", type=int, default=4, metavar="N", help="how many ranks (4)")
    trace.add_argument("--out", type=Path, default=Path("trace.gz"), metavar="FILE",
                       help="where the trace goes (trace.gz)")  # fmt: skip
    trace.add_argument("--html", type=Path, metavar="FILE", help="write a replay page, too")
    trace.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    trace.set_defaults(run=_trace, wrong=trace.error)


def _add_hang(commands: Any) -> None:
    hang = commands.add_parser("hang", help="run a program that hangs, and read why it does")
    what = "a program of the catalogue, which is printed without it"
    hang.add_argument("name", nargs="?", metavar="NAME", help=what)
    hang.set_defaults(run=_hang, wrong=hang.error)


def _add_lab(commands: Any) -> None:
    lab = commands.add_parser(
        "lab", help="open the notebooks in JupyterLab",
        usage="distkit lab [NOTEBOOK] [-- OPTION ...]",
    )  # fmt: skip
    what = "a notebook or a folder; options after -- are JupyterLab's"
    lab.add_argument("notebook", nargs="?", type=Path, metavar="NOTEBOOK", help=what)
    lab.set_defaults(run=_lab)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure distkit beside what else there is")
    bench.add_argument("name", metavar="NAME", choices=[*BENCHMARKS, "all"],
                       help=", ".join(BENCHMARKS) + " or all")  # fmt: skip
    bench.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    bench.add_argument("--reps", type=int, metavar="N", help="repetitions of each measurement")
    bench.set_defaults(run=_bench, wrong=bench.error)


# -- demo ------------------------------------------------------------------------


def _demo(args: argparse.Namespace, rest: list[str]) -> None:
    from distkit import demos

    names = list(dict.fromkeys([*args.names, *rest]))
    unknown = [name for name in names if name not in demos.ALL and name != "all"]
    if unknown:
        args.wrong(f"there is no demo {unknown[0]!r}: choose from {', '.join(demos.ALL)}, or all")
    _check_folder(args.html, args.wrong)
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
        _replay({k: trace for demo in shown for k, trace in demo.traces.items()}, args.html)


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

    columns = [rich.TextColumn("{task.fields[name]:<16} {task.description}"), rich.BarColumn(None),
               rich.TaskProgressColumn(), rich.TimeElapsedColumn()]  # fmt: skip
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


# -- trace -----------------------------------------------------------------------


def _trace(args: argparse.Namespace, rest: list[str]) -> None:
    command = [*args.command, *rest]
    if not command:
        args.wrong("name the script: distkit trace -- train.py")
    if not Path(command[0]).is_file():
        args.wrong(f"{command[0]}: there is no such script")
    for file in (args.out, args.html):
        _check_folder(file, args.wrong)
    from distkit.cluster.local import run_ranks
    from distkit.cluster.run import Run

    try:
        run = run_ranks(command[0], args.ranks, *command[1:])
    except (RunError, KeyboardInterrupt) as error:
        unfinished = getattr(error, "run", None)
        if isinstance(unfinished, Run):  # how far it came is what one wants to see
            _keep(unfinished.trace, args)
        raise
    _keep(run.trace, args)


def _keep(trace: Trace, args: argparse.Namespace) -> None:
    """Save a trace and say what is in it."""
    _write(args.out, lambda: trace.save(args.out))
    shared = {trace.matches[s.rank, s.seq] for s in trace.spans if s.op in COLLECTIVES}
    lost = f", {trace.dropped} events dropped" if trace.dropped else ""
    print(
        f"{_count(trace.ranks, 'rank')}, {trace.seconds:.2f} s: "
        f"{_count(trace.messages, 'message')}, {_count(shared, 'collective')}{lost}. "
        f"Saved in {args.out}."
    )
    if args.html:
        _replay({Path(args.out).stem: trace}, args.html)


def _count(things: Sized, word: str) -> str:
    return f"{len(things)} {word}{'s' * (len(things) != 1)}"


def _replay(traces: dict[str, Trace], file: Path) -> None:
    """Write the stand-alone page and say where it is."""
    from distkit.views.page import to_html

    _write(file, lambda: to_html(traces, file))
    print(f"Replay: {file.resolve().as_uri()}")


def _check_folder(file: Path | None, wrong: Callable[[str], NoReturn]) -> None:
    """Find out before the work, not after it, that its result cannot be written."""
    if file is None:
        return
    if file.is_dir():
        wrong(f"{file} is a folder: name a file")
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        wrong(f"{file}: no file can be written there")


def _write(file: Path, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise DistkitError(f"{file} cannot be written ({error.strerror}).") from error


# -- hang ------------------------------------------------------------------------


def _hang(args: argparse.Namespace, rest: list[str]) -> None:
    from distkit import hangs

    if args.name is None:
        for name, case in hangs.ALL.items():
            print(f"{name:<20} {case.how:<8}  {case.title}")
        return
    if args.name not in hangs.ALL:
        args.wrong(f"there is no hang {args.name!r}: choose from {', '.join(hangs.ALL)}")
    case = hangs.ALL[args.name]
    _print_program(case)
    run, how = _suffer(case)
    print(f"\n{how} after {run.seconds:.2f} s:")
    for finding in run.findings:
        _print_wrapped(f"{finding.message}\n{finding.remedy}")
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
    from distkit.cluster.local import run_ranks
    from distkit.cluster.run import Run

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CommunicationWarning)  # it is printed anyway
            return run_ranks(case.program, case.ranks), "It came to its end"
    except RunError as error:
        if not isinstance(error.run, Run):
            raise
        how = "It could not go on" if isinstance(error, DeadlockError) else "It failed"
        return error.run, how


def _print_wrapped(text: str) -> None:
    """Each line of a text as a paragraph that fits the terminal, the first one marked."""
    width = shutil.get_terminal_size().columns
    for i, line in enumerate(text.splitlines()):
        start = "    " if i else "  - "
        print("\n".join(textwrap.wrap(line, width, initial_indent=start, subsequent_indent="    ")))


# -- lab and bench ------------------------------------------------------------------


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
    found = Path(__file__).resolve().parents[1] / "notebooks" / "00_welcome.ipynb"
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
