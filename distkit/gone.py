"""Names, commands and options that this release no longer has, and what to do instead."""

#: By the full name, with the module that had it; an option by its call.
GONE = {
    "distkit export": "distkit export was removed: call init_process_group('gloo') before your "
    "function, and start the file with torchrun, or run it as it is with cluster.run('train.py').",
    "dk.sweep(folder=…)": "dk.sweep(folder=…) was removed: keep the table that it returns with "
    "frame.drop(columns='trace').to_csv(file), and a trace with frame.trace[0].save(file).",
    "distkit_simulation.measure_modes": "measure_modes was removed: compile the network with "
    "torch.compile in a function of yours, and time its steps, as lesson 08 does.",
    "distkit_simulation.Host": "simulation.Host, a machine that a parameter server's processes "
    "share, was removed: measure them with dk.Cluster(workers=…, servers=…), or give a dk.Link.",
}
