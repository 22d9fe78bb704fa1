"""Figures, references and limits of the KVStore benchmark."""

from __future__ import annotations

from benchmarks import kvstore, kvstore_peers, kvstore_tensorflow

OURS = {4 << 20: [1e-3, 2e-3, 3e-3], "step": [1e-3]}


def test_missing_peers_leave_the_echo_and_a_note() -> None:
    turns = {kvstore.OURS: OURS, kvstore_peers.ECHO: {4 << 20: [1e-3]}}
    trip, step, tensorflow = kvstore._figures("somewhere", 2, turns)
    assert (trip.ratio, trip.reached) == (2, "")  # limits hold for MXNet
    assert (step.reference_value, step.reached) == (None, "")
    assert tensorflow.reference == kvstore_tensorflow.MISSING
    assert tensorflow.reached == "reference missing"


def test_each_peer_has_limits() -> None:
    turns = {
        kvstore.OURS: OURS,
        kvstore_peers.MXNET: {4 << 20: [2e-3], "step": [1.5e-3]},
        kvstore_tensorflow.NAME: {"step": [5e-3], "ten steps per call": [2e-3]},
    }
    trip, step, one, ten = kvstore._figures("somewhere", 2, turns)
    assert (trip.ratio, trip.reached) == (1, "must")
    assert (round(step.ratio, 2), step.reached) == (0.67, "must")
    assert "64,000 samples/s" in step.name
    assert (one.ratio, one.reached) == (0.2, "must")
    assert (ten.ratio, ten.reached) == (0.5, "")  # shown, no limit
