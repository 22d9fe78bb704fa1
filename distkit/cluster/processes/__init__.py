"""Forks ranks, exchanges messages with them, and ends them."""
