"""Tensors before and after each operation."""
