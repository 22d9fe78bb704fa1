"""The init process of a laboratory: creates the hosts, and kills them when its owner exits.

It runs as a script in the network namespace of the router between the hosts, and needs only the
standard library. It reads its plan as one line of JSON, and replies with one line: the pids of the
hosts' first processes. A host is a shell in separate namespaces (util-linux's ``unshare``), which
executes the commands that set it up; errors go to standard error.
"""

from __future__ import annotations

import json
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

#: Prints the pid that a host's first process has on the machine, while /proc still shows the
#: machine's processes.
_BEGIN = "read pid _ < /proc/self/stat; echo $pid\n"
#: Keeps the first process running, as the parent of the host's orphans, until its input is closed.
_STAY = "echo ready\nexec env --ignore-signal=CHLD cat\n"


def main() -> None:
    """Create the hosts, wait until the owner exits or sends SIGTERM, and kill them."""
    plan = json.loads(sys.stdin.readline())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    hosts: list[subprocess.Popen[str]] = []
    try:
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        hosts += (_start(spec["skew"]) for spec in plan["hosts"])
        pids = [int(_send(host, _BEGIN)) for host in hosts]
        router = plan["router"].format(*pids)
        subprocess.run(["ip", "-batch", "-"], input=router, text=True, check=True)
        for host, spec in zip(hosts, plan["hosts"], strict=True):
            _send(host, spec["commands"] + _STAY)
        print(json.dumps(pids), flush=True)
        select.select([plan["owner"]], [], [])  # readable once that process has exited
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
    finally:
        for host in hosts:
            host.kill()
        for host in hosts:
            host.communicate()  # wait until the host's processes have exited
        shutil.rmtree(plan["folder"], ignore_errors=True)


def _start(skew: int) -> subprocess.Popen[str]:
    """Start the first process of a host; it and its children are killed when this process exits."""
    spaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--propagation=unchanged"]
    if skew:
        spaces += ["--time", f"--monotonic={skew}", f"--boottime={skew}"]
    command = ["setpriv", "--pdeathsig=KILL", "unshare", "--fork", "--kill-child", *spaces]
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, "sh", "-e"], stdin=pipe, stdout=pipe, text=True)


def _send(host: subprocess.Popen[str], commands: str) -> str:
    """Execute commands on a host and return the line that they print."""
    assert host.stdin and host.stdout
    host.stdin.write(commands)
    host.stdin.flush()
    if reply := host.stdout.readline():
        return reply.strip()
    raise OSError("a host has exited")


if __name__ == "__main__":
    main()
