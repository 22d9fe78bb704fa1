"""Runs the ``distkit`` command as ``python -m distkit``."""

import os
import sys

# python -m adds the current folder, in which a file such as random.py would shadow a module
if sys.path[0] == os.getcwd():  # noqa: PTH109
    del sys.path[0]

from distkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
