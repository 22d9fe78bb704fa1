"""Transport of requests: sockets, shared memory, the nodes of a cluster."""
