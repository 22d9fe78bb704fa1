"""Transport of requests: connections, and the nodes of a cluster."""
