"""What a probe's paths lead to."""

from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from flowledger.record.watch import pick

ENTRIES = {"a": 1, "b": None, "c": 3, "d": 4}
PATHS = [(("batch", name), name.upper()) for name in ("a", "b", "c", "missing", "d")]
FOUND = [("A", 1), ("C", 3), ("D", 4)]


class Kept(Mapping):
    """Keeps a dictionary, as tensordict does, and counts how often it is asked."""

    def __init__(self):
        self.asked = 0

    def __getitem__(self, name):
        self.asked += 1
        return ENTRIES[name]

    def __iter__(self):
        return iter(ENTRIES)

    def __len__(self):
        return len(ENTRIES)


class Seen(Kept):
    def items(self):
        return ENTRIES.items()


class Broken(Kept):
    def items(self):
        raise RuntimeError("some entries cannot be had")


@pytest.mark.parametrize("batch", [dict(ENTRIES), Kept(), Seen(), Broken(), SimpleNamespace(**ENTRIES)], ids=type)
def test_all_entries_of_a_batch_are_found_whatever_it_is(batch):
    assert pick(PATHS, {"batch": batch}) == FOUND
    assert pick(PATHS, SimpleNamespace(batch=batch)) == FOUND
    assert pick([(("args", *path), name) for path, name in PATHS], None, {"batch": batch}) == FOUND
    assert pick([*PATHS, (("batch",), "whole"), *PATHS], {"batch": batch}) == [*FOUND, ("whole", batch), *FOUND]


def test_a_batch_that_shows_its_entries_is_not_asked_for_each():
    batch = Seen()
    assert pick(PATHS, {"batch": batch}) == FOUND
    assert batch.asked == 0


def test_two_batches_are_kept_apart():
    paths = [((of, name), of + name) for of in ("x", "y") for name in "acd"]
    found = pick(paths, {"x": {"a": 1, "c": 2, "d": 3}, "y": {"a": 4, "c": 5, "d": 6}})
    assert found == [("xa", 1), ("xc", 2), ("xd", 3), ("ya", 4), ("yc", 5), ("yd", 6)]
    assert pick(paths, {"x": None}) == []
