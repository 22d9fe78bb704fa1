"""The view that steps through a run."""
