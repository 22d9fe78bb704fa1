"""The command line: ``distkit demo``, ``trace``, ``replay``, ``doctor`` and others.

A command imports its modules when it runs, so that ``distkit --help`` is fast. Errors from distkit
and the file system are printed without a traceback, and the exit status is 1. It is 2 for wrong
arguments and 130 for Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import textwrap
import webbrowser
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from distkit.errors import CompanionError, DistkitError, RunError
from distkit.imports import load

if TYPE_CHECKING:
    from distkit.diagnosis.rules import Finding
    from distkit.trace.trace import Trace


#: The commands of companions, and the modules that add them to the parser.
COMPANIONS = {
    "demo": "distkit_examples.cli",
    **dict.fromkeys(("grade", "assignments", "answers", "lab"), "distkit_course.cli"),
    "doctor": "distkit_hosts.cli",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: the arguments after ``distkit``; by default ``sys.argv[1:]``.

    Raises:
        SystemExit: The arguments are wrong (status 2), or help was requested (0).
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show ░ shows ?
    arguments = list(sys.argv[1:] if argv is None else argv)
    end = next(
        (i for i, argument in enumerate(arguments) if _starts_remainder(argument, arguments)),
        len(arguments),
    )
    remainder = arguments[end + 1 :] if arguments[end : end + 1] == ["--"] else arguments[end:]
    try:
        if arguments and arguments[0] in COMPANIONS:
            load(COMPANIONS[arguments[0]])
        args = _parser().parse_args(arguments[:end])
        return int(args.run(args, remainder) or 0)
    except KeyboardInterrupt:
        print("\ndistkit: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # a reader such as head or less has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except DistkitError as error:
        print(f"distkit: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"distkit: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1


def _starts_remainder(argument: str, arguments: list[str]) -> bool:
    """Return whether this and the following arguments are for another program, e.g. JupyterLab."""
    return argument == "--" or (
        arguments[0] == "lab" and argument.startswith("-") and argument not in ("-h", "--help")
    )


def _parser() -> argparse.ArgumentParser:
    from distkit import __version__

    description = "Run real torch.distributed ranks and record their communication."
    parser = argparse.ArgumentParser(prog="distkit", description=description)
    parser.add_argument("--version", action="version", version=f"distkit {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.help, usage=command.usage)
        for argument, options in command.arguments.items():
            subparser.add_argument(argument, **options)
        subparser.set_defaults(run=command.run, usage_error=subparser.error)
    for module in dict.fromkeys(COMPANIONS.values()):
        with suppress(CompanionError):
            load(module).add(commands)
    return parser


# -- distkit trace and distkit replay ------------------------------------------------------------


def _trace(args: argparse.Namespace, remainder: list[str]) -> int | None:
    command = [*args.command, *remainder]
    if not command:
        args.usage_error("missing script; usage: distkit trace -- train.py")
    if Path(command[0]).suffix != ".py":
        hosts = load("distkit_hosts.cli")
        if hosts.launching.is_launcher(command):
            return int(hosts.trace(args, command))
    if not Path(command[0]).is_file():
        args.usage_error(f"{command[0]}: script not found")
    for file in (args.out, args.html):
        check_folder(file, args.usage_error)
    from distkit.cluster.runs.run import Run, run_ranks

    try:
        run = run_ranks(command[0], args.ranks, *command[1:], seed=args.seed)
    except (RunError, KeyboardInterrupt) as error:
        failed_run = getattr(error, "run", None)
        if isinstance(failed_run, Run):  # its trace shows how far the run got
            save_trace(failed_run.trace, args)
        raise
    save_trace(run.trace, args)
    return None


def save_trace(trace: Trace, args: argparse.Namespace) -> None:
    """Save a trace and print a summary."""
    trace.save(args.out)
    print(f"{summary(trace)}. Saved in {args.out}.")
    if args.html:
        replay_page({Path(args.out).stem: trace}, args.html)


def _replay(args: argparse.Namespace, remainder: list[str]) -> None:
    check_folder(args.html, args.usage_error)
    trace, name = open_trace(args.files), args.files[0].stem
    print(f"{trace.info.name or name}: {summary(trace)}.")
    print_findings(trace.diagnose())
    page = args.html or Path(tempfile.mkdtemp(prefix="distkit-"), f"{name}.html")
    replay_page({name: trace}, page)
    if not args.no_browser and not webbrowser.open(page.resolve().as_uri()):
        print("Could not start a browser. Open the address above yourself.")


def open_trace(files: list[Path]) -> Trace:
    """Load the trace in these files, or the recorded run with this name."""
    from distkit.trace.trace import Trace

    if not files[0].exists():
        recorded = load("distkit_examples.recorded").RECORDED
        files = [recorded.get(file.name, file) for file in files]
    return Trace.load(files[0] if len(files) == 1 else files)


# -- distkit explain -----------------------------------------------------------------------------


def _explain(args: argparse.Namespace, remainder: list[str]) -> None:
    from distkit.diagnosis.rules import RULES

    if args.finding is None:
        for code, listed in RULES.items():
            print_wrapped(f"{code}  {listed.name:<20}  {listed.title()}", 29)
        return
    rules = {key: rule for rule in RULES.values() for key in (rule.code.lower(), rule.name)}
    rule = rules.get(args.finding.lower())
    if rule is None:
        raise DistkitError(f"unknown finding {args.finding}. List all with: distkit explain")
    print(load("distkit_examples.hangs").page(rule))


# -- distkit bench, which needs a checkout -------------------------------------------------------


#: The root of the checkout, if distkit runs from one.
CHECKOUT = Path(__file__).resolve().parents[1]


def _bench(args: argparse.Namespace, remainder: list[str]) -> None:
    if not CHECKOUT.joinpath("benchmarks").is_dir():
        raise DistkitError(
            "the benchmarks are not installed with distkit. Clone the repository, then run: "
            "pip install --editable FOLDER"
        )
    sys.path.insert(0, str(CHECKOUT))
    import benchmarks

    if args.name not in {"all", *benchmarks.ALL}:
        args.usage_error(
            f"unknown benchmark {args.name!r}: choose {', '.join(benchmarks.ALL)} or all"
        )
    names = benchmarks.ALL if args.name == "all" else [args.name]
    log = partial(print, file=sys.stderr, flush=True)
    report = benchmarks.measure(
        names, args.reps, log, **({"stand_in": args.stand_in} if args.stand_in else {})
    )
    print(report.to_json() if args.json else report)


# -- shared by several commands -------------------------------------------------------------------


def replay_page(traces: dict[str, Trace], file: Path, **options: Any) -> None:
    """Write a stand-alone page with ``to_html`` and print its address."""
    from distkit.views.widget.page import to_html

    to_html(traces, file, **options)
    print(f"Replay: {file.resolve().as_uri()}")


def check_folder(file: Path | None, usage_error: Callable[[str], NoReturn]) -> None:
    """Report a usage error in advance if a file cannot be written."""
    if file is None:
        return
    if file.is_dir():
        usage_error(f"{file} is a folder: pass the name of a file")
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        usage_error(f"{file} cannot be written: check that the folder exists and is writable")


def print_findings(findings: Iterable[Finding]) -> None:
    """Print the findings of a diagnosis, each with its remedy."""
    for finding in findings:
        text = f"{finding.message}\n{finding.remedy} [{finding.code}]"
        for i, line in enumerate(text.splitlines()):
            print_wrapped(("    " if i else "  - ") + line, 4)


def print_wrapped(line: str, indent: int) -> None:
    """Print a line, wrapped to the terminal's width; continuation lines are indented."""
    wrap = partial(textwrap.wrap, subsequent_indent=" " * indent, break_on_hyphens=False)
    print("\n".join(wrap(line, shutil.get_terminal_size().columns)))


def summary(trace: Trace) -> str:
    """Return a one-line summary of a trace."""
    from distkit._format import count

    dropped = f", {count(trace.dropped, 'event')} dropped" if trace.dropped else ""
    messages, calls = len(trace.messages), len(trace.collectives)
    return (
        f"{count(len(trace.ranks), 'rank')}, {trace.seconds:.2f} s: "
        f"{count(messages, 'message')}, {count(calls, 'collective')}{dropped}"
    )


# -- arguments -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """A command: the function that runs it, its help text, its arguments and its usage line."""

    run: Callable[[argparse.Namespace, list[str]], object]
    help: str
    arguments: dict[str, dict[str, Any]]
    usage: str | None = None


COMMANDS = {
    "trace": Command(
        _trace,
        "run a torchrun-style script and record its communication",
        {
            "--ranks": {
                "type": int,
                "default": 4,
                "metavar": "N",
                "help": "number of ranks (default: 4)",
            },
            "--seed": {
                "type": int,
                "metavar": "S",
                "help": "seed for the ranks' random numbers, to repeat a run",
            },
            "--out": {
                "type": Path,
                "default": Path("trace.gz"),
                "metavar": "FILE",
                "help": "the trace file (default: trace.gz); with torchrun, each rank writes a "
                "file into a folder with this name, without .gz",
            },
            "--html": {"type": Path, "metavar": "FILE", "help": "also write a replay page"},
            "command": {"nargs": argparse.REMAINDER, "help": argparse.SUPPRESS},
        },
        "distkit trace [--ranks N] [--seed S] [--out FILE] [--html FILE]"
        " -- script.py [ARGUMENT ...]\n"
        "       distkit trace [--out FILE] [--html FILE]"
        " -- torchrun [OPTION ...] script.py [ARGUMENT ...]",
    ),
    "replay": Command(
        _replay,
        "open a saved trace in the browser; does not need torch",
        {
            "files": {
                "type": Path,
                "metavar": "FILE",
                "nargs": "+",
                "help": "a trace from trace.save(path) or distkit trace; PyTorch's flight-recorder "
                "dumps or profiler traces of one run (one file per rank, or their folder); or a "
                "trace that distkit includes: ring_16, hosts_12, sync_sgd_8, servers_6, "
                "simulated_64, h100_4 or h200_1",
            },
            "--html": {
                "type": Path,
                "metavar": "OUT",
                "help": "the file to write the page to (default: a temporary file)",
            },
            "--no-browser": {
                "action": "store_true",
                "help": "write the page without opening it",
            },
        },
        "distkit replay FILE [FILE ...] [--html OUT] [--no-browser]",
    ),
    "explain": Command(
        _explain,
        "explain what a finding means, for example DK303",
        {
            "finding": {
                "nargs": "?",
                "metavar": "CODE",
                "help": "a finding's code or name (default: list all findings)",
            }
        },
    ),
    "bench": Command(
        _bench,
        "measure distkit and compare it with other programs",
        {
            "name": {"metavar": "NAME", "help": "the name of a benchmark, or all"},
            "--json": {"action": "store_true", "help": "print a JSON object instead of a table"},
            "--reps": {"type": int, "metavar": "N", "help": "repetitions of each measurement"},
            "--stand-in": {
                "choices": ["cpu"],
                "help": "run the gpu benchmark on the CPU; the results do not apply to GPUs",
            },
        },
    ),
}
