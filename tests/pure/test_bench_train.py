"""The benchmark of training: what it compares, and what it leaves behind."""

from __future__ import annotations

import psutil
import pytest

from benchmarks import train_oracles, train_tensorflow
from distkit.errors import DistkitError


def test_a_peer_that_says_nothing_is_ended_with_all_that_it_started() -> None:
    mark = "86413.25"
    with pytest.raises(DistkitError, match="TensorFlow gave no answer within 1 s"):
        train_tensorflow._ran(["sh", "-c", f"sleep {mark} & sleep {mark}"], {}, within=1)
    left = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])]
    assert ["sleep", mark] not in left


def test_what_a_peer_prints_is_given() -> None:
    said = train_tensorflow._ran(["sh", "-c", "echo seconds 1; echo no >&2"], {})
    assert said == ("seconds 1\n", "no\n")


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_an_order_is_compared_with_torchs(name: str) -> None:
    from distkit.algorithms import PIPELINES

    with train_oracles.light():
        expected = train_oracles.torchs(PIPELINES[name].peer, 4, 8, 1)
    assert train_oracles.listed(name, 4, 8, 1) == expected
    assert train_oracles.listed(name, 4, 16, 1) != expected
