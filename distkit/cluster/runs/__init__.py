"""One run of a program: its interface, outcome, stepping and deadlock detection."""
