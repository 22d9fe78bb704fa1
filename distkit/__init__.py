"""distkit: run real ``torch.distributed`` ranks from a notebook, and show their messages.

::

    import distkit as dk

    cluster = dk.Cluster(4)                  # four real ranks, each a process
    run = cluster.run(fn)                    # fn on every rank -> results and a trace
    run.trace.messages                       # which rank sent what to which, and when
    dk.Timeline(run.trace)                   # the same as a picture

Importing distkit is light: torch and ipyparallel are imported where they are needed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from distkit.companions import MovedFinder
from distkit.lazy import attributes

if TYPE_CHECKING:
    import distkit_simulation as simulation
    import distkit_strategies as strategies
    from distkit import (
        algorithms,
        data,
        demos,
        hangs,
        kvstore,
    )
    from distkit.algorithms.all_reduces import halving_doubling_all_reduce, tree_all_reduce
    from distkit.algorithms.collectives import ring_all_reduce
    from distkit.algorithms.sgd import sync_gradients, sync_initial_weights, sync_sgd_step
    from distkit.algorithms.shared_memory import shared_memory_all_reduce
    from distkit.algorithms.use import ddp_hook, use_algorithm
    from distkit.cluster.cluster import Cluster
    from distkit.cluster.runs.run import Run
    from distkit.cluster.runs.run_ranks import run_ranks
    from distkit.cluster.runs.stepper import Stepper
    from distkit.data.shards import shard
    from distkit.diagnosis.equality import equal
    from distkit.diagnosis.findings import Finding
    from distkit.errors import (
        ClusterError,
        CommunicationWarning,
        DeadlockError,
        DistkitError,
        KVStoreError,
        LaboratoryError,
        LayoutError,
        NotPicklableError,
        RankDied,
        RankError,
        RunError,
        RunInterrupted,
        RunStopped,
        StartError,
        StepError,
        StoppedError,
        StrategyError,
        TraceFileError,
        TrainingError,
    )
    from distkit.events import Event, Message, Op, Span, State, Summary
    from distkit.recording.gradients import watch_gradients
    from distkit.recording.progress import progress
    from distkit.recording.recorder import mark
    from distkit.recording.trouble import trouble
    from distkit.trace.trace import Trace
    from distkit.views import Compare, Gradients, Servers, ShardMap, Stage, Tensors, Timeline
    from distkit_course import check, concept_check, hint, predict, solution
    from distkit_experiments import Experiment, sweep
    from distkit_hosts.checkup.doctor import doctor
    from distkit_hosts.torchrun.attached import record
    from distkit_hosts.torchrun.following import follow
    from distkit_simulation import Link, Network, calibrate, cost, parallel, simulate
    from distkit_simulation.parallel import Layout, shards

__version__ = "0.1.0"

#: Each public name and the module that has it, grouped by lesson.
_HOMES = {
    # starting ranks and running functions on them
    "distkit.cluster.cluster": ["Cluster"],
    "distkit.cluster.runs.run_ranks": ["run_ranks"],
    "distkit.cluster.runs.run": ["Run"],
    "distkit.cluster.runs.stepper": ["Stepper"],
    # what will run, here and on other machines
    "distkit_hosts.checkup.doctor": ["doctor"],
    # what they said to each other
    "distkit.events": ["Event", "Message", "Op", "Span", "State", "Summary"],
    "distkit.trace.trace": ["Trace"],
    "distkit.diagnosis.findings": ["Finding"],
    "distkit.diagnosis.equality": ["equal"],
    "distkit.recording.recorder": ["mark"],
    "distkit_hosts.torchrun.attached": ["record"],
    "distkit_hosts.torchrun.following": ["follow"],
    "distkit.recording.gradients": ["watch_gradients"],
    "distkit.recording.progress": ["progress"],
    "distkit.views": ["Compare", "Gradients", "Servers", "Stage", "Tensors", "Timeline"],
    # controls that start runs
    "distkit_experiments": ["Experiment", "sweep"],
    # all-reduce and synchronous SGD
    "distkit.algorithms.collectives": ["ring_all_reduce"],
    "distkit.algorithms.all_reduces": ["halving_doubling_all_reduce", "tree_all_reduce"],
    "distkit.algorithms.shared_memory": ["shared_memory_all_reduce"],
    "distkit.algorithms.use": ["ddp_hook", "use_algorithm"],
    "distkit.algorithms.sgd": ["sync_gradients", "sync_initial_weights", "sync_sgd_step"],
    "distkit.data.shards": ["shard"],
    "distkit.views.shards.view": ["ShardMap"],
    # a model on many ranks
    "distkit_simulation.parallel": ["Layout", "shards"],
    # how long it would take
    "distkit_simulation": ["Link", "Network", "calibrate", "cost", "simulate"],
    # your turn
    "distkit_course": ["check", "hint", "solution", "predict", "concept_check"],
    # what can go wrong
    "distkit.recording.trouble": ["trouble"],
    "distkit.errors": [
        "ClusterError",
        "CommunicationWarning",
        "DeadlockError",
        "DistkitError",
        "KVStoreError",
        "LaboratoryError",
        "LayoutError",
        "NotPicklableError",
        "RankDied",
        "RankError",
        "RunError",
        "RunInterrupted",
        "RunStopped",
        "StartError",
        "StepError",
        "StoppedError",
        "StrategyError",
        "TraceFileError",
        "TrainingError",
    ],
}
_MODULES = {
    "algorithms": "distkit.algorithms",
    "data": "distkit.data",
    "demos": "distkit.demos",
    "hangs": "distkit.hangs",
    "kvstore": "distkit.kvstore",
    "parallel": "distkit_simulation.parallel",
    "simulation": "distkit_simulation",
    "strategies": "distkit_strategies",
}
_home = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022
    "Cluster",
    "run_ranks",
    "Run",
    "Stepper",
    "doctor",
    "Event",
    "Message",
    "Op",
    "Span",
    "State",
    "Summary",
    "Trace",
    "Finding",
    "equal",
    "follow",
    "mark",
    "record",
    "Compare",
    "Gradients",
    "Servers",
    "Stage",
    "Tensors",
    "Timeline",
    "watch_gradients",
    "Experiment",
    "sweep",
    "progress",
    "algorithms",
    "ring_all_reduce",
    "tree_all_reduce",
    "halving_doubling_all_reduce",
    "shared_memory_all_reduce",
    "use_algorithm",
    "ddp_hook",
    "data",
    "shard",
    "ShardMap",
    "sync_initial_weights",
    "sync_gradients",
    "sync_sgd_step",
    "parallel",
    "Layout",
    "shards",
    "kvstore",
    "strategies",
    "demos",
    "simulation",
    "simulate",
    "calibrate",
    "cost",
    "Link",
    "Network",
    "check",
    "hint",
    "solution",
    "predict",
    "concept_check",
    "trouble",
    "hangs",
    "ClusterError",
    "CommunicationWarning",
    "DeadlockError",
    "DistkitError",
    "KVStoreError",
    "LaboratoryError",
    "LayoutError",
    "NotPicklableError",
    "RankDied",
    "RankError",
    "RunError",
    "RunInterrupted",
    "RunStopped",
    "StartError",
    "StepError",
    "StoppedError",
    "StrategyError",
    "TraceFileError",
    "TrainingError",
]


sys.meta_path.append(MovedFinder)
__getattr__ = attributes(__name__, _home, _MODULES)


def load_ipython_extension(shell: Any) -> None:
    """The entry point of ``%load_ext distkit``: it adds the ``%%ranks`` magic."""
    from distkit import ipython

    ipython.install(shell)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def _meet_ipython() -> None:
    found = sys.modules.get("IPython")
    shell = found.get_ipython() if found is not None else None
    if shell is not None:
        load_ipython_extension(shell)


_meet_ipython()
