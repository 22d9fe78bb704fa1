"""Interactive controls for real runs, like ``ipywidgets.interact`` for functions on ranks.

experiment.py runs functions once or over many settings; controls.py creates widgets; results.py
summarizes runs as a table and a plot (pure); panel.py is the user interface.
"""

from distkit_experiments.experiment import Experiment, sweep

__all__ = ["Experiment", "sweep"]
