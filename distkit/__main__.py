"""``python -m distkit``: the same as the command ``distkit``."""

import os
import sys

if sys.path[0] == os.getcwd():  # noqa: PTH109  # -m put it there: a random.py here would be found
    del sys.path[0]

from distkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
