"""distkit: put real ``torch.distributed`` ranks behind a notebook, and show what they said.

::

    import distkit as dk

    cluster = dk.Cluster(4)                  # four real ranks, each a process
    run = cluster.run(fn)                    # fn on every rank -> results and a trace
    run.trace.messages                       # who sent what to whom, and when
    dk.Timeline(run.trace)                   # the same as a picture

Importing distkit is light: torch and ipyparallel are imported where they are needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distkit import demos, kvstore
    from distkit.algorithms.collectives import ring_all_reduce
    from distkit.algorithms.sgd import shard, sync_initial_weights, sync_sgd_step
    from distkit.cluster.cluster import Cluster
    from distkit.cluster.local import run_ranks
    from distkit.cluster.run import Run
    from distkit.errors import (
        ClusterError,
        DistkitError,
        KVStoreError,
        NotPicklableError,
        RankDied,
        RankError,
        RunError,
        RunInterrupted,
        StartError,
        StoppedError,
        TraceFileError,
    )
    from distkit.events import Event, Message, Op, Span, State, Summary, Trace
    from distkit.trace.recorder import mark
    from distkit.views import Timeline

__version__ = "0.1.0"

#: Each public name and the module that has it, grouped by lesson.
_HOMES = {
    # starting ranks and running functions on them
    "distkit.cluster.cluster": ["Cluster"],
    "distkit.cluster.local": ["run_ranks"],
    "distkit.cluster.run": ["Run"],
    # what they said to each other
    "distkit.events": ["Event", "Message", "Op", "Span", "State", "Summary", "Trace"],
    "distkit.trace.recorder": ["mark"],
    "distkit.views": ["Timeline"],
    # all-reduce and synchronous SGD
    "distkit.algorithms.collectives": ["ring_all_reduce"],
    "distkit.algorithms.sgd": ["shard", "sync_initial_weights", "sync_sgd_step"],
    # what can go wrong
    "distkit.errors": [
        "ClusterError", "DistkitError", "KVStoreError", "NotPicklableError", "RankDied",
        "RankError", "RunError", "RunInterrupted", "StartError", "StoppedError", "TraceFileError",
    ],
}  # fmt: skip
_MODULES = ["demos", "kvstore"]
_home = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022
    "Cluster", "run_ranks", "Run",
    "Event", "Message", "Op", "Span", "State", "Summary", "Trace", "mark", "Timeline",
    "ring_all_reduce", "shard", "sync_initial_weights", "sync_sgd_step", "kvstore", "demos",
    "ClusterError", "DistkitError", "KVStoreError", "NotPicklableError", "RankDied",
    "RankError", "RunError", "RunInterrupted", "StartError", "StoppedError", "TraceFileError",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _home:
        return getattr(importlib.import_module(_home[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"distkit.{name}")
    raise AttributeError(f"module 'distkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
