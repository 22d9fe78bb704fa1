"""Run the command ``distkit`` with ``python -m distkit``."""

import os
import sys

if sys.path[0] == os.getcwd():  # noqa: PTH109  # -m adds it, so a random.py here would be imported
    del sys.path[0]

from distkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
