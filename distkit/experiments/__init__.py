"""Controls for real runs: a function on ranks becomes a panel, as ``ipywidgets.interact`` does.

experiment.py runs; controls.py makes widgets; results.py and chart.py
are the pure part: what the runs add up to, as a table and a plot; panel.py is what one sees.
"""

from distkit.experiments.experiment import Experiment

__all__ = ["Experiment"]
