"""Controls for real runs: a function on ranks becomes a panel, as ``ipywidgets.interact`` does.

experiment.py runs, once and over many settings; controls.py makes widgets; results.py is the pure
part, what the runs add up to as a table and a plot; panel.py is what one sees.
"""

from distkit_experiments.experiment import Experiment, sweep

__all__ = ["Experiment", "sweep"]
