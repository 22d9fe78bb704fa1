"""Time estimates: closed forms, a simulator, and a calibration of the machine at hand.

:mod:`~distkit.simulation.cost` has the formulas of the papers; :func:`simulate` plays a schedule
on a :class:`Network` and writes the trace that real ranks would have left; :func:`data_parallel`,
:func:`pipeline` and :func:`parameter_server` play whole training steps; :func:`calibrate`
measures what the formulas need; :func:`measure_step` what decides whether more ranks pay, and
:func:`plot_speedups` draws that. :class:`Host` is a machine whose processors a parameter server's
workers and servers share.
"""

from distkit.simulation import cost
from distkit.simulation.calibration import Measured, calibrate
from distkit.simulation.modes import measure_modes
from distkit.simulation.network import Link, Network
from distkit.simulation.paying import measure_step, plot_speedups, speedups
from distkit.simulation.plots import compare
from distkit.simulation.serving import Host, Served, parameter_server, place
from distkit.simulation.simulator import (
    Stragglers,
    constant,
    exponential,
    finish_times,
    lognormal,
    simulate,
)
from distkit.simulation.training import Workload, data_parallel, pipeline

__all__ = [
    "Host",
    "Link",
    "Measured",
    "Network",
    "Served",
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
    "measure_modes",
    "measure_step",
    "parameter_server",
    "pipeline",
    "place",
    "plot_speedups",
    "simulate",
    "speedups",
]
