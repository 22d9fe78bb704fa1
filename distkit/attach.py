"""``torchrun -m distkit.attach train.py``: a script on ranks that others start, recorded.

It is run, not imported: ``distkit.attach`` is the function with which a script does the same.
"""

import sys

from distkit.recording.attached import main

if __name__ == "__main__":
    main(sys.argv[1:])
