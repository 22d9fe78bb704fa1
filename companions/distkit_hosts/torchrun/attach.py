"""Run and record a script, as each rank does under ``distkit trace -- torchrun …``.

:mod:`distkit_hosts.torchrun.launching` inserts ``-m distkit_hosts.torchrun.attach FOLDER`` before
the script in the launcher's command. A script records itself with :func:`distkit.hosts.record`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from distkit.cluster.rank.interpreter import run_script
from distkit.errors import StartError
from distkit.recording import recorder
from distkit_hosts.torchrun.attached import ended, record


def main(argv: list[str]) -> None:
    """Run a script or a module as Python does, and record it.

    Args:
        argv: ``FOLDER SCRIPT [ARGUMENT ...]``, or ``-m MODULE`` for the script.
    """
    folder, *command = argv
    is_module = command[0] == "-m"
    command = command[is_module:]
    sys.argv[:] = command
    try:
        record(folder)
    except StartError as error:
        print(f"distkit: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    try:
        if is_module:  # found in the current folder first, as with ``python -m``
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        else:
            del sys.path[0]  # in favour of the script's own folder
            recorder.add_user_file(command[0])
            run_script(Path(command[0]), command[1:])
    except BaseException as error:
        ended(error)
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
