"""Record ranks that torchrun, ``srun`` or ``mpiexec`` starts, and follow them from a notebook."""
