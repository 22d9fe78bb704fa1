"""Maps of the samples of a dataset and the pieces of parameters."""
