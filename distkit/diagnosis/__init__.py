"""Diagnosis of traces: each finding states what went wrong, where, and the remedy.

No side effects.
"""
