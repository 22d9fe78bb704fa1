"""Ranks that torchrun, ``srun`` or ``mpiexec`` starts: recorded, and followed from a notebook."""
