"""The mesh that a plan is made for."""

import pytest

from flowledger.config.engine import Mesh
from flowledger.plan.setting import trains_on


@pytest.mark.parametrize(
    ("asked", "dp", "folds", "degrees"),
    [
        (Mesh(tp=4, cp=2, pp=8, ep=32, etp=1), 16, True, {"ep": 32, "etp": 1}),  # beyond dp
        (Mesh(tp=4, ep=2), 4, True, {"ep": 2, "etp": 4}),  # null: as tp
        (Mesh(tp=4, ep=2), 4, False, {"ep": 2}),  # rides on dp
        (Mesh(tp=4), 4, True, {"ep": 1}),
        (Mesh(tp=2, ep=3), 4, True, {"ep": 1}),  # 6 does not divide 8: how experts are dealt is not known
    ],
)
def test_how_experts_lie(asked: Mesh, dp: int, folds: bool, degrees: dict[str, int]) -> None:
    found = dict(trains_on(asked, dp, folds=folds).degrees)
    assert {axis: degree for axis, degree in found.items() if axis in ("ep", "etp")} == degrees
    assert (found["dp"], found["tp"], found["pp"]) == (dp, asked.tp, asked.pp)
