"""Interactive controls for real runs, like ``ipywidgets.interact`` for functions on ranks.

experiment.py runs functions with one or more settings; controls.py creates widgets; results.py
summarizes runs in a table and a plot, without side effects; panel.py is the user interface.
"""

from distkit_experiments.experiment import Experiment, sweep

__all__ = ["Experiment", "sweep"]
