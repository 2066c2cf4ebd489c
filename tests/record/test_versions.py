"""Ranges of versions, beside what the packaging library says of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowledger.record.versions import covers

packaging = pytest.importorskip("packaging.specifiers")
numbers = st.lists(st.integers(0, 12), min_size=1, max_size=3).map(lambda parts: ".".join(map(str, parts)))


@given(numbers, numbers, numbers)
def test_a_range_covers_what_packaging_says(low, high, version):
    wanted = f">={low},<{high}"
    assert covers(wanted, version) == (version in packaging.SpecifierSet(wanted, prereleases=True))


def test_what_follows_the_numbers_does_not_count():
    assert covers(">=1.16,<1.17", "1.16.0.dev0+cpu")
    assert not covers(">=1.16,<1.17", "1.17")
