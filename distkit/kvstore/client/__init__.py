"""What training code calls: the store of a worker, and a trainer on top of it."""
