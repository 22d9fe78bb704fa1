"""Draws traces: pure projections, rendered in the browser or as static pictures."""
