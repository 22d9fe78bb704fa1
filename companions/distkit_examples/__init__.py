"""Example programs and recorded runs.

:mod:`~distkit_examples.demos` has four demonstrations, :mod:`~distkit_examples.hangs` programs that
make mistakes, and :mod:`~distkit_examples.recorded` larger runs, which open without torch.
"""
