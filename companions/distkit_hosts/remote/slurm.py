"""The ipyparallel launcher for Slurm, adapted to agents. Its configuration is unchanged."""

from __future__ import annotations

from typing import Any

from ipyparallel.cluster.launcher import SlurmEngineSetLauncher
from traitlets import Unicode


class AgentsBySlurm(SlurmEngineSetLauncher):  # type: ignore[misc]
    """Starts agents with one ``sbatch`` job and one ``srun`` step.

    Surplus tasks exit early, which must not end the others (``--wait=0``). One task per
    machine forks ranks, which may use all of the job's cores (``--cpu-bind=none``).
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
        """Insert ``options``, which ipyparallel omits."""
        super()._insert_options_in_script()
        if self.options:
            self.batch_template = self.batch_template.replace("\n", "\n#SBATCH {options}\n", 1)
