"""distkit: run real ``torch.distributed`` ranks from a notebook and show their messages.

::

    import distkit as dk

    cluster = dk.Cluster(4)                  # four real ranks, one process each
    run = cluster.run(fn)                    # fn on every rank -> results and a trace
    run.trace.messages                       # the messages between ranks, with their times
    dk.Timeline(run.trace)                   # the same messages, drawn as a timeline

Importing distkit is fast, because torch and ipyparallel are imported only when needed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from distkit.imports import attributes

if TYPE_CHECKING:
    import distkit_hosts as hosts
    import distkit_simulation as simulation
    import distkit_strategies as strategies
    from distkit import algorithms, data, kvstore
    from distkit import errors as errors
    from distkit.cluster.cluster import Cluster
    from distkit.cluster.runs.run import run_ranks
    from distkit.diagnosis.equality import equal
    from distkit.recording.faults import inject_faults
    from distkit.recording.gradients import watch_gradients
    from distkit.recording.recorder import mark
    from distkit.trace.trace import Trace
    from distkit.views.compare import Compare
    from distkit.views.scenes import Gradients, Servers, Stage, Tensors
    from distkit.views.timeline.view import Timeline
    from distkit_course import check, concept_check, hint, predict, solution
    from distkit_examples import demos
    from distkit_experiments import Experiment, sweep

__version__ = "0.1.0"

#: Public names, by module.
_EXPORTS = {
    # starting ranks and running functions on them
    "distkit.cluster.cluster": ["Cluster"],
    "distkit.cluster.runs.run": ["run_ranks"],
    # traces and comparisons
    "distkit.trace.trace": ["Trace"],
    "distkit.diagnosis.equality": ["equal"],
    "distkit.recording.recorder": ["mark"],
    "distkit.recording.gradients": ["watch_gradients"],
    # views
    "distkit.views.compare": ["Compare"],
    "distkit.views.scenes": ["Gradients", "Servers", "Stage", "Tensors"],
    "distkit.views.timeline.view": ["Timeline"],
    # fault injection
    "distkit.recording.faults": ["inject_faults"],
    # interactive experiments
    "distkit_experiments": ["Experiment", "sweep"],
    # exercises
    "distkit_course": ["check", "hint", "solution", "predict", "concept_check"],
}
_MODULES = {
    "algorithms": "distkit.algorithms",
    "data": "distkit.data",
    "demos": "distkit_examples.demos",
    "hosts": "distkit_hosts",
    "kvstore": "distkit.kvstore",
    "simulation": "distkit_simulation",
    "strategies": "distkit_strategies",
}
_module_of = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [
    "Cluster",
    "Compare",
    "Experiment",
    "Gradients",
    "Servers",
    "Stage",
    "Tensors",
    "Timeline",
    "Trace",
    "algorithms",
    "check",
    "concept_check",
    "data",
    "demos",
    "equal",
    "hint",
    "hosts",
    "inject_faults",
    "kvstore",
    "mark",
    "predict",
    "run_ranks",
    "simulation",
    "solution",
    "strategies",
    "sweep",
    "watch_gradients",
]


__getattr__ = attributes(__name__, _module_of, _MODULES)


def load_ipython_extension(shell: Any) -> None:
    """Add the ``%%ranks`` magic; called by ``%load_ext distkit``."""
    from distkit import ipython

    ipython.install(shell)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


if (_ipython := sys.modules.get("IPython")) is not None and _ipython.get_ipython() is not None:
    load_ipython_extension(_ipython.get_ipython())
