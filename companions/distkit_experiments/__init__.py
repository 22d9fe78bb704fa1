"""Controls for real runs: a function on ranks becomes a panel, as ``ipywidgets.interact`` does.

experiment.py runs; controls.py makes widgets; results.py and chart.py
are the pure part: what the runs add up to, as a table and a plot; panel.py is what one sees.
sweep.py goes through many settings; folder.py keeps what is done, and fingerprint.py tells
whether the function is still the one that did it.
"""

from distkit_experiments.experiment import Experiment

__all__ = ["Experiment"]
