"""``python -m distkit``: the same as the command ``distkit``."""

import sys

from distkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
