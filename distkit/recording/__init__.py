"""Records the communication calls of each rank, with times and summaries of tensors."""
