"""References and functions resolve to what omegaconf 2.3 makes of the same document."""

import pytest

from flowledger.config.interpolation import resolved
from flowledger.flow.errors import BadInput


def test_references_and_functions():
    tree = {
        "a": {"b": {"x": 1, "y": "${.x}", "z": "${..w}"}, "w": 2, "v": "${a.b}"},
        "list": ["${a.w}", 3],
        "size": "${mul:${a.w}, ${mul:2, 5}}",
        "text": "run-${a.w}-${a.b.x}",
        "chosen": "${oc.select:a.none, 7}",
        "nothing": None,
        "same": "${nothing}",
    }
    assert resolved(tree, {}) == {  # OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
        "a": {"b": {"x": 1, "y": 1, "z": 2}, "w": 2, "v": {"x": 1, "y": 1, "z": 2}},
        "list": [2, 3],
        "size": 20,
        "text": "run-2-1",
        "chosen": 7,
        "nothing": None,
        "same": None,
    }


def test_an_environment_variable_is_seen_only_where_it_is_given():
    tree = {"a": "${oc.env:NAME}", "b": "${oc.env:OTHER,none}", "c": "${oc.env:NAME}/x"}
    assert resolved(tree, {"NAME": "n"}) == {"a": "n", "b": "none", "c": "n/x"}
    assert resolved(tree, {}) == {"a": "${oc.env:NAME}", "b": "none", "c": "${oc.env:NAME}/x"}


@pytest.mark.parametrize("value", ["${missing.key}", "${unknown:1}", "${div:1,0}", "${mul:a,b}", "${"])
def test_what_cannot_be_resolved_stays_as_it_is_written(value):
    assert resolved({"a": value}, {}) == {"a": value}


@pytest.mark.parametrize("tree", [{"a": "${b}", "b": "${a}"}, {"a": {"b": "${a}"}}])
def test_a_circle_is_refused(tree):
    with pytest.raises(BadInput, match="lead back to themselves"):
        resolved(tree, {})
