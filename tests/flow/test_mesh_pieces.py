"""Law 1 for every tensor of the flow in every form and variant: logical -> local -> logical, each element owned once."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.flow.dims import SYMBOLS
from flowledger.flow.errors import BadInput
from flowledger.flow.mesh import authoritative, elements, local_shape, mesh
from flowledger.flow.pieces import owner, piece_of, placements_of, shape_of, to_local, to_logical
from flowledger.flow.tensors import tensor, tensors

CASES = [(row, form, None) for row in tensors().values() for form in row.forms] + [
    (row, None, variant) for row in tensors().values() for variant in row.variants
]

small = st.builds(
    lambda degrees, ep: mesh(**{**degrees, "dp": degrees.get("dp", 1) * ep, "ep": ep}),
    st.dictionaries(st.sampled_from(["pp", "dp", "cp", "sp", "tp"]), st.integers(2, 3), max_size=2), st.integers(1, 2),
)  # fmt: skip


@pytest.mark.parametrize(("row", "form", "variant"), CASES, ids=[f"{r.name}-{f.name if f else v}" for r, f, v in CASES])
@given(data=st.data())
@settings(max_examples=4, deadline=None)
def test_every_element_has_one_owner_and_finds_its_way_back(row, form, variant, data):
    dims = (form or row.forms[0]).dims
    most = 7 if len(dims) < 3 else 3
    symbols = sorted({symbol for dim in dims for symbol in dim.symbols} & SYMBOLS.keys())
    sizes = {symbol: data.draw(st.integers(1, most), label=symbol) for symbol in symbols}
    on = data.draw(small)
    owners = authoritative(placements_of(row, form, variant), on)
    owned: Counter[tuple[int, ...]] = Counter()
    for rank in range(on.size):
        piece = piece_of(row, on, rank, sizes, form=form, variant=variant)
        for local in elements(shape_of(piece)):
            index = to_logical(piece, local)
            assert to_local(piece, index) == local
            owned[index] += rank in owners
    assert owned == Counter(dict.fromkeys(elements([dim.resolve(sizes) for dim in dims]), 1))
    last = max(owned)
    rank = owner(row, on, last, sizes, form=form, variant=variant)
    assert rank in owners
    assert to_local(piece_of(row, on, rank, sizes, form=form, variant=variant), last) is not None


@pytest.mark.parametrize(("name", "form"), [("response_ids", "token"), ("params", "model"), ("logits", "chunk")])
def test_local_shapes_are_those_of_the_mesh_where_nothing_is_dealt_in_a_zigzag(name, form):
    row = tensor(name)
    shown = next(one for one in row.forms if one.name == form)
    sizes = {"B_prompt": 5, "G": 2, "S_resp": 7, "L": 5, "P": 11, "T_logit": 9, "V": 13}
    on = mesh(dp=3, sp=2, pp=2, tp=2)
    shape = [dim.resolve(sizes) for dim in shown.dims]
    for rank in range(on.size):
        piece = piece_of(row, on, rank, sizes, form=shown)
        assert shape_of(piece) == local_shape(shape, row.placement_of(shown), on, rank)


def test_packed_tokens_under_cp_are_dealt_in_a_zigzag_by_hand():
    row = tensor("hidden_states")
    on = mesh(dp=2, cp=2)
    # 16 tokens: 8 a dp rank, four chunks of 2; cp 0 has the outer two, cp 1 the inner two
    pieces = [piece_of(row, on, rank, {"T": 16, "H": 1}) for rank in range(4)]
    assert [piece[1] for piece in pieces] == [
        ((0, 2), (6, 8)), ((2, 4), (4, 6)), ((8, 10), (14, 16)), ((10, 12), (12, 14)),
    ]  # fmt: skip
    assert to_logical(pieces[2], (0, 3, 0)) == (0, 15, 0)
    assert to_local(pieces[2], (0, 15, 0)) == (0, 3, 0) and to_local(pieces[3], (0, 15, 0)) is None
    assert owner(row, on, (0, 15, 0), {"T": 16, "H": 1}) == 2


def test_what_is_not_there_is_refused():
    row, sizes, on = tensor("grads"), {"P": 6}, mesh(dp=2)
    with pytest.raises(BadInput, match="grads has no variant 'reduced'; it has unreduced"):
        piece_of(row, on, 0, sizes, variant="reduced")
    with pytest.raises(BadInput, match="index 3 is outside a piece of 3"):
        to_logical(piece_of(row, on, 0, sizes), (3,))
    with pytest.raises(BadInput, match=r"grads has no element \[6\]"):
        owner(row, on, (6,), sizes)
