"""Maps of the samples of a dataset and the shards of parameters."""
