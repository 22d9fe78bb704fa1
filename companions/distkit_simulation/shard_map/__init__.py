"""Who holds what: the samples of a dataset, and the pieces of parameters."""
