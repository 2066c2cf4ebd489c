"""Shape mismatch: the logical shape, then the local shard, then masks and reshapes, and at last operators and configuration."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from flowledger.diagnose import shards
from flowledger.diagnose.orders import clashes, dealing
from flowledger.diagnose.orders.answer import Answer, failed, passed, skipped, warned
from flowledger.diagnose.orders.evidence import Evidence
from flowledger.diagnose.orders.ratios import rearranged, shape_told
from flowledger.diagnose.shape_pairs import Pair
from flowledger.diagnose.sizes import UNEQUAL
from flowledger.flow.dims import parse_shape
from flowledger.flow.errors import BadInput
from flowledger.flow.mesh import local_shape
from flowledger.flow.stages import mesh_of
from flowledger.flow.tensors import tensors
from flowledger.ledger.assemble import meshes_of
from flowledger.ledger.manifest import value_at

MOST = 8  # lines of evidence
ASSUMED = 0.5  # the most that a size is worth that nobody has set
AGREE = 3  # tensors that must have a size alike before another one's is called wrong
DECIDED_BY_DATA = ("S_prompt", "S_resp", "S_prompt + S_resp")

# What every rank held of a tensor that has a size in the whole step; of micro-batches each rank has its own.
HELD = """
SELECT DISTINCT step, stage, phase, access, tensor_name, dims, rank, local_shape, logical_shape FROM accesses
WHERE source <> 'plan' AND dims IS NOT NULL AND local_shape IS NOT NULL AND rank IS NOT NULL AND stage IS NOT NULL
    AND NOT list_contains(local_shape, 0) AND NOT regexp_matches(dims, '\\b(B_micro|B_run|B_admit|B_slot|N_decode|S_cache|T|T_logit|P)\\b')
ORDER BY ALL
"""

Row = Mapping[str, Any]


def logical(evidence: Evidence) -> Answer:
    """Sizes of the whole step: what is planned or configured beside what was observed, whoever holds which part."""
    if crash := _crash(evidence, "logical"):
        return crash
    settings = [one for beside in evidence.beside for one in beside.settings if not one.name.startswith("mesh.")]
    if settings:
        first = settings[0]
        return failed(
            f"{first.name} is {first.planned} by the configuration and {first.recorded} in the run",
            *(f"{one.name}: planned {one.planned}, recorded {one.recorded}" for one in settings), confidence=0.8,
        )  # fmt: skip
    apart = [pair for pair in _unequal(evidence) if _is_logical(pair) and not _cut(pair, evidence)]
    if apart:
        pair = apart[0]
        return failed(
            f"{pair.tensor_name} in {pair.stage} is {_listed(pair.logical)} as a whole, planned is "
            f"{_listed(pair.planned.logical_shape)}{_why(pair, evidence)}",
            *map(_sentence, apart[:MOST]), stage=pair.stage, confidence=0.7,
        )  # fmt: skip
    seen = evidence.rows("SELECT count(*) AS n FROM accesses WHERE source <> 'plan' AND logical_shape IS NOT NULL")
    total = sum(row["n"] for row in seen)
    if not total:
        return skipped()
    where = "those of the plan" if evidence.beside else "what the configuration binds"
    return passed(f"{total} logical shapes are {where}")


def local(evidence: Evidence) -> Answer:
    """The part of each rank against what its placement on the mesh gives it; a factor between the two names the axis."""
    if crash := _crash(evidence, "local"):
        return crash
    found = [*_planned_cuts(evidence), *wrongly_cut(evidence)]
    if found:
        stage, sentence, _ = found[0]
        return failed(sentence, *(line for _, _, line in found[:MOST]), stage=stage, confidence=0.95)
    apart = [pair for pair in _unequal(evidence) if not _is_logical(pair)]
    if apart:
        return warned(
            _sentence(apart[0]), *map(_sentence, apart[:MOST]), stage=apart[0].stage, confidence=0.5
        )  # fmt: skip
    if not evidence.has("tensors"):
        return skipped()
    if not evidence.degrees:
        return passed("one rank: no tensor is cut")
    cut = ", ".join(f"{axis} {degree}" for axis, degree in evidence.degrees.items())
    return passed(f"the parts of {len(evidence.ranks)} ranks are those that {cut} give them")


def mask(evidence: Evidence) -> Answer:
    """Masks that do not lie over their tensors, and tensors in another order of dimensions than the flow's."""
    if crash := _crash(evidence, "mask"):
        return crash
    turned = [
        (pair, how)
        for pair in _unequal(evidence)
        if (how := rearranged(pair.planned.local_shape or (), pair.largest)) and len(pair.largest) > 1
    ]
    if turned:
        pair, how = turned[0]
        return failed(
            f"{pair.tensor_name} in {pair.stage} is {_listed(pair.largest)}, planned is {_listed(pair.planned.local_shape)}: {how}",
            stage=pair.stage, confidence=0.7,
        )  # fmt: skip
    (masks,) = evidence.rows("SELECT count(*) AS n FROM shapes WHERE source <> 'plan' AND mask_fits") or [{"n": 0}]
    return passed(f"{masks['n']} masks fit their tensors") if masks["n"] else skipped()


def operator(evidence: Evidence) -> Answer:
    """The parallel configuration: rules that it breaks, a mesh that is not the planned one, operators that met other shapes."""
    if crash := _crash(evidence, "operator"):
        return crash
    meshes = [one for beside in evidence.beside for one in beside.settings if one.name.startswith("mesh.")]
    if meshes:
        first = meshes[0]
        return failed(
            f"{first.name.removeprefix('mesh.')} is {first.planned} in the plan and {first.recorded} in the run",
            *(f"{one.name}: planned {one.planned}, recorded {one.recorded}" for one in meshes), confidence=0.6,
        )  # fmt: skip
    if evidence.planned is not None:
        held = sum(one.verdict == "pass" for one in evidence.planned.checks)
        return passed(f"{held} rules of the configuration hold")
    return skipped()


# ------------------------------------------------------------------------------------------------- what was observed


def wrongly_cut(evidence: Evidence) -> list[tuple[str, str, str]]:
    """(stage, sentence, evidence) for each tensor of which some rank holds another part than its placement gives it.

    Sizes come from the configuration; of lengths, which data decide, from what most tensors of the step have.
    """
    found: dict[tuple[str, str], tuple[str, str, str]] = {}
    for book in evidence.books:
        meshes = meshes_of(book.mesh)
        if not meshes:
            continue
        rows = book.rows(HELD)
        alone = book.directory.manifest.framework in shards.PAD_ALONE
        lengths = {} if alone else _lengths(rows)
        bound = book.directory.manifest.bindings
        for row in rows:
            key = row["stage"], row["tensor_name"]
            if key not in found and (told := _wrong(row, meshes, bound, lengths, evidence.degrees)):
                found[key] = told
    return list(found.values())


def _wrong(
    row: Row, meshes: Mapping[str, Any], bound: Mapping[str, int], lengths: Mapping[tuple[int | None, str], int],
    degrees: Mapping[str, int],
) -> tuple[str, str, str] | None:  # fmt: skip
    name, dims = row["tensor_name"], parse_shape(row["dims"])
    if name not in tensors() or len(dims) != len(row["local_shape"]):
        return None
    whole = [
        dim.resolve(bound) if dim.symbols <= bound.keys() else lengths.get((row["step"], dim.text)) for dim in dims
    ]
    if None in whole:
        return None
    form = next((form for form in tensors()[name].forms if form.shape.strip("[]") == row["dims"]), None)
    on = meshes[mesh_of(name, row["stage"], row["access"])]
    try:
        want = local_shape([size for size in whole if size], tensors()[name].placement_of(form), on, row["rank"])
    except (BadInput, ValueError, IndexError):
        return None
    got = row["local_shape"]
    how = shape_told(want, got, row["dims"], degrees, bound.get("G", 1)) if list(want) != list(got) else ""
    if not how.startswith("dim "):  # what is whole although an axis could cut it has been gathered
        return None
    where = f"{name} in {row['stage']} on rank {row['rank']}"
    return (
        row["stage"], f"{name} in {row['stage']}: {how}",
        f"{where}: {_listed(got)}, expected {_listed(want)} of [{row['dims']}] = {whole} (step {row['step']}): {how}",
    )  # fmt: skip


def _lengths(rows: list[dict[str, Any]]) -> dict[tuple[int | None, str], int]:
    """(step, `S_resp`) -> the size that most tensors of the step have along it, where several agree."""
    counted: dict[tuple[int | None, str], Counter[int]] = defaultdict(Counter)
    for row in rows:
        for dim, size in zip(parse_shape(row["dims"]), row["logical_shape"] or (), strict=False):
            if dim.text in DECIDED_BY_DATA:
                counted[row["step"], dim.text][size] += 1
    found = {}
    for key, sizes in counted.items():
        (size, times), *others = sizes.most_common(2)
        if times >= AGREE and (not others or times > 2 * others[0][1]):
            found[key] = size
    return found


def _crash(evidence: Evidence, step: str) -> Answer | None:
    """What an exception says of two sizes, where that belongs to this step."""
    for clash in clashes.clashes(evidence.words):
        end = evidence.end
        stage = end.stage if end else None
        sizes = {**evidence.sizes, **(evidence.planned.sizes if evidence.planned else {})}
        there = clashes.within(sizes, clashes.dims_of_loss(evidence.words, stage))
        belongs, cause = clashes.told(clash, there, evidence.degrees, sizes.get("G", 1))
        if belongs == step:
            change = _equal_parts(clash, sizes, evidence)
            assumed = any(re.search(rf"\b{symbol}\b", cause) for symbol in evidence.assumed)
            return failed(
                f"{cause or clash.text}{f' (in {stage})' if stage else ''}", *([change.why] if change else []), *([clash.text] if cause else []),
                *(end.evidence or () if end else ()), confidence=(ASSUMED if assumed else 0.75) if cause else 0.4, stage=stage, rank=end.rank if end else None,
                fix=change.fix if change else None,
            )  # fmt: skip
    return None


def _equal_parts(clash: clashes.Clash, sizes: Mapping[str, int], evidence: Evidence) -> dealing.Dealt | None:
    """The change for a batch that was to be dealt out in equal parts; n is that of the run or of its configuration."""
    if clash.kind != "chunk" or not clash.right[0]:
        return None
    group = sizes.get("G") or value_at(evidence.config, "rollout.samples_per_prompt")
    return dealing.dealt(
        clash.left[0], clash.right[0], group=group if isinstance(group, int) else None, prompts=sizes.get("B_prompt"),
        framework=evidence.framework,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ planned beside recorded


def _unequal(evidence: Evidence) -> list[Pair]:
    """Shapes that are not the planned ones; none where the meshes differ, for then nothing can be alike."""
    return [
        pair
        for beside in evidence.beside
        if not any(one.name.startswith("mesh.") for one in beside.settings)
        for pair in beside.pairs
        if pair.outcome == UNEQUAL
    ]


def _is_logical(pair: Pair) -> bool:
    whole, planned = pair.logical, tuple(pair.planned.logical_shape or ())
    return whole is not None and len(whole) == len(planned) and any(a > b for a, b in zip(whole, planned, strict=True))


def _cut(pair: Pair, evidence: Evidence) -> str:
    """What cuts its part otherwise than planned; empty where no axis does."""
    how = shape_told(_expected(pair), pair.largest, pair.dims, evidence.degrees)
    return how if how.startswith("dim ") and " cut" in how else ""  # what is whole has been gathered


def _expected(pair: Pair) -> list[int]:
    """The planned part of a tensor whose whole is as large as the recorded one: so only the cut can differ."""
    local_, whole = list(pair.planned.local_shape or ()), list(pair.planned.logical_shape or ())
    if pair.logical is None or len(pair.logical) != len(local_) or len(whole) != len(local_):
        return local_
    return [
        part * seen // of if of and part * seen % of == 0 else part
        for part, of, seen in zip(local_, whole, pair.logical, strict=True)
    ]


def _planned_cuts(evidence: Evidence) -> Iterator[tuple[str, str, str]]:
    for pair in _unequal(evidence):
        if how := _cut(pair, evidence):
            yield pair.stage, f"{pair.tensor_name} in {pair.stage}: {how}", _sentence(pair)


def _why(pair: Pair, evidence: Evidence) -> str:
    how = shape_told(
        pair.planned.logical_shape or (), pair.logical or (), pair.dims, evidence.degrees, evidence.sizes.get("G", 1)
    )
    return f": {how}" if how else ""


def _sentence(pair: Pair) -> str:
    of = f" of {_listed(pair.logical)}" if pair.logical and pair.logical != pair.largest else ""
    planned = pair.planned
    whole = (
        f" of {_listed(planned.logical_shape)}"
        if planned.logical_shape and planned.logical_shape != planned.local_shape
        else ""
    )
    on = f" on ranks {pair.ranks}" if pair.ranks else ""
    return (
        f"{pair.tensor_name} in {pair.stage}{on}: recorded {_listed(pair.largest)}{of}, planned "
        f"{_listed(planned.local_shape)}{whole} [{pair.dims}] ({'; '.join(pair.why)})"
    )


def _listed(shape: Any) -> str:
    return f"[{', '.join(map(str, shape or ()))}]"
