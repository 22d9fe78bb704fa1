"""The interface for training code: the store of a worker, and a trainer on top of it."""
