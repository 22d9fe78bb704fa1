"""Estimate run times: closed forms, a simulator, and a calibration of this machine.

:mod:`~distkit_simulation.cost` contains formulas from papers. :func:`simulate` runs a schedule on a
:class:`Network` and returns the trace that real ranks would record. :func:`pipeline` and
:func:`parameter_server` simulate training steps. :class:`Job` predicts a training job, and
:func:`search_layouts` compares its layouts. :func:`calibrate` measures the parameters of the
formulas. :func:`measure_step` measures the parts of a training step, from which
:func:`plot_speedups` and :func:`plot_prediction` compute and plot speedups.
"""

from typing import TYPE_CHECKING

from distkit.imports import attributes

if TYPE_CHECKING:
    from distkit_simulation import cost
    from distkit_simulation.calibration import MeasuredNetwork, calibrate
    from distkit_simulation.job import A100, H100, Job, Machine, search_layouts
    from distkit_simulation.network import Link, Network
    from distkit_simulation.parameter_servers import (
        ParameterServerResult,
        assign_tensors,
        parameter_server,
    )
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
    "distkit_simulation.calibration": ["MeasuredNetwork", "calibrate"],
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
    "distkit_simulation.parameter_servers": [
        "ParameterServerResult",
        "assign_tensors",
        "parameter_server",
    ],
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

__all__ = [
    "A100",
    "H100",
    "Job",
    "Link",
    "Machine",
    "MeasuredNetwork",
    "Network",
    "ParameterServerResult",
    "ShardMap",
    "Stragglers",
    "assign_tensors",
    "calibrate",
    "compare",
    "cost",
    "exponential",
    "finish_times",
    "lognormal",
    "measure_step",
    "parameter_server",
    "pipeline",
    "plot_prediction",
    "plot_speedups",
    "predict",
    "search_layouts",
    "simulate",
    "speedups",
]


__getattr__ = attributes(
    __name__,
    {name: module for module, names in _NAMES.items() for name in names},
    {"cost": "distkit_simulation.cost"},
)
