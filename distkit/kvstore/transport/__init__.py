"""How requests travel: sockets, shared memory, the nodes of a cluster."""
