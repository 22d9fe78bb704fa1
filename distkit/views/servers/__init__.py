"""The view of a run with a parameter server."""
