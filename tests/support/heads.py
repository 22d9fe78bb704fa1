"""A process on a laboratory's head node that runs code for a test, like a notebook's kernel."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distkit_hosts.laboratory import Laboratory

ROOT = Path(__file__).parents[2]

PROGRAM = '''
import json, os, sys, time
import torch, torch.distributed as dist
import distkit as dk

def send(**message):
    print(json.dumps(message), file=out, flush=True)

def create(factory):
    """Create a cluster, and report the stages of its start."""
    global cluster
    previous = ""
    cluster = factory()
    while not cluster._supervisor.ready.wait(0.05):
        stage = cluster.status().stage
        if stage != previous:
            send(stage=stage)
        previous = stage
    return cluster.wait()

def total():
    x = torch.ones(2)
    dist.all_reduce(x)
    return x[0].item()

def keys():
    return [*cluster._supervisor._fleet._launch.kernel["keys"][:2]]

def hosts():
    return [row[1] for row in cluster.status().rows]

out, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
for line in sys.stdin:
    start = time.monotonic()
    try:
        exec(json.loads(line))
        send(done=True, seconds=time.monotonic() - start)
    except Exception as error:
        send(error=str(error), kind=type(error).__name__, seconds=time.monotonic() - start)
'''


class Head:
    """Runs code on a laboratory's head node; ``dk``, ``torch`` and ``dist`` are imported there."""

    def __init__(self, lab: Laboratory, folder: Path, **environ: str) -> None:
        import os

        self._process = lab.popen(
            "head",
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/companions", **environ},
        )

    def start(self, source: str) -> None:
        """Start running code, without waiting for it to finish."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(source) + "\n")
        self._process.stdin.flush()

    def wait_for(self, matches: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Return the next message that matches, or else the final message of the code."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            output: dict[str, Any] = json.loads(line)
            if matches(output) or "seconds" in output:
                return output
        raise EOFError("the process on the head has exited")

    def wait(self) -> dict[str, Any]:
        """Wait for the code to finish; return its ``seconds``, and the ``error`` if it failed."""
        return self.wait_for(lambda output: False)

    def run(self, source: str) -> dict[str, Any]:
        """Run code to completion, and return the result of :meth:`wait`."""
        self.start(source)
        return self.wait()

    def get(self, expression: str) -> Any:
        """Return the value of an expression."""
        self.start(f"send(value={expression})")
        output = self.wait_for(lambda output: "value" in output)
        assert "value" in output, output
        self.wait()
        return output["value"]

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()

    def close(self) -> None:
        """Stop the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()
