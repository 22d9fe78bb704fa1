"""Two simulated machines: local agents with separate folders, connected by TCP."""

from __future__ import annotations

from typing import Any

import distkit as dk

ALPHA, BETA = "127.0.0.1", "127.0.0.2"

#: A fake ssh that runs the command on this machine.
_SSH = """
while [ "${1#-}" != "$1" ]; do case "$1" in -o|-p) shift;; esac; shift; done
shift; exec sh -c "$*"
"""


def two_machines(alpha: int, beta: int, **options: Any) -> dk.Cluster:
    """Start a cluster with ``alpha`` ranks on one machine and ``beta`` ranks on the other."""
    ssh = ["sh", "-c", _SSH, "ssh"]
    return dk.Cluster(hosts={ALPHA: alpha, BETA: beta}, ssh_cmd=ssh, **options)
