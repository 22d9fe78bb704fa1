"""Every strategy with every training method, on a cluster with a server."""

from __future__ import annotations

from distkit import Cluster
from distkit_strategies import support

EQUAL = "equal to one process"


def test_every_synchronous_strategy_equals_one_process() -> None:
    with Cluster(workers=2, servers=1) as cluster:
        table = support(cluster.run).to_dict("index")
    unsupported, asynchronous = table.pop("TPUStrategy"), table.pop("ParameterServerStrategy")
    assert {message for cells in table.values() for message in cells.values()} == {EQUAL}
    assert all(
        message.startswith("not supported: TPUStrategy needs") for message in unsupported.values()
    )
    assert asynchronous["evaluate/predict"] == EQUAL
    assert asynchronous["fit"].startswith("differs by ")
