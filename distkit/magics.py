"""``%load_ext distkit``: the ``%%ranks`` cell magic.

::

    %%ranks                     the cell on every rank
    %%ranks 0,2                 only on these
    %%ranks --step              paused before each communication, in the cockpit
    %%ranks --seed 3            with the random numbers of this seed

Each is a short form of :meth:`distkit.Cluster.execute` on the cluster that was made last.
"""

from __future__ import annotations

from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class

from distkit.cluster.cluster import Cluster, latest
from distkit.cluster.notebook import name_running_cell, place
from distkit.errors import DistkitError, RankError, RunStopped


@magics_class
class RankMagics(Magics):
    """The magics of distkit."""

    shell: Any

    @cell_magic
    def ranks(self, line: str, cell: str) -> Any:
        """Run a cell on the ranks of the latest cluster, in their own variables.

        ``torch``, ``dist``, ``rank`` and ``world_size`` are there; what a cell defines stays.
        """
        words = line.replace(",", " ").split()
        step, seed = "--step" in words, _seed(words)
        cluster = latest()
        if cluster is None:
            raise UsageError("there is no cluster. Make one first: cluster = dk.Cluster(4)")
        chosen = _numbers([word for word in words if word != "--step"], cluster)
        file = name_running_cell(f"%%ranks {line}".rstrip() + f"\n{cell}")
        try:
            return cluster.execute("\n" + cell, chosen, step=step, file=file, seed=seed)
        except SyntaxError as error:
            error.filename = place(f"{file}:0").rpartition(":")[0]
            raise
        except (DistkitError, RunStopped) as error:
            if isinstance(error, RankError):
                self._explain_name(error)
            head = error._render_traceback_()[-1:]  # without the way through the magic
            error.__dict__["_render_traceback_"] = lambda: head
            raise

    def _explain_name(self, error: RankError) -> None:
        """A variable of the notebook is not one of the ranks'."""
        name = str(error).partition("name '")[2].partition("' is not defined")[0]
        if name in self.shell.user_ns:
            more = f"{name} is a variable of the notebook, and the ranks have their own: set it in "
            more += "a %%ranks cell."
            error.args = (f"{error.args[0]}\n{more}",)


def _seed(words: list[str]) -> int | None:
    """Take ``--seed 3`` out of the words."""
    if "--seed" not in words:
        return None
    at = words.index("--seed")
    number = "".join(words[at + 1 : at + 2])
    del words[at : at + 2]
    try:
        return int(number)
    except ValueError:
        raise UsageError("%%ranks --seed needs a whole number: --seed 3") from None


def _numbers(words: list[str], cluster: Cluster) -> list[int] | None:
    """The ranks that ["0", "2"] or ["1-3"] means; None for [], all of them."""
    if not words:
        return None
    chosen: list[int] = []
    for word in words:
        first, dash, last = word.partition("-")
        try:
            span = range(int(first), int(last if dash else first) + 1)
        except ValueError:
            span = range(0)
        if not span:
            most = cluster.plan.ranks - 1
            said = f"%%ranks {' '.join(words)}: name ranks from 0 to {most}, as 0,2 or 1-3"
            raise UsageError(said)
        chosen += span[: cluster.plan.ranks + 1]  # enough to find one that is not there
    return chosen


def load_ipython_extension(shell: Any) -> None:
    """The entry point of ``%load_ext distkit``."""
    shell.register_magics(RankMagics)
