"""What each rank runs under ``distkit trace -- torchrun …``: the script, recorded.

The launcher's command gets ``-m distkit_hosts.torchrun.attach FOLDER`` before the script, see
:mod:`distkit_hosts.torchrun.launching`. A script records itself with :func:`distkit.hosts.record`.
"""

from __future__ import annotations

import builtins
import runpy
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from distkit.errors import StartError
from distkit.recording import recorder
from distkit_hosts.torchrun.attached import ended, record


def main(argv: list[str]) -> None:
    """Run a script, or a module, as Python does, and record it.

    Args:
        argv: ``FOLDER SCRIPT [ARGUMENT ...]``, or ``-m MODULE`` for the script.
    """
    folder, *words = argv
    is_module = words[0] == "-m"
    words = words[is_module:]
    sys.argv[:] = words
    try:
        record(folder)
    except StartError as error:
        print(f"distkit: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    try:
        if is_module:  # the current folder is searched first, as by ``python -m``
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            _run_script(Path(words[0]))
    except BaseException as error:
        ended(error)
        raise


def _run_script(path: Path) -> None:
    """Run a file as ``__main__``."""
    sys.path[0] = str(path.resolve().parent)
    recorder.make_users(str(path))
    main = ModuleType("__main__")
    loader = SourceFileLoader("__main__", str(path))
    vars(main).update(__file__=str(path), __builtins__=builtins, __loader__=loader)
    sys.modules["__main__"] = main
    exec(compile(path.read_bytes(), str(path), "exec"), vars(main))


if __name__ == "__main__":
    main(sys.argv[1:])
