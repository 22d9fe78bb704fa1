"""Published measurements beside what the cost model says of them.

:mod:`~distkit.simulation.published.tables` holds the numbers with their sources; the other
modules predict them, one kind of table each. Some rows of a table fix the few constants of its
machine; they are marked and never scored.
"""
