"""``torchrun -m distkit.attach train.py``: a script on ranks that others start, recorded.

A script does the same by itself with :func:`distkit.record`.
"""

import sys

from distkit.cluster.rank.attached import main

if __name__ == "__main__":
    main(sys.argv[1:])
