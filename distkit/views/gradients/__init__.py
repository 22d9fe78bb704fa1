"""Gradients of a training loop."""
