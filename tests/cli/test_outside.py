"""The line on metrics outside their healthy range; the README's `run` and `watch` show it of a real run."""

import math

from flowledger.cli.outside import spread


def test_a_range_is_said_by_the_bounds_that_it_has() -> None:
    assert spread(0.0, 0.3) == "0 … 0.3"
    assert spread(0.65, math.inf) == "from 0.65"
    assert spread(-math.inf, 3.0) == "up to 3"
