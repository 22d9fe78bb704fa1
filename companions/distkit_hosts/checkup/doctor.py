"""The doctor: what will and will not run here, or on several machines, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distkit_hosts.checkup import examine
from distkit_hosts.checkup.report import Report


def doctor(
    hosts: Sequence[str] = (),
    *,
    ssh_cmd: Sequence[str] = ("ssh",),
    ssh_args: Sequence[str] = (),
    python: str | None = None,
    say: Callable[[str], None] = lambda stage: None,
) -> Report:
    """Examine this machine, or several and the ways between them, before ranks run there.

    It takes seconds: a dead host costs ten.

    Args:
        hosts: other machines, each as ssh takes it: ``"alpha"``, ``"me@10.0.0.2"``.
        ssh_cmd: what reaches them, as in ipyparallel's launchers: ssh, or a program that takes a
            host and a command line.
        ssh_args: its options, such as ``["-F", "lab.config"]``.
        python: the Python on the hosts; if not given, this one where it is there, or python3.
        say: called with the name of each step that begins.

    Raises:
        DistkitError: a host is named twice, or there is no ssh here.

    Example:
        >>> report = dk.hosts.doctor()                             # doctest: +SKIP
        >>> dk.hosts.doctor(hosts=["alpha", "beta"]).failures      # doctest: +SKIP
        []
    """
    if not hosts:
        return Report(examine.alone())
    reach = examine.Reach(tuple(ssh_cmd), tuple(ssh_args), python)
    return Report(examine.several(hosts, reach, say))
