"""What ``distkit lab-hosts`` says of the hosts that it has made."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from distkit.laboratory.laboratory import Laboratory


def explain(lab: Laboratory, ssh: Sequence[str]) -> str:
    """The hosts, their addresses, and how to use them."""
    width = max(map(len, lab.hosts))
    rows = [f"  {host:<{width}}  {lab.address(host)}" for host in lab.hosts]
    first = next(host for host in lab.hosts if host != "head")
    shell = shlex.join([*lab.enter("head"), "bash"])
    return "\n".join(
        [
            "Hosts:",
            *rows,
            "",
            "A shell on the head, from where `ssh` knows all hosts:",
            f"  {shell}",
            *(["", "A command, from this machine:", f"  {shlex.join([*ssh, first, 'hostname'])}"])
            * bool(lab.outside),
            "",
            "They end with this command: press Ctrl-C.",
        ]
    )
