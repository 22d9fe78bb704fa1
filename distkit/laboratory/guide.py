"""What ``distkit lab-hosts`` says of the hosts that it has made."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from distkit.laboratory.laboratory import Laboratory


def explain(lab: Laboratory, ssh: Sequence[str]) -> str:
    """The hosts, their addresses, and how to use them."""
    width = max(map(len, lab.hosts))
    rows = [f"  {host:<{width}}  {lab.address(host)}" for host in lab.hosts]
    shell = shlex.join([*lab.enter("head"), "bash"])
    lines = ["Hosts:", *rows, "", "A shell on the head, where `ssh` knows all hosts:", f"  {shell}"]
    if lab.outside:
        command = shlex.join([*ssh, lab.hosts[-1], "hostname"])
        lines += ["", "A command on a host, from this machine:", f"  {command}"]
    return "\n".join([*lines, "", "They end with this command: press Ctrl-C."])
