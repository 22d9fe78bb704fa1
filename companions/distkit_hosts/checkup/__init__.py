"""The doctor: examines one machine, or several and the ways between them. See :func:`doctor`.

``facts`` holds what was found, ``examine`` asks for it, ``alone`` and ``together`` judge it and do
nothing else, ``report`` shows the verdict.
"""
