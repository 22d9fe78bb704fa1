"""Starting ranks, running functions on them, and always cleaning up.

The only package that imports ipyparallel. Its modules, from the bottom: ``channel`` and
``spec`` (shared by all processes) · ``zygote``, ``warm``, ``processes``, ``rank``, ``group``
(in the forked processes) · ``forkserver``, ``plan``, ``limits``, ``pickling``, ``run``,
``report``, ``room``, ``card``, ``cluster``, ``local``, ``launcher`` (in the kernel).
"""

from distkit.shadowing import check

check("torch", "numpy", "zmq", "ipyparallel")
