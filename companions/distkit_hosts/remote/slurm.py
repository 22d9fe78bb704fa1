"""ipyparallel's launcher for Slurm, as agents need it. All its configuration stays as it is."""

from __future__ import annotations

from typing import Any

from ipyparallel.cluster.launcher import SlurmEngineSetLauncher
from traitlets import Unicode


class AgentsBySlurm(SlurmEngineSetLauncher):  # type: ignore[misc]
    """Agents by one ``sbatch`` and one ``srun``.

    Some tasks end at once, which must not end the others (``--wait=0``); one task a machine forks
    ranks, which may use all that the machine has for the job (``--cpu-bind=none``).
    """

    default_template = Unicode(
        """#!/bin/sh
#SBATCH --export=ALL
#SBATCH --job-name=distkit
srun --wait=0 --kill-on-bad-exit=0 --cpu-bind=none {program_and_args}
"""
    )

    batch_template: Any = SlurmEngineSetLauncher.batch_template

    def _insert_options_in_script(self) -> None:
        """Insert ``options``, too, which ipyparallel forgets."""
        super()._insert_options_in_script()
        if self.options:
            self.batch_template = self.batch_template.replace("\n", "\n#SBATCH {options}\n", 1)
