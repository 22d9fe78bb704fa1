"""Every strategy with every training method, on a cluster with a server."""

from __future__ import annotations

from distkit import Cluster
from distkit_strategies import support

EQUAL = "equal to one process"


def test_every_synchronous_strategy_equals_one_process() -> None:
    with Cluster(workers=2, servers=1) as cluster:
        table = support(cluster.run).to_dict("index")
    tpu, asynchronous = table.pop("TPUStrategy"), table.pop("ParameterServerStrategy, async")
    assert {message for cells in table.values() for message in cells.values()} == {EQUAL}
    assert all(message.startswith("refused because TPUStrategy needs") for message in tpu.values())
    assert asynchronous["evaluate/predict"] == EQUAL
    assert asynchronous["fit"].startswith("differs by ")
