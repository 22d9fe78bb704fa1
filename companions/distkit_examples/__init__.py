"""Example programs and recorded runs.

:mod:`~distkit_examples.demos` contains four demonstrations, :mod:`~distkit_examples.hangs` contains
programs with mistakes, and :mod:`~distkit_examples.recorded` contains larger runs, which open
without torch.
"""
