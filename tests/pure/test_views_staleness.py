"""The histogram of staleness: its bins."""

from hypothesis import given
from hypothesis import strategies as st

from distkit.views.servers.scene import LATEST, histogram


@given(st.lists(st.integers(0, 14) | st.integers(0, 10**6)))
def test_every_gradient_is_in_one_bin(late) -> None:
    bins = histogram(late)
    assert 3 <= len(bins) <= LATEST + 1 and sum(bins) == len(late)
    assert bins[:LATEST] == [late.count(i) for i in range(len(bins))][:LATEST]
