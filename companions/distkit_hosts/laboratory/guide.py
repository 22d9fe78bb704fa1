"""What ``distkit lab-hosts`` says of the hosts that it has made."""

from __future__ import annotations

import shlex

from distkit_hosts.laboratory.laboratory import Laboratory


def explain(lab: Laboratory) -> str:
    """The hosts, their addresses, and how to use them."""
    width = max(map(len, lab.hosts))
    rows = [f"  {host:<{width}}  {lab.address(host)}" for host in lab.hosts]
    shell = shlex.join([*lab.enter("head"), "bash"])
    ranks = {host: 2 for host in lab.hosts[1:]}
    lines = ["Hosts:", *rows, "", "A shell on the head:", f"  {shell}"]
    lines += ["There, `ssh` knows all hosts, and Python", f"  dk.Cluster(hosts={ranks})"]
    if lab.outside:
        options = ",\n".join(f"      {name}={it!r}" for name, it in lab.options().items())
        command = shlex.join([*lab.ssh(), lab.hosts[-1], "hostname"])
        lines += ["", "From this machine:", f"  {command}"]
        lines += [f"  dk.Cluster(\n      hosts={ranks},\n{options},\n  )"]
    return "\n".join([*lines, "", "The hosts end with this command: press Ctrl-C."])
