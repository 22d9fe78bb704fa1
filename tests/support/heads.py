"""A kernel on the head node of a laboratory, which runs code for a test."""

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

def say(**what):
    print(json.dumps(what), file=out, flush=True)

def follow(make):
    """Make a cluster, and report its stages."""
    global cluster
    previous = ""
    cluster = make()
    while not cluster._supervisor.ready.wait(0.05):
        stage = cluster.status().stage
        if stage != previous:
            say(stage=stage)
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
    began = time.monotonic()
    try:
        exec(json.loads(line))
        say(done=True, seconds=time.monotonic() - began)
    except Exception as error:
        say(error=str(error), kind=type(error).__name__, seconds=time.monotonic() - began)
'''


class Head:
    """Runs pieces of a program on a laboratory's head, with ``dk``, ``torch`` and ``dist``."""

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

    def begin(self, source: str) -> None:
        """Start a piece of code without waiting."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(source) + "\n")
        self._process.stdin.flush()

    def until(self, wanted: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Return the next matching message, or the final message of this piece."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            output: dict[str, Any] = json.loads(line)
            if wanted(output) or "seconds" in output:
                return output
        raise EOFError("the kernel on the head has ended")

    def end(self) -> dict[str, Any]:
        """Return the final message of a started piece: ``seconds``, and ``error`` if it failed."""
        return self.until(lambda output: False)

    def do(self, source: str) -> dict[str, Any]:
        """Run a piece of code to its end."""
        self.begin(source)
        return self.end()

    def get(self, expression: str) -> Any:
        """Return the value of an expression."""
        self.begin(f"say(value={expression})")
        output = self.until(lambda output: "value" in output)
        assert "value" in output, output
        self.end()
        return output["value"]

    def kill(self) -> None:
        """Kill the kernel, like a crash."""
        self._process.kill()
        self._process.communicate()

    def close(self) -> None:
        """Stop the kernel."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()
