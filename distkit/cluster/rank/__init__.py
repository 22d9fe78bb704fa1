"""A rank's process: its process group, its state at the start of a run, and its messages."""
