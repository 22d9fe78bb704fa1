"""Short programs that hang, crash or compute wrong results.

Run one and read the explanation: ``cluster.run(hangs.recv_cycle)``. ``ALL`` contains them by name,
each with the finding that :meth:`distkit.Trace.diagnose` must report for it.
"""

from __future__ import annotations

import inspect
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from distkit import kvstore

if TYPE_CHECKING:
    from distkit.cluster.runs.run import Run
    from distkit.diagnosis.rules import Rule

# -- messages -----------------------------------------------------------------------


def recv_cycle() -> None:
    """Two ranks receive from each other before they send."""
    other = 1 - dist.get_rank()
    dist.recv(torch.zeros(3), src=other)
    dist.send(torch.ones(3), dst=other)


def ring_of_recvs() -> None:
    """Every rank waits for its left neighbor before it sends to the right."""
    me, n, z = dist.get_rank(), dist.get_world_size(), torch.zeros(3)
    dist.recv(z, src=(me - 1) % n)
    dist.send(z + 1, dst=(me + 1) % n)


def no_receiver() -> None:
    """Rank 0 sends two messages, but rank 1 receives only one."""
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), dst=1)
        dist.send(torch.ones(3), dst=1)
    else:
        dist.recv(torch.zeros(3), src=0)


def no_sender() -> None:
    """Rank 1 receives two messages, but rank 0 sends only one."""
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), dst=1)
    else:
        dist.recv(torch.zeros(3), src=0)
        dist.recv(torch.zeros(3), src=0)


def wrong_tag() -> None:
    """The message has tag 1, but the receiver waits for tag 2."""
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), dst=1, tag=1)
    else:
        dist.recv(torch.zeros(3), src=0, tag=2)


def wrong_source() -> None:
    """Rank 1 sends to rank 2, which waits for rank 0."""
    if dist.get_rank() == 1:
        dist.send(torch.ones(3), dst=2)
    elif dist.get_rank() == 2:
        dist.recv(torch.zeros(3), src=0)


def wrong_destination() -> None:
    """Rank 0 sends to rank 2, but rank 1 waits for the message."""
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), dst=2)
    elif dist.get_rank() == 1:
        dist.recv(torch.zeros(3), src=0)


def wrong_dtype() -> None:
    """Rank 1 receives floats into an integer tensor: nothing hangs, but the numbers are wrong."""
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), dst=1)
    else:
        dist.recv(torch.zeros(3, dtype=torch.int32), src=0)


def wrong_shape() -> None:
    """The receiver's tensor is too small, so the backend aborts the process."""
    if dist.get_rank() == 0:
        dist.send(torch.ones(100), dst=1)
    else:
        dist.recv(torch.zeros(2), src=0)


def early_read() -> None:
    """Rank 1 uses the buffer of an irecv before wait(), when its contents are undefined."""
    x = torch.zeros(3)
    if dist.get_rank() == 0:
        dist.send(x + 1, dst=1)
    else:
        work = dist.irecv(x, src=0)
        x.sum()
        work.wait()  # type: ignore[union-attr]


def never_waited() -> None:
    """Rank 0 does not wait for its isend, so it might change x before x has been sent."""
    x = torch.ones(3)
    if dist.get_rank() == 0:
        dist.isend(x, dst=1)
    else:
        dist.recv(x, src=0)
    dist.barrier()


def missing_key() -> None:
    """Rank 0 sets one key, but the others wait for a different one."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("data ready", "yes")
    else:
        store.get("data_ready")


# -- collectives --------------------------------------------------------------------


def different_collective() -> None:
    """Rank 0 broadcasts while the others reduce."""
    if dist.get_rank() == 0:
        dist.broadcast(torch.ones(3), src=0)
    else:
        dist.all_reduce(torch.ones(3))


def another_order() -> None:
    """Rank 0 calls two all-reduces in a different order: nothing hangs, but the sums are wrong."""
    weights, biases = torch.ones(3), torch.full((3,), 10.0)

    def reduce_weights() -> None:
        dist.all_reduce(weights)

    def reduce_biases() -> None:
        dist.all_reduce(biases)

    steps = [reduce_weights, reduce_biases]
    for step in reversed(steps) if dist.get_rank() == 0 else steps:
        step()


def swapped_lines() -> None:
    """Rank 0 reduces b before a, and the others reduce a before b."""
    a, b = torch.ones(3), torch.ones(5)
    first, second = (b, a) if dist.get_rank() == 0 else (a, b)
    dist.all_reduce(first)
    dist.all_reduce(second)


def different_reduction() -> None:
    """Rank 0 reduces with MAX instead of SUM: nothing hangs, but the numbers are wrong."""
    op = dist.ReduceOp.MAX if dist.get_rank() == 0 else dist.ReduceOp.SUM
    dist.all_reduce(torch.ones(3), op=op)


def different_root() -> None:
    """Every rank passes itself as the root."""
    dist.broadcast(torch.ones(3), src=dist.get_rank())


def different_shape() -> None:
    """Each rank reduces a tensor of a different size."""
    dist.all_reduce(torch.ones(3 + dist.get_rank()))


def split_mismatch() -> None:
    """Rank 0 sends one row to rank 1, which expects two: the second row keeps its old value."""
    first = dist.get_rank() == 0
    sent, awaited = ([1, 1], [1, 2]) if first else ([2, 2], [2, 2])
    dist.all_to_all_single(torch.zeros(sum(awaited)), torch.ones(sum(sent)), awaited, sent)


def skipped() -> None:
    """Rank 0 does not call the collective."""
    if dist.get_rank() != 0:
        dist.all_reduce(torch.ones(3))


def uneven() -> None:
    """Rank 2 has one more batch than the others."""
    for _ in range(4 if dist.get_rank() == 2 else 3):
        dist.all_reduce(torch.ones(3))


def missing_barrier() -> None:
    """Rank 2 does not call the barrier."""
    if dist.get_rank() != 2:
        dist.barrier()


# -- groups -------------------------------------------------------------------------


def wrong_group() -> None:
    """Rank 0 reduces over the pair, and the other ranks reduce over all ranks."""
    pair = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(3), group=pair)
    else:
        dist.all_reduce(torch.ones(3))


def not_a_member() -> None:
    """Rank 2 reduces over a group that it does not belong to, and gets only a warning."""
    pair = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(3), group=pair)


def new_group_skipped() -> None:
    """Rank 1 does not call new_group."""
    if dist.get_rank() != 1:
        dist.new_group([0, 1])


def leaked_group() -> None:
    """Each step creates a group, and none is destroyed."""
    for _ in range(3):
        group = dist.new_group()
        dist.all_reduce(torch.ones(3), group=group)


def destroyed_group() -> None:
    """Rank 0 destroys the pair's group before rank 1 calls all_reduce on it."""
    pair = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.destroy_process_group(pair)
    else:
        dist.all_reduce(torch.ones(3), group=pair)


# -- the parameter server -----------------------------------------------------------


def missing_push() -> None:
    """Rank 1 pushes one gradient fewer than rank 0, which waits for it."""
    kv = kvstore.create("dist_sync")
    kv.init("w", torch.zeros(4))
    for _ in range(2 if kv.rank == 1 else 3):
        kv.push("w", torch.ones(4))
        kv.pull("w")


def missing_init() -> None:
    """Rank 0 does not call init, and rank 1 waits for rank 0's value."""
    kv = kvstore.create("dist_sync")
    if kv.rank == 1:
        kv.init("w", torch.zeros(4))


def missing_worker() -> None:
    """Rank 1 does not create the store."""
    if dist.get_rank() == 0:
        kvstore.create("dist_sync")


# -- training, and ranks that fail --------------------------------------------------


class _TwoHeads(torch.nn.Module):
    """A network with a second head that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        y: torch.Tensor = self.first(x)
        return y + self.second(x) if both else y


def unused_parameter() -> None:
    """On rank 1, the second head gets no gradient, so its bucket is never sent."""
    net = DistributedDataParallel(_TwoHeads())
    net(torch.ones(1, 4), both=dist.get_rank() != 1).sum().backward()


def raised() -> None:
    """Rank 1 raises an exception while the others are waiting for it."""
    if dist.get_rank() == 1:
        raise ValueError("no data for this rank")
    dist.all_reduce(torch.ones(3))


def killed() -> None:
    """The process of rank 1 is killed while the others are waiting for it."""
    if dist.get_rank() == 1:
        signal.raise_signal(signal.SIGKILL)
    dist.all_reduce(torch.ones(3))


def straggler() -> None:
    """Rank 2 is slow in every step: the others wait, but the results are correct."""
    for _ in range(5):
        if dist.get_rank() == 2:
            time.sleep(0.2)
        dist.all_reduce(torch.ones(3))


@dataclass(frozen=True)
class Case:
    """A program in the catalog, with the expected finding.

    ``outcome`` is "hangs", "fails" (with an error) or "finishes".
    """

    program: Callable[[], None]
    kind: str
    culprits: tuple[int, ...]
    outcome: str = "hangs"
    ranks: int = 3
    servers: int = 0  # number of parameter servers

    @property
    def source(self) -> str:
        """The program's source code."""
        return inspect.getsource(self.program)

    def run(self) -> Run:
        """Run the program on new ranks.

        Raises:
            RunError: it hangs or fails, as most programs do.
        """
        from distkit.cluster.cluster import Cluster
        from distkit.cluster.runs.run import run_ranks

        if not self.servers:
            return run_ranks(self.program, self.ranks)
        with Cluster(workers=self.ranks, servers=self.servers) as cluster:
            return cluster.run(self.program)


#: The cases by the name of their program.
ALL = {
    case.program.__name__: case
    for case in [
        Case(recv_cycle, "recv_cycle", (0, 1), ranks=2),
        Case(ring_of_recvs, "cycle", (0, 1, 2)),
        Case(no_receiver, "no_receiver", (1,), ranks=2),
        Case(no_sender, "no_sender", (0,), ranks=2),
        Case(wrong_tag, "wrong_tag", (0, 1), ranks=2),
        Case(wrong_source, "wrong_source", (2,)),
        Case(wrong_destination, "wrong_destination", (0,)),
        Case(wrong_dtype, "wrong_tensor", (0, 1), "finishes", ranks=2),
        Case(wrong_shape, "wrong_tensor", (0, 1), "fails", ranks=2),
        Case(early_read, "buffer_in_use", (1,), "finishes", ranks=2),
        Case(never_waited, "not_waited", (0,), "finishes", ranks=2),
        Case(missing_key, "missing_key", (0,)),
        Case(different_collective, "different_collective", (0,)),
        Case(another_order, "another_order", (0,), "finishes"),
        Case(swapped_lines, "different_tensor", (0,)),
        Case(different_reduction, "different_reduction", (0,), "finishes"),
        Case(different_root, "different_root", (0, 1, 2)),
        Case(different_shape, "different_tensor", (0, 1, 2)),
        Case(split_mismatch, "split_mismatch", (0, 1), "finishes", ranks=2),
        Case(skipped, "skipped", (0,)),
        Case(uneven, "uneven", (2,)),
        Case(missing_barrier, "missing_barrier", (2,)),
        Case(wrong_group, "wrong_group", (0,)),
        Case(not_a_member, "not_a_member", (2,), "finishes"),
        Case(new_group_skipped, "new_group", (1,)),
        Case(destroyed_group, "destroyed_group", (0,), ranks=2),
        Case(leaked_group, "leaked_group", (0, 1, 2), "finishes"),
        Case(unused_parameter, "unused_parameter", (1,)),
        Case(missing_push, "missing_push", (1,), ranks=2, servers=1),
        Case(missing_init, "missing_init", (0,), ranks=2, servers=1),
        Case(missing_worker, "missing_worker", (1,), ranks=2, servers=1),
        Case(raised, "raised", (1,), "fails"),
        Case(killed, "died", (1,), "fails"),
        Case(straggler, "straggler", (2,), "finishes"),
    ]
}


def page(rule: Rule) -> str:
    """Return a rule's page in Markdown, with a program in which the rule finds a mistake."""
    title, meaning, remedy = rule.page.split("\n\n", 2)
    case = next((case for case in ALL.values() if case.kind == rule.name), None)
    example = case and (
        f'\n\n## Example\n\n`hangs.ALL["{case.program.__name__}"].run()` (after `from '
        "distkit_examples import hangs`) runs this program:\n\n"
        f"```python\n{case.source}```"
    )
    head = f"# {rule.code} {rule.name}\n\n**{title}**"
    return f"{head}\n\n{meaning}{example or ''}\n\n## What to do\n\n{remedy}\n"
