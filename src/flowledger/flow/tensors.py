"""The tensors of an RL step, one row each; `tensors.toml` beside this file holds the rows.

A tensor has one or more *forms*: the shapes in which it travels. `reward` is `[B_prompt*G]` per sample and
`[B_prompt, G]` per group; the reshape between them is a fact of its own. A form is also what the recorder looks for
when it meets a tensor of that name (`form_of`). *Foreign* forms are met in other loops alone: a framework that repeats
its prompts per sample has `prompt_ids` as `[B_prompt*G, S_prompt]`. No plan has them, and no stage of the own loop.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from flowledger.flow.axes import AXES
from flowledger.flow.dims import Dim, Shape, parse_shape, spell
from flowledger.flow.errors import BadInput, nearest
from flowledger.flow.kinds import KINDS

LIFETIMES = ("micro_batch", "stage", "step", "persistent")
# Where a form is met that has such a symbol: within a micro-batch, or within a step of a sampling engine's scheduler.
GRAINS = {
    "micro_batch": frozenset({"B_micro", "T", "T_logit"}),
    "decode": frozenset({"B_admit", "B_run", "B_slot"}),
}
PADDINGS = ("left", "right", "both", "packed", "none")  # both: a left-padded prompt and a right-padded response


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One shape of a tensor: dims, padding, and how it comes from another form or tensor."""

    name: str  # sample, group, token, padded, packed, chunk, layer, ...
    dims: Shape
    padding: str = "none"
    broadcast: str | None = None  # the dim along which values repeat, e.g. S_resp
    source: str | None = None  # what it is made from: `advantage` broadcasts to `advantages`; `reward/sample` reshapes
    placement: Mapping[str, str] | None = None  # where this form is cut differently from the tensor's main form
    alias: str | None = None  # the alias that alone means this form, where a shape cannot tell it from another

    @property
    def shape(self) -> str:
        return spell(self.dims)

    @property
    def grain(self) -> str | None:
        """Where alone this form is met, one of GRAINS; None: wherever a stage is handed the tensor."""
        symbols = {symbol for dim in self.dims for symbol in dim.symbols}
        return next((name for name, own in GRAINS.items() if own & symbols), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor of the flow. `producer`, `readers` and `freed_by` are places: `stage` or `stage/phase`.

    A reader may end in `@previous`: it reads what the step before has written. Several stages make a tensor such as
    `logits` each for themselves; `producer` is then the one that matters most and `also_written_by` names the others.
    """

    name: str
    forms: tuple[Form, ...]
    dtype: str  # float32, int64, bool, or `model` (the dtype that the model computes in)
    kind: str  # a memory kind of flow/kinds
    mask: str | None  # the tensor whose elements say which of this one's count
    producer: str
    readers: tuple[str, ...]
    freed_by: str  # the place after which nothing needs it; "never" when persistent
    lifetime: str  # micro_batch, stage, step, persistent
    owner: str  # role@stage that frees it
    placement: Mapping[str, str]  # mesh axis -> Shard(d) | Replicate() | Partial(); axes not named replicate
    common_bug: str
    common_bug_zh: str
    purpose: str
    purpose_zh: str
    foreign: tuple[Form, ...] = ()  # forms that other loops alone have
    variants: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # other placements of the main form
    mesh: str | None = None  # of the ranks that hold it, whichever stage touches it; None: the stage's own
    also_written_by: tuple[str, ...] = ()
    also_freed_by: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    token_column: str | None = None  # its column in the ledger's `tokens`
    sample_column: str | None = None  # its column in the ledger's `samples`

    @property
    def dims(self) -> Shape:
        return self.forms[0].dims

    @property
    def written_by(self) -> tuple[str, ...]:
        """Every place that writes it."""
        return (self.producer, *self.also_written_by)

    @property
    def released_by(self) -> tuple[str, ...]:
        """Every place after which it is gone; none when it is persistent."""
        return () if self.freed_by == "never" else (self.freed_by, *self.also_freed_by)

    def mask_of(self, form: Form | None) -> str | None:
        """Its mask in this form; none where a foreign form has summed up what the mask covers."""
        return None if form in self.foreign and form is not None and len(form.dims) < len(self.dims) else self.mask

    def placement_of(self, form: Form | None = None) -> dict[str, str]:
        """Axis -> placement for every axis of the mesh, in the order of AXES; what is not written down replicates."""
        own = (form or self.forms[0]).placement
        written = self.placement if own is None else own
        return {axis: written.get(axis, "Replicate()") for axis in AXES}


@cache
def tensors() -> Mapping[str, Tensor]:
    """Every tensor of the flow by name, in the order in which a step meets them."""
    text = files("flowledger.flow").joinpath("tensors.toml").read_text(encoding="utf-8")
    rows = [_row(raw) for raw in tomllib.loads(text)["tensor"]]
    return {row.name: row for row in rows}


def tensor(name: str) -> Tensor:
    """The row of one tensor, by its name or an alias. Raises BadInput with the nearest known name."""
    rows = tensors()
    found = rows.get(name) or next((row for row in rows.values() if name in row.aliases), None)
    if found is None:
        raise BadInput(f"no tensor is called {name!r}{nearest(name, rows)}")
    return found


def stage_of(place: str) -> str:
    """`update_actor` for `update_actor`, `update_actor/forward` and `update_actor/forward@previous`."""
    return place.partition("@")[0].partition("/")[0]


# (placement, at which dimension, the dimension, sizes of symbols) -> what one rank holds along it
Share = Callable[[Mapping[str, str], int, Dim, Mapping[str, int]], int]


def form_of(
    name: str,
    shape: tuple[int, ...],
    bindings: Mapping[str, int] | None = None,
    *,
    within: str | None = None,
    share: Share | None = None,
    foreign: bool = False,
) -> Form | None:
    """The form whose dims fit an observed shape: same rank and, where symbols are bound, same sizes.

    `share` says what a rank that holds a part of the tensor has of a dimension; None: all of it.

    Several may fit, when a micro-batch happens to have as many samples as the step has prompts: `within`, one of GRAINS,
    then says which one it is. Elsewhere the step's own forms come first, those that this rank has put together too.
    `foreign`: the loop is another's, and may have forms of its own; those of the flow come first. Falls
    back to the first form of the right rank (so that a wrong size is still named, and can be reported), then None when no
    form has that rank.
    """
    row, sizes = tensor(name), bindings or {}
    forms = (*row.forms, *row.foreign) if foreign else row.forms
    meant = [form for form in forms if form.alias == name] or [form for form in forms if form.alias is None]
    same_rank = [form for form in meant if len(form.dims) == len(shape)]
    fitting = [form for form in same_rank if fits(row, form, shape, sizes, share)]
    here = [form for form in fitting if within is not None and form.grain == within]
    steps = [form for form in fitting if form.grain is None]
    whole = [form for form in same_rank if form.grain is None and fits(row, form, shape, sizes)]
    parts = [form for form in same_rank if form in row.foreign and form.grain is None]  # a share that is no whole group
    return next(iter(here or steps or whole or parts or fitting or same_rank), None)


def fits(
    row: Tensor, form: Form, shape: tuple[int, ...], bindings: Mapping[str, int], share: Share | None = None
) -> bool:
    """Whether an observed shape is that of a form, as far as its symbols are bound; `share` as in `form_of`."""
    bound = [
        (at, dim, size)
        for at, (dim, size) in enumerate(zip(form.dims, shape, strict=True))
        if dim.symbols <= bindings.keys()
    ]
    if share is None:
        return all(dim.resolve(bindings) == size for _, dim, size in bound)
    placement = row.placement_of(form)
    return all(share(placement, at, dim, bindings) == size for at, dim, size in bound)


def _row(raw: dict[str, object]) -> Tensor:
    fields = dict(raw)
    forms, foreign = (
        tuple(
            Form(**{**form, "name": name, "dims": parse_shape(form["dims"])})
            for name, form in fields.pop(key, {}).items()  # type: ignore[attr-defined]  # TOML table, checked below
        )
        for key in ("forms", "foreign")
    )
    for listed in ("readers", "aliases", "also_written_by", "also_freed_by"):
        fields[listed] = tuple(fields.get(listed, ()))  # type: ignore[arg-type]  # a TOML list
    row = Tensor(**{"mask": None, **fields, "forms": forms, "foreign": foreign})  # type: ignore[arg-type]  # a TOML table, checked below
    if row.kind not in KINDS or row.lifetime not in LIFETIMES or not forms:
        raise AssertionError(
            f"tensors.toml: {row.name}: kind {row.kind!r}, lifetime {row.lifetime!r}, {len(forms)} forms"
        )
    return row
