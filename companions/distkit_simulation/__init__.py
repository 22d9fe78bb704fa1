"""Time estimates: closed forms, a simulator, and a calibration of the machine at hand.

:mod:`~distkit_simulation.cost` has the formulas of the papers; :func:`simulate` plays a schedule
on a :class:`Network` and writes the trace that real ranks would have left; :func:`data_parallel`,
:func:`pipeline` and :func:`parameter_server` play whole training steps; :func:`calibrate`
measures what the formulas need; :func:`measure_step` what decides whether more ranks pay, and
:func:`plot_speedups` draws that, :func:`plot_prediction` for the sliders of an experiment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distkit.companions import attributes

if TYPE_CHECKING:
    from distkit_simulation import cost, parallel
    from distkit_simulation.calibration import Measured, calibrate
    from distkit_simulation.network import Link, Network
    from distkit_simulation.paying import (
        measure_step,
        plot_prediction,
        plot_speedups,
        predict,
        speedups,
    )
    from distkit_simulation.plots import compare
    from distkit_simulation.serving import Served, parameter_server, place
    from distkit_simulation.shard_map.view import ShardMap
    from distkit_simulation.simulator import (
        Stragglers,
        constant,
        exponential,
        finish_times,
        lognormal,
        simulate,
    )
    from distkit_simulation.training import Workload, data_parallel, pipeline

#: Calibration and what measures need torch, and import it when they are asked for.
_HOMES = {
    "distkit_simulation.calibration": ["Measured", "calibrate"],
    "distkit_simulation.network": ["Link", "Network"],
    "distkit_simulation.paying": [
        "measure_step",
        "plot_prediction",
        "plot_speedups",
        "predict",
        "speedups",
    ],
    "distkit_simulation.plots": ["compare"],
    "distkit_simulation.serving": ["Served", "parameter_server", "place"],
    "distkit_simulation.shard_map.view": ["ShardMap"],
    "distkit_simulation.simulator": [
        "Stragglers",
        "constant",
        "exponential",
        "finish_times",
        "lognormal",
        "simulate",
    ],
    "distkit_simulation.training": ["Workload", "data_parallel", "pipeline"],
}
_home = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Link",
    "Measured",
    "Network",
    "Served",
    "ShardMap",
    "Stragglers",
    "Workload",
    "calibrate",
    "compare",
    "constant",
    "cost",
    "data_parallel",
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
    "simulate",
    "speedups",
]


__getattr__ = attributes(
    __name__, _home, {name: f"{__name__}.{name}" for name in ("cost", "parallel")}
)
