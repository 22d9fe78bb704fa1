"""The view of a training loop's gradients."""
