"""Forks ranks, exchanges messages with them, and terminates them."""
