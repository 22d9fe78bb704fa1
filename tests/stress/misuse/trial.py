"""Runs a misuse on a cluster: checks what is reported and what the next run sees."""

from __future__ import annotations

import re
import warnings
from contextlib import suppress
from typing import Any

import distkit as dk
from tests.stress.misuse.catalogue import Misuse
from tests.stress.misuse.settings import settings

#: Timeout of each run [s].
LIMIT = 60.0


class Trial:
    """A cluster and the initial settings of its ranks."""

    def __init__(self) -> None:
        self._open()

    def _open(self) -> None:
        self.cluster = dk.Cluster(2)
        first, settled = self._settings(), self._settings()
        # imports add warning filters
        self._clean = [
            {**a, "warnings": b["warnings"]} for a, b in zip(first, settled, strict=True)
        ]

    def faults(self, misuse: Misuse) -> list[str]:
        """Run a misuse on rank 1; return wrong reports and settings that differ in the next run.

        A faulty cluster is replaced.
        """
        before = self._pids()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                shown, found = self._run(misuse)
                found += self._changed()
                messages = " ".join([shown, *(str(w.message) for w in warned)])
                fresh = re.search(r"rank \d+ has a new process", messages) is not None
                if misuse.replaced not in (None, fresh) or (fresh and before == self._pids()):
                    found.append(f"process replaced: {fresh}")
                self.cluster.restart()
                assert self.cluster.run(int).results == [0, 0]
            except Exception as error:
                found = [f"{type(error).__name__}: {error}"]
        if found:
            self.close()
            self._open()
        return found

    def close(self) -> None:
        """End the cluster."""
        self.cluster.stop()

    def _run(self, misuse: Misuse) -> tuple[str, list[str]]:
        run = self.cluster.submit(misuse.program)
        if misuse.endless:
            with suppress(TimeoutError):
                run.wait(2.0)
            self.cluster.interrupt()
        value, shown = None, ""
        try:
            value = run.wait(LIMIT).results[1]
        except BaseException as error:  # including KeyboardInterrupt
            shown = f"{type(error).__name__}: {error}"
            first = str(error).partition("\n")[0]
            right = bool(misuse.ending) and re.search(misuse.ending, first) is not None
        else:
            right = not misuse.ending and value == misuse.value
        expected = misuse.ending or repr(misuse.value)
        return shown, [] if right else [f"not {expected:.60}, but {shown or repr(value):.400}"]

    def _changed(self) -> list[str]:
        return [
            f"rank {rank} has another {key}: {now.get(key)!r:.80}, was {value!r:.80}"
            for rank, now in enumerate(self._settings())
            for key, value in self._clean[rank].items()
            if now.get(key) != value
        ]

    def _settings(self) -> list[dict[str, Any]]:
        return self.cluster.submit(settings).wait(LIMIT).results

    def _pids(self) -> list[Any]:
        return [row[2] for row in self.cluster.status().rows]
