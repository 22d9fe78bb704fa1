"""The histogram of staleness: its bins, and that they can be read."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from distkit.views.servers.layout import LETTERS, MAX_BINS, ROOM, bin_of, brief, histogram

LATE = st.lists(st.one_of(st.integers(0, 14), st.integers(0, 700), st.integers(0, 10**6)))


@settings(max_examples=200)
@given(LATE)
def test_bins_are_equal_whole_and_hold_every_gradient_once(late) -> None:
    drawn = histogram(late)
    width, labels, totals = drawn["width"], drawn["ranges"], drawn["totals"]
    assert 1 <= len(labels) == len(totals) <= MAX_BINS and sum(totals) == len(late)
    edges = [[int(x.replace(",", "")) for x in label.split("–")] for label in labels]
    assert [e[0] for e in edges] == [i * width for i in range(len(labels))]
    assert all(e[-1] == e[0] + width - 1 for e in edges)
    for value in late:
        first, last = edges[bin_of(drawn, value)][0], edges[bin_of(drawn, value)][-1]
        assert first <= value <= last
    if max([2, *late]) < MAX_BINS:
        assert width == 1
    assert edges[-1][-1] - max([2, *late]) < width  # no bin lies behind the last value


@given(LATE)
def test_labels_and_counts_of_a_histogram_never_overlap(late) -> None:
    """Also in a font as wide as DejaVu Sans, whose figures are 0.636 em."""
    drawn = histogram(late)
    for words in (drawn["labels"], map(brief, drawn["totals"])):
        wide = [0.636 * LETTERS * sum(0.5 if c == "," else 1 for c in word) for word in words]
        gaps = [drawn["pitch"] - (a + b) / 2 for a, b in pairwise(wide)]
        assert all(gap > 1 for gap in gaps)
    assert drawn["pitch"] * len(drawn["labels"]) <= ROOM + 1


def test_many_gradients_in_a_bin_make_bins_wide_enough_for_their_counts() -> None:
    few, many = histogram(range(12)), histogram([*range(12), *[0] * 123_456])
    assert (len(few["labels"]), few["labels"][-1]) == (12, "11")
    assert many["ranges"][:2] == ["0–1", "2–3"] and many["totals"][0] == 123_458
