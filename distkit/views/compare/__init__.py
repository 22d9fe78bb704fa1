"""The view that compares several runs."""
