"""Recording on a rank: what it calls, in what order, and what comes of it."""
