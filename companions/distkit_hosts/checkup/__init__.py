"""The doctor examines one machine, or several and the connections between them.

``examine`` collects ``facts`` with a ``probe`` on each machine; ``checks`` judges and reports them.
"""
