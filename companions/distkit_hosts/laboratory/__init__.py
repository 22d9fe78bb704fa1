"""Several hosts on one Linux machine, for lessons and tests.

::

    from distkit_hosts.laboratory import Laboratory

    with Laboratory(["alpha", "beta"]) as lab:
        lab.run("alpha", ["hostname"])          # a command on a host; options as for subprocess.run
        lab.cut("beta")                         # beta is now unreachable

Each host has its own network, hostname, processes, shared memory and temporary folder. All other
files are shared with the machine. An ``init`` process creates the hosts from a ``plan``.
"""

from distkit_hosts.laboratory.laboratory import Laboratory

__all__ = ["Laboratory"]
