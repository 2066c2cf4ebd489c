"""A plan as a run is held against it: the document that `flowledger plan --json` prints, with its types checked."""

import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import msgspec

from flowledger.flow.dims import parse_shape
from flowledger.flow.errors import BadInput
from flowledger.flow.stages import stage
from flowledger.flow.tensors import tensor
from flowledger.ledger.rows import FindingRow, TensorRow

SCHEMA = 1
# Symbol -> the key of RunConfig that sets it, of those that a reader may have to assume.
SET_BY = {
    "B_prompt": "data.prompts_per_step", "G": "rollout.samples_per_prompt", "S_prompt": "data.max_prompt_tokens",
    "S_resp": "rollout.max_response_tokens",
}  # fmt: skip
SAID = re.compile(r"@|:\d|command line")

# Words of the batch chain -> the stage whose micro-batches they count.
PASSES = {
    "update": "update_actor", "old log-probs": "old_log_prob", "reference log-probs": "ref_log_prob", "values": "values",
    "critic update": "update_critic",
}  # fmt: skip


class Summary(msgspec.Struct, kw_only=True, frozen=True):
    """What was planned, in short."""

    framework: str
    model: str
    world: int
    mesh: dict[str, int]  # axis -> degree
    framework_version: str | None = None


class Link(msgspec.Struct, kw_only=True, frozen=True):
    """One quantity of the batch chain."""

    quantity: str
    value: float | str | None = None


class Peak(msgspec.Struct, kw_only=True, frozen=True):
    """The planned peak of one stage on one kind of rank, in bytes."""

    step: str  # first, or later
    stage: str
    ranks: str
    rank: int
    rank_count: int
    allocated: int
    instant: str
    param: int
    grad: int
    optimizer: int
    activation: int
    kv_cache: int
    comm_buffer: int
    temporary: int
    batch: int
    residue: int


class Planned(msgspec.Struct, kw_only=True, frozen=True, dict=True):
    """What of the document a run can be held against."""

    run: str
    summary: Summary
    chain: list[Link]
    checks: list[FindingRow]
    rows: list[Peak]
    shapes: list[TensorRow]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Dimension of the whole step, as it is spelt -> its planned size: `S_resp` 16, `B_prompt*G` 64.

        Of stages whose micro-batches or models differ, that of the first.
        """
        found: dict[str, int] = {}
        for row in self.shapes:
            for dim, size in zip(parse_shape(row.dims or "[]"), row.logical_shape or (), strict=False):
                found.setdefault(dim.text, size)
        layers = [row.layer for row in self.shapes if row.layer is not None]
        return found | ({"L": max(layers) + 1} if layers else {})

    @cached_property
    def group(self) -> int:
        """Samples of a prompt; 1 where the plan has no such shape."""
        prompts = self.sizes.get("B_prompt", 0)
        return max(1, self.sizes.get("B_prompt*G", prompts) // prompts) if prompts else 1

    @cached_property
    def dynamic(self) -> frozenset[str]:
        """Stages whose micro-batches are filled with tokens, so that nobody knows before how many samples are in one."""
        said = {link.quantity for link in self.chain}

        def filled(name: str) -> bool:
            return f"{name}: worst micro-batch" in said

        return frozenset(
            stage
            for name, stage in PASSES.items()
            if filled(name) or (f"{name}: micro-batch" not in said and filled("update"))
        )


def assumed(source_of: Callable[[str], str]) -> frozenset[str]:
    """Symbols whose size no key of the configuration has, and no default of its framework: the reader took one.

    source_of: where a key of RunConfig has its value from, `key@file:line` or `key default@…` where anybody says.
    """
    return frozenset(symbol for symbol, key in SET_BY.items() if not SAID.search(source_of(key)))


def read(document: Any, source: str) -> Planned:
    """The plan of a document. Raises BadInput where it is none, or one that another version wrote."""
    if not isinstance(document, Mapping) or document.get("verb") != "plan":
        raise BadInput(f"{source} is no plan: give a configuration, or what `flowledger plan … --json` has printed")
    if document.get("schema") != SCHEMA:
        raise BadInput(
            f"{source} has schema {document.get('schema')}, and this flowledger reads {SCHEMA}: plan it again"
        )
    try:
        found = msgspec.convert(document, Planned)
    except msgspec.ValidationError as error:
        raise BadInput(f"{source} is not a whole plan: {error}; plan it again with --json") from None
    for row in found.shapes:
        tensor(row.tensor_name), stage(row.stage or "")
        sizes = {len(shape or ()) for shape in (parse_shape(row.dims or "[]"), row.logical_shape, row.local_shape)}
        if len(sizes) > 1:
            raise BadInput(
                f"{source} is not a whole plan: {row.tensor_name} in {row.stage} has shapes that are not {row.dims}"
            )
    return found
