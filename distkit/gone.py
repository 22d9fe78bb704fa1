"""Removed names, commands and options, with their replacements."""

from __future__ import annotations

from collections.abc import Iterable

_OUTSIDE = (
    "run the notebook on this machine, where dk.Cluster(hosts=…, **lab.options()) has its ranks on "
    "the hosts of lab = dk.hosts.Laboratory()."
)

#: By the full name, with the module that had it; an option by its call.
GONE = {
    "distkit export": "distkit export was removed: call init_process_group('gloo') before your "
    "function, and start the file with torchrun, or run it as it is with cluster.run('train.py').",
    "distkit hang": "distkit hang was removed: in Python run a program of distkit.hangs, such as "
    "hangs.ALL['wrong_tag'].run(), and print its source.",
    "distkit demo --ranks": "distkit demo --ranks was removed: leave it out. For another number of "
    "ranks call a program of the demonstrations, such as dk.run_ranks(dk.demos.average_digit, 8).",
    "distkit doctor --port": "distkit doctor --port was removed: leave it out. The doctor connects "
    "all machines in both directions at free ports, which gloo, NCCL and servers take, too.",
    "distkit lab-hosts": f"distkit lab-hosts was removed: {_OUTSIDE}",
    "distkit.hangs": "import distkit does not load hangs: write from distkit import hangs.",
    "distkit.attach": "distkit.attach was removed: start the ranks with distkit trace -- torchrun "
    "…, or call dk.hosts.record() in the script.",
    "distkit progress": "distkit progress was removed: read the JSON reports that distkit grade "
    "writes, for example with pandas.",
    "distkit clusters": "distkit clusters was removed: every cluster ends with its kernel. "
    "cluster.stop() ends one earlier.",
    "dk.Cluster(heartbeat_timeout=…)": "dk.Cluster(heartbeat_timeout=…) was removed: leave it out. "
    "A process that hangs is not replaced; end it with cluster.kill('server 0').",
    "dk.Cluster(keep=…)": "dk.Cluster(keep=…) was removed: leave it out. Every cluster ends with "
    "its kernel; save with torch.save() on a rank what the next one needs.",
    "dk.Cluster(name=…)": "dk.Cluster(name=…) was removed: leave it out. It named a cluster for "
    "the next kernel, and every cluster ends with its own.",
    "dk.Cluster(ports=…)": "dk.Cluster(ports=…) was removed: leave it out. Parameter servers take "
    "free ports of the kernel's range, which a site may set by net.ipv4.ip_local_port_range.",
    "dk.Cluster(memory_fraction=…)": "dk.Cluster(memory_fraction=…) was removed: call "
    "torch.cuda.set_per_process_memory_fraction at the beginning of the function.",
    "dk.Cluster(mps=…)": "dk.Cluster(mps=…) was removed: leave it out. Ranks that share a GPU take "
    "turns; a site's own MPS daemon serves them if CUDA_MPS_PIPE_DIRECTORY names it.",
    "dk.Compare(baseline=…)": "dk.Compare(baseline=…) was removed: give the run first that the "
    "others are compared with.",
    "dk.Compare(clock=…)": "dk.Compare(clock=…) was removed: leave it out. All runs begin "
    "together, and the table has how many times as long each took.",
    "dk.Stage(clock=…)": "dk.Stage(clock=…) was removed: leave it out. dk.Timeline(run) shows "
    "measured times.",
    "dk.Stage(layout=…)": "dk.Stage(layout=…) was removed: leave it out. The ranks of each host "
    "have a row; those of a single host form a circle.",
    "dk.sweep(folder=…)": "dk.sweep(folder=…) was removed: keep the table that it returns with "
    "frame.drop(columns='trace').to_csv(file), and a trace with frame.trace[0].save(file).",
    "distkit_simulation.measure_modes": "measure_modes was removed: compile the network with "
    "torch.compile in a function of yours, and time its steps, as lesson 18 does.",
    "distkit_simulation.Host": "simulation.Host, a machine that a parameter server's processes "
    "share, was removed: measure them with dk.Cluster(workers=…, servers=…), or give a "
    "dk.simulation.Link.",
    "kvstore.create(check_finite=…)": "kvstore.create(check_finite=…) was removed: call "
    "torch.isfinite(gradient).all() before kv.push.",
    "kvstore.create(wait_for=…)": "kvstore.create(wait_for=…) was removed: a run begins when all "
    "its workers are there.",
    **{
        f"distkit.data.{name}": f"dk.data.{name} was removed: give a DistributedDataset "
        f"torchvision.datasets.{dataset}(folder, transform=torchvision.transforms.ToTensor())."
        for name, dataset in (("mnist", "MNIST"), ("cifar10", "CIFAR10"))
    },
    "distkit.data.Files": "dk.data.Files was removed: give a DistributedDataset the list of .npy "
    "and .npz files, or a torch.utils.data.Dataset that reads them.",
    "distkit.algorithms.ddp_hook": "dk.algorithms.ddp_hook was removed: open "
    "dk.algorithms.use_algorithm, which DistributedDataParallel uses, too.",
    "distkit.kvstore.Adam": "kvstore.Adam was removed: use kv.set_optimizer(torch.optim.Adam, "
    "lr=0.001).",
    "distkit.kvstore.KVStoreBase": "kvstore.KVStoreBase was removed: give Trainer one of the "
    "stores that kvstore.create makes.",
    "distkit.kvstore.lr_scheduler": "kvstore.lr_scheduler was removed: give kvstore.Trainer an "
    "optimizer of torch.optim, whose rate a class of torch.optim.lr_scheduler changes.",
    "distkit.kvstore.optimizer": "kvstore.optimizer was removed: kv.set_optimizer takes "
    "kvstore.SGD, or a class of torch.optim and its options.",
    "distkit.kvstore.serve": "kvstore.serve was removed: use kvstore.Service(node).",
    "distkit.kvstore.split_data": "kvstore.split_data was removed: use torch.tensor_split(batch, "
    "slices).",
    "Stepper.shown": "stepper.shown was removed: its events are "
    "stepper.trace.events[:stepper.moment.events].",
    "Stepper.run_to": "stepper.run_to was removed: call stepper.next() in a loop, until "
    "stepper.moment.rank_states shows the ranks where you want them.",
    **{
        name: f"{name} was removed: call stepper.next(rank) for each rank in the same order."
        for name in ("Stepper.save", "Stepper.replay", "Stepper.choices")
    },
    "Trace.meta": "trace.meta was removed: trace.info has the same as attributes, for example "
    "trace.info.ranks[0].host, trace.info.world_size.",
    "KVStore.broadcast": "KVStore.broadcast was removed: call kv.init, and then kv.pull.",
    "KVStore.row_sparse_pull": "KVStore.row_sparse_pull was removed: push dense gradients, and get "
    "the whole value with kv.pull.",
    "KVStore.set_updater": "KVStore.set_updater was removed: use kv.set_optimizer, or push without "
    "an optimizer and update on the worker.",
    "KVStore.is_capable": "KVStore.is_capable was removed: every store updates weights once "
    "kv.set_optimizer was called.",
    "Trainer.allreduce_grads": "Trainer.allreduce_grads was removed: push the gradients to a store "
    "without an optimizer, clip what kv.pull returns, and call the step of an optimizer.",
    "Trainer.update": "Trainer.update was removed: trainer.step(batch_size) adds and updates.",
    **{
        f"Trainer.{name}": f"Trainer.{name} was removed: give Trainer an optimizer of torch.optim, "
        "and read or set the rates in optimizer.param_groups."
        for name in ("learning_rate", "set_learning_rate", "optimizer")
    },
    **{
        name: f"{name} was removed: push without an optimizer, and save the state_dict() of the "
        "torch.optim optimizer with which the workers apply what kv.pull returns."
        for name in (
            "KVStore.save_optimizer_states",
            "KVStore.load_optimizer_states",
            "Trainer.save_states",
            "Trainer.load_states",
        )
    },
}

#: Names that stood at the top level, and the modules that have them; they go with the next release.
FORMER = {
    name: module
    for module, names in {
        "distkit.algorithms": "ring_all_reduce tree_all_reduce halving_doubling_all_reduce "
        "shared_memory_all_reduce use_algorithm sync_initial_weights sync_gradients "
        "sync_sgd_step",
        "distkit.cluster": "Run Stepper",
        "distkit.data": "shard",
        "distkit.diagnosis.findings": "Finding",
        "distkit.errors": "ClusterError CommunicationWarning DeadlockError DistkitError "
        "KVStoreError LaboratoryError LayoutError NotPicklableError RankDied RankError RunError "
        "RunInterrupted RunStopped StartError StepError StoppedError StrategyError TraceFileError "
        "TrainingError",
        "distkit.events": "Event Message Op Span State Summary",
        "distkit.hosts": "doctor follow record",
        "distkit.simulation": "Link Network ShardMap calibrate cost parallel simulate",
        "distkit.simulation.parallel": "Layout shards",
    }.items()
    for name in names.split()
}


def refuse(call: str, options: Iterable[str]) -> None:
    """Raise a TypeError that names the replacement of the first of these options of a call."""
    for option in options:
        unknown = f"{call} got an unexpected keyword argument {option!r}"
        raise TypeError(GONE.get(f"{call}({option}=…)", unknown))
