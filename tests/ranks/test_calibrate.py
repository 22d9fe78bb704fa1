"""Calibration on real ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import distkit as dk
from distkit_simulation import MeasuredNetwork, compare

SIZES = (4, 1 << 10, 1 << 14, 1 << 17, 1 << 19, 1 << 20)


class ForkedRanks:
    """A minimal cluster for calibration, with forked ranks."""

    def __init__(self, n: int) -> None:
        self.n = n

    def submit(self, fn: Any, *args: Any) -> Any:
        return dk.run_ranks(fn, self.n, *args, record=False)


@pytest.fixture(scope="module")
def machine() -> MeasuredNetwork:
    return dk.simulation.calibrate(ForkedRanks(3), sizes=SIZES, batches=3)


def test_calibration_finds_links_with_their_uncertainty(machine: MeasuredNetwork) -> None:
    for count in {1, machine.n}:
        found = machine.fit(count)
        assert 0 <= found.alpha[0] <= found.alpha[1]
        assert 0 <= found.beta[0] <= found.beta[1]
        assert 0 <= found.link.beta < 1e-6
    assert machine.link.gamma > 0
    assert 0 <= machine.overhead_seconds(1024) < 1
    assert "single" in repr(machine)


def test_calibration_is_a_network_for_the_simulator(machine: MeasuredNetwork) -> None:
    n = machine.n
    times = [dk.simulation.finish_times("ring", n, 4 * k, machine).max() for k in (1, 1 << 26)]
    assert 0 < times[0] < times[1]
    assert len(dk.simulation.simulate("tree", n, 4096, machine).messages) == 2 * (n - 1)
    with pytest.raises(ValueError, match=rf"the network \(measured\) has {n} ranks, not 5"):
        dk.simulation.simulate("ring", 5, 4, machine)
    with pytest.raises(ValueError, match="17 concurrent transfers were not measured"):
        machine.fit(17)


def test_calibration_interpolates_measurements(machine: MeasuredNetwork) -> None:
    for count, at in machine.moves.items():
        for nbytes, batches in at.items():
            seconds = machine.seconds(np.zeros(count), np.zeros(count), np.full(count, nbytes))
            assert seconds == pytest.approx([np.quantile(batches, 0.25)] * count)


def test_comparison_is_plotted(machine: MeasuredNetwork) -> None:
    measured = {"ring": {1 << 10: 1e-3, 1 << 20: 2e-3}}
    (axes,) = compare(machine.n, machine, measured=measured).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["ring", "lower bound"]
    texts = compare(machine.n, machine).axes[0].get_legend().get_texts()
    assert len(texts) == len(dk.algorithms.ALL_REDUCES) + 1


def test_cluster_can_be_calibrated() -> None:
    with dk.Cluster(2) as cluster:
        assert dk.simulation.calibrate(cluster, sizes=[4, 1024, 65536], batches=1).n == 2


@pytest.mark.parametrize(
    ("cluster", "options", "error", "message"),
    [
        *[
            (ForkedRanks(2), {"sizes": sizes}, ValueError, "at least 3 sizes in ascending order")
            for sizes in ([], [4], [4, 1 << 20], [8, 4, 1 << 20], [0, 4, 1 << 20], [4, 8, 64])
        ],
        (4, {}, TypeError, r"needs a dk.Cluster, not int"),
        (ForkedRanks(1), {"sizes": SIZES, "batches": 1}, ValueError, "needs at least 2 ranks"),
    ],
)
def test_invalid_calibration_raises(
    cluster: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        dk.simulation.calibrate(cluster, **options)
