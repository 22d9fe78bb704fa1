"""Estimates of run time: closed forms, a simulator, and a calibration of this machine.

:mod:`~distkit_simulation.cost` contains formulas from papers. :func:`simulate` runs a schedule on a
:class:`Network` and returns the trace that real ranks would record. :func:`pipeline` and
:func:`parameter_server` simulate training steps. :class:`Job` predicts
a training job, and :func:`search_layouts` finds its best layout. :func:`calibrate` measures the
parameters of the formulas. :func:`measure_step` measures the parts of a step, from which
:func:`plot_speedups` and :func:`plot_prediction` draw speedups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distkit.companions import attributes

if TYPE_CHECKING:
    from distkit_simulation import cost, parallel
    from distkit_simulation.calibration import Measured, calibrate
    from distkit_simulation.job import A100, H100, Job, Machine, search_layouts
    from distkit_simulation.network import Link, Network
    from distkit_simulation.parameter_servers import Served, parameter_server, place
    from distkit_simulation.plots import compare
    from distkit_simulation.shard_map.view import ShardMap
    from distkit_simulation.simulator import (
        Stragglers,
        exponential,
        finish_times,
        lognormal,
        simulate,
    )
    from distkit_simulation.speedup import (
        measure_step,
        plot_prediction,
        plot_speedups,
        predict,
        speedups,
    )
    from distkit_simulation.training import pipeline

#: The names of each module, which is imported on first use: some modules need torch.
_NAMES = {
    "distkit_simulation.calibration": ["Measured", "calibrate"],
    "distkit_simulation.job": ["A100", "H100", "Job", "Machine", "search_layouts"],
    "distkit_simulation.network": ["Link", "Network"],
    "distkit_simulation.speedup": [
        "measure_step",
        "plot_prediction",
        "plot_speedups",
        "predict",
        "speedups",
    ],
    "distkit_simulation.plots": ["compare"],
    "distkit_simulation.parameter_servers": ["Served", "parameter_server", "place"],
    "distkit_simulation.shard_map.view": ["ShardMap"],
    "distkit_simulation.simulator": [
        "Stragglers",
        "exponential",
        "finish_times",
        "lognormal",
        "simulate",
    ],
    "distkit_simulation.training": ["pipeline"],
}
_modules = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "A100",
    "H100",
    "Job",
    "Link",
    "Machine",
    "Measured",
    "Network",
    "Served",
    "ShardMap",
    "Stragglers",
    "calibrate",
    "compare",
    "cost",
    "exponential",
    "finish_times",
    "lognormal",
    "measure_step",
    "parallel",
    "parameter_server",
    "pipeline",
    "place",
    "plot_prediction",
    "plot_speedups",
    "predict",
    "search_layouts",
    "simulate",
    "speedups",
]


__getattr__ = attributes(
    __name__, _modules, {name: f"{__name__}.{name}" for name in ("cost", "parallel")}
)
