"""The doctor: examines one machine, or several and the ways between them.

``facts`` holds what was found, ``examine`` asks for it, ``host_checks`` and ``cross_host_checks``
judge it and do nothing else, ``report`` shows the verdict.
"""
