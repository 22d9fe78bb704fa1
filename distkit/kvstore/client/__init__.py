"""The interface for training code: a worker's store, and a trainer built on it."""
