"""The histogram of staleness: its bins."""

from hypothesis import given, settings
from hypothesis import strategies as st

from distkit.views.servers.scene import MAX_BINS, histogram

LATE = st.lists(st.one_of(st.integers(0, 14), st.integers(0, 700), st.integers(0, 10**6)))


@settings(max_examples=200)
@given(LATE)
def test_bins_are_equal_whole_and_hold_every_gradient_once(late) -> None:
    bins = histogram(late)
    width = {len(values) for values in bins}
    assert 1 <= len(bins) <= MAX_BINS and sum(bins.values()) == len(late) and len(width) == 1
    assert [values.start for values in bins] == [i * min(width) for i in range(len(bins))]
    assert all(n == sum(value in values for value in late) for values, n in bins.items())
    if max([2, *late]) < MAX_BINS:
        assert width == {1}
    assert max([2, *late]) in [*bins][-1]  # no bin lies behind the last value
