"""Several hosts on one Linux machine, to learn and test what needs more than one.

::

    from distkit_hosts.laboratory import Laboratory

    with Laboratory(["alpha", "beta"]) as lab:
        lab.run("alpha", ["hostname"])          # a command on a host; all else as subprocess.run
        lab.cut("beta")                         # nobody reaches beta now

Each host has its own network, hostname, processes, shared memory and temporary folder; the other
files are those of the machine. The ``keeper`` makes them by a ``plan`` and holds them;
``services`` run on them.
"""

from distkit_hosts.laboratory.laboratory import Laboratory

__all__ = ["Laboratory"]
