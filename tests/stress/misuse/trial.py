"""Runs a misuse on a cluster, and checks the report, leftover processes, and the next run."""

from __future__ import annotations

import re
from contextlib import suppress

import psutil

import distkit as dk
from tests.stress.misuse.catalog import Misuse
from tests.support.training import sum_over_ranks

#: Time limits of a run, and for its processes to end [s].
RUN_TIMEOUT, END_TIMEOUT = 60.0, 5.0


class Trial:
    """A cluster of two ranks on which misuses run."""

    def __init__(self) -> None:
        self._open()

    def _open(self) -> None:
        self.cluster = dk.Cluster(2)
        self.cluster.wait()
        self._idle = _descendants()

    def faults(self, misuse: Misuse) -> list[str]:
        """Run a misuse on rank 1; return wrong reports, leftovers, and errors from the next run.

        A cluster with faults is replaced.
        """
        try:
            found = [*self._run(misuse), *self._leftovers()]
            after = self.cluster.submit(sum_over_ranks).wait(RUN_TIMEOUT).results
            found += [] if after == [3, 3] else [f"the next run returned {after}"]
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        if found:
            self.close()
            self._open()
        return found

    def close(self) -> None:
        """Stop the cluster."""
        self.cluster.stop()

    def _run(self, misuse: Misuse) -> list[str]:
        run = self.cluster.submit(misuse.program)
        if misuse.endless:
            with suppress(TimeoutError):
                run.wait(2.0)
            self.cluster.interrupt()
        value, shown = None, ""
        try:
            value = run.wait(RUN_TIMEOUT).results[1]
        except BaseException as error:  # including KeyboardInterrupt
            shown = f"{type(error).__name__}: {error}"
            first = str(error).partition("\n")[0]
            matches = bool(misuse.ending) and re.search(misuse.ending, first) is not None
        else:
            matches = not misuse.ending and value == misuse.value
        expected = misuse.ending or repr(misuse.value)
        return [] if matches else [f"expected {expected:.60}, got {shown or repr(value):.400}"]

    def _leftovers(self) -> list[str]:
        _, left = psutil.wait_procs(_descendants() - self._idle, timeout=END_TIMEOUT)
        return [f"process {process.pid} is left" for process in left]


def _descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))
