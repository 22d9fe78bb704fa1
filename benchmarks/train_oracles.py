"""Training against oracles: torch's schedules, the formulas of memory, FSDP2, and one process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks.figure import Figure, figure

Orders = list[list[str]]

#: Replicas that train under each strategy.
RANKS = 2

#: GiB of 8 billion parameters, and of their activations by the length of a sequence; then of an
#: embedding, and of the largest stage of a pipeline of 8.
PUBLISHED = {
    "parameters": 14.957,
    "gradients": 14.957,
    "optimizer": 59.828,
    "1024": 4.25,
    "4096": 17.0,
    "16384": 68.0,
    "embedding": 0.9785,
    "stage": 2.6035,
}


# -- schedules ---------------------------------------------------------------------------------


def schedules(reps: int, details: dict[str, Any]) -> Iterator[Figure]:
    """Pipeline schedules that are not in torch's order, of all that torch accepts."""
    from distkit.algorithms import PIPELINES

    compared = dict.fromkeys(PIPELINES, 0)
    wrong = []
    with light():
        for name, p, m, v in product(PIPELINES, range(1, 9), range(1, 33), range(1, 5)):
            if v > 1 and not PIPELINES[name].looped:
                continue
            if expected := torchs(PIPELINES[name].peer, p, m, v):
                compared[name] += 1
                if listed(name, p, m, v) != expected:
                    wrong.append((name, p, m, v))
    details["schedules compared"], details["schedules that differ"] = compared, wrong
    name = f"schedules of {sum(compared.values())} (p ≤ 8, m ≤ 32, v ≤ 4) that differ from torch's"
    yield figure(name, "", [float(len(wrong))], must=0, aim=0, absolute=True)


@contextmanager
def light() -> Iterator[None]:
    """Torch's schedules without what only a run needs: mocks of stages, and their messages."""
    from torch.distributed.pipelining import _schedule_visualizer, schedules

    with (
        mock.patch.object(
            _schedule_visualizer.mock, "create_autospec", lambda *a, **k: SimpleNamespace()
        ),
        mock.patch.object(schedules._PipelineScheduleRuntime, "_prepare_schedule_with_comms"),
    ):
        yield


def torchs(peer: str, p: int, m: int, v: int) -> Orders | None:
    """Torch's order, without the reduction of gradients at its end; None if torch refuses."""
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    several = issubclass(getattr(schedules, peer), schedules.PipelineScheduleMulti)
    stage = SimpleNamespace(group_rank=0, group_size=p, num_stages=p, submod=None)
    try:
        if several and v == 1:
            ranks = getattr(schedules, peer)([stage], m).pipeline_order
            found = [ranks[rank] for rank in range(p)]
        else:
            found = get_schedule_ops(peer.removeprefix("Schedule"), p, m, v)
    except ValueError:
        return None
    return [[str(a) for a in rank if a and a.computation_type.value in "FBIW"] for rank in found]


def listed(name: str, p: int, m: int, v: int) -> Orders:
    """Our order; 1F1B's last stage as torch lists it: forwards from 1, run from 0."""
    from distkit.algorithms import PIPELINES

    orders = PIPELINES[name].orders(p, m, v)
    if name == "1f1b":
        last = orders[-1]
        orders[-1] = [a._replace(microbatch=a.microbatch + (a.kind == "F")) for a in last]
    return [[str(action) for action in order] for order in orders]


# -- memory ------------------------------------------------------------------------------------


def memory(reps: int, details: dict[str, Any]) -> Iterator[Figure]:
    """The formulas beside published numbers, and beside what ranks hold in each stage of ZeRO."""
    import distkit as dk
    from distkit_simulation.parallel import States

    found = formulas()
    details["memory [GiB]"] = found
    apart = [abs(found[what] / gib - 1) for what, gib in PUBLISHED.items()]
    name = f"memory of an 8B model, {len(PUBLISHED)} formulas, largest error over published numbers"
    yield figure(name, "", [max(apart)], must=5e-5, absolute=True)

    sizes = {"parameter": 4, "gradient": 4, "optimizer": 8}
    expected = [
        States.of(6 * (128 * 128 + 128), ranks=4, stage=stage, **sizes).total for stage in range(4)
    ]
    ranks = dk.run_ranks(held, 4, record=False).results
    details["memory of rank 0 by stage [bytes]"] = {"measured": ranks[0], "formula": expected}
    apart = [
        abs(mine / its - 1) for rank in ranks for mine, its in zip(rank, expected, strict=True)
    ]
    name = "memory of a rank, ZeRO 0 to 3 on 4 ranks, largest error of the formula"
    yield figure(name, "", [max(apart)], must=0.05, absolute=True)


def formulas() -> dict[str, float]:
    """The numbers of ``PUBLISHED``, by formula."""
    from distkit_simulation.parallel import LLAMA_3_8B, States
    from distkit_simulation.parallel.memory import GIB

    whole = States.of(LLAMA_3_8B.parameters)
    found = {
        **vars(whole),
        **{str(s): LLAMA_3_8B.activations(s) for s in (1024, 4096, 16384)},
        "embedding": 2 * LLAMA_3_8B.embedding,
        "stage": 2 * LLAMA_3_8B.largest_stage(8),
    }
    return {what: size / GIB for what, size in found.items()}


def held() -> list[int]:
    """On a rank: the bytes of all its tensors after backward, by stage of ZeRO."""
    import torch
    from torch import nn

    from distkit.algorithms.zero import Zero
    from distkit_simulation.parallel import tensor_bytes

    found, x = [], torch.randn(2, 128)
    for stage in range(4):
        before = tensor_bytes()
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))
        zero = Zero(model, lambda parts: torch.optim.Adam(parts, foreach=False), stage=stage)
        for _ in range(2):
            zero.optimizer.step()  # makes the states
            model(x).sum().backward()
        gc.collect()
        found.append(tensor_bytes() - before)
        del model, zero
        gc.collect()
    return found


# -- ZeRO --------------------------------------------------------------------------------------


def zero(reps: int, details: dict[str, Any]) -> Iterator[Figure]:
    """The losses of our page of ZeRO, stages 1 to 3, beside those of FSDP2, in float64."""
    import distkit as dk

    for ranks in (2, 4):
        apart = max(dk.run_ranks(from_fsdp, ranks, record=False).results)
        name = f"losses of ZeRO 1 to 3 and of FSDP2, {ranks} ranks, largest difference"
        yield figure(name, "", [apart], must=1e-12, aim=0, absolute=True)


def from_fsdp() -> float:
    """On a rank: the largest difference of the losses of a stage from FSDP2's."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import distkit as dk
    from distkit.algorithms.zero import Zero

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = dk.demos.model().double()
    for layer in [*(one for one in sharded.children() if [*one.parameters()]), sharded]:
        fully_shard(layer, mesh=mesh)
    adam = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    theirs = losses(sharded, adam.step, adam.zero_grad)
    apart = []
    for stage in (1, 2, 3):
        model = dk.demos.model().double()
        page = Zero(model, lambda parts: torch.optim.AdamW(parts, lr=1e-2), stage=stage)
        mine = losses(model, page.step)
        apart += [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
    return max(apart)


def losses(model: Any, *step: Any) -> list[float]:
    """The losses of twenty steps on this rank's digits."""
    import torch.nn.functional as F

    import distkit as dk

    images, labels = dk.shard(*dk.demos.digits())
    found = []
    for x, y in list(zip(images.double().split(16), labels.split(16), strict=True))[:20]:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for act in step:
            act()
        found.append(loss.item())
    return found


# -- strategies --------------------------------------------------------------------------------


def strategies(reps: int, details: dict[str, Any]) -> Iterator[Figure]:
    """Accuracy on digits that no replica has seen, after a ``fit`` under every strategy."""
    from distkit import Cluster
    from distkit_strategies import Strategy
    from distkit_strategies.table import STRATEGIES

    alone = fitted(Strategy())
    with Cluster(workers=RANKS, servers=1) as cluster:
        found = {
            name: cluster.run(fitted, make()).results
            for name, make in STRATEGIES.items()
            if name != "TPUStrategy"
        }
    details["held-out accuracy by strategy"] = {"one process": alone, **found}
    wrong = 1 - min(min(results) for results in found.values())
    name = f"error on held-out digits, the worst of {len(found)} strategies, {RANKS} ranks"
    yield figure(name, "", [wrong], must=0.03, absolute=True)
    others = [name for name, got in found.items() if {*got} != {alone} and "async" not in name]
    name = "synchronous strategies whose accuracy is not that of one process"
    yield figure(name, "", [float(len(others))], aim=0, absolute=True)


def fitted(strategy: Any) -> float:
    """Accuracy on the last fifth of the digits after a ``fit`` on the others."""
    import torch

    import distkit as dk
    from distkit_strategies import Model

    images, labels = dk.demos.digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    seen, held_out = order[:1437], order[1437:]
    with strategy.scope():
        net = dk.demos.model().double()
        model = Model(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
    given = images[seen].double(), labels[seen]
    model.fit(given, global_batch=32, epochs=30, verbose=False)
    rest = images[held_out].double(), labels[held_out]
    return model.evaluate(rest, global_batch=64)["accuracy"]
