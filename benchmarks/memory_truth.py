"""Predicted against measured memory, over published measurements of training, RL, inference and single operators.

    python benchmarks/memory_truth.py --cases FILE [--cases FILE2 ...] [--json] [--half develop|report] [--perturb]

FILE: one JSON object a line. A row says what was measured in `quantity` (allocated_peak, reserved_peak, active_peak,
allocated_steady, weights, kv_pool, profile_peak, allocation), further targets stand in `steady_*`, `first_step_peak_*`,
`reserved_*`; Megatron's golden runs have `model_args` and bytes of the last rank. Rows that no configuration completes
are skipped by the name of what is missing. `--perturb` scales each constant by 10 % and lists whose predictions move.
"""

import argparse
import hashlib
import json
import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from benchmarks.memory_figures import family, is_engine, is_megatron, targets
from benchmarks.memory_rows import Run, Skip, run_of

from benchmarks import memory_engines, memory_megatron
from flowledger.flow.errors import BadInput
from flowledger.plan.fsdp import timeline as fsdp
from flowledger.plan.reserved import reserved
from flowledger.plan.timeline import BLOCK
from flowledger.tables import constants as constant_table
from flowledger.tables.constants import Constant, constant, constants, perturbed

Row = Mapping[str, Any]
CASES = Path(__file__).resolve().parent.parent / "tests" / "data" / "memory" / "measured.jsonl"
GIB, MIB = 2**30, 2**20
SCORED = ("steady", "peak", "reserved", "exact")
TOLERANCE, FLOOR = 0.001, MIB  # exact: within 0.1 %, or 1 MiB


@dataclass(frozen=True, kw_only=True)
class Score:
    """One measured figure of one row beside its prediction."""

    row: str
    family: str
    kind: str  # steady, peak, reserved, exact
    name: str  # which figure of the row
    measured: float
    predicted: float
    told: str = ""

    @property
    def error(self) -> float:
        """Signed, as a fraction of what was measured."""
        return self.predicted / self.measured - 1

    @property
    def wrong(self) -> bool:
        return abs(self.predicted - self.measured) > max(TOLERANCE * self.measured, FLOOR)


@dataclass(kw_only=True)
class Result:
    """All scores, and why rows have none."""

    rows: int = 0
    scores: list[Score] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)


def score(rows: Iterable[Row]) -> Result:
    """Every row: predicted, or skipped for a named reason."""
    result = Result()
    for row in rows:
        result.rows += 1
        found = scores_of(row)
        if isinstance(found, str):
            result.skipped[found] = result.skipped.get(found, 0) + 1
        else:
            result.scores += found
    return result


def scores_of(row: Row) -> list[Score] | str:
    """The scores of a row, or the reason for none."""
    if row.get("predictable") not in (None, "yes"):
        return "configuration not complete (predictable: " + str(row["predictable"]) + ")"
    if row.get("predictable") is None and not row.get("score"):
        return "not marked for scoring (score: false)"
    predicted, told = predict(row)
    if isinstance(predicted, str):
        return predicted
    found = []
    for name, (kind, value) in targets(row).items():
        key = next((one for one in (name, kind) if one in predicted), None)
        if key is None and len(predicted) == 1:  # an engine's figure says itself what it is
            key = next(iter(predicted))
            kind = key if key in SCORED else kind
        if key is not None and value > 0:
            guess = predicted[key]
            found.append(
                Score(
                    row=row["id"], family=family(row), kind=kind, name=name, measured=value, predicted=guess, told=told
                )
            )
    return found or "no prediction for " + ", ".join(targets(row) or ("any figure",))


def predict(row: Row) -> tuple[dict[str, float] | str, str]:
    """Bytes by figure (peak, first, steady, reserved, exact), and what the peak is made of; or why there is none."""
    try:
        if is_megatron(row):
            found, told = _other(memory_megatron.predict(row))
            if isinstance(found, dict) and "peak" in found:
                found.setdefault("reserved", found["peak"] * constant("megatron_reserved_ratio"))
            return found, told
        if is_engine(row):
            return _other(memory_engines.predict(row))
        run = run_of(row)
        return (run.reason, "") if isinstance(run, Skip) else _figures(run)
    except BadInput as error:
        return str(error), ""


def _other(found: Any) -> tuple[dict[str, float] | str, str]:
    return ({**found}, "") if isinstance(found, dict) else (str(found.reason), "")


def _figures(run: Run) -> tuple[dict[str, float], str]:
    full = fsdp.timeline(run.job, variant=run.variant)
    peak, first = full.peak(block=BLOCK), fsdp.first_step(full).peak(block=BLOCK)
    held = reserved(full, run.job) + run.beside
    resting = sum(live.bytes for live in fsdp.resting(run.job) if not live.host) + run.beside
    made = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in list(peak.by_kind().items())[:4])
    figures: dict[str, float] = {
        "peak": peak.bytes + run.beside, "first": first.bytes + run.beside, "reserved": held,
        "steady": resting if run.steady is None else run.steady,
    }  # fmt: skip
    figures["first_reserved"] = held - peak.bytes + first.bytes
    return figures, f"{peak.instant}: {made} GiB"


def half(row: Row) -> str:
    """Which half a row is in: `develop` was looked at while the planner was made, `report` was not tuned on."""
    return ("develop", "report")[int(hashlib.sha256(str(row["id"]).encode()).hexdigest(), 16) % 2]


def percentile(values: list[float], share: float) -> float:
    """The value that this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def summary(result: Result) -> dict[str, Any]:
    """Errors as fractions, in the form of --json."""
    found: dict[str, Any] = {"rows": result.rows, "skipped": dict(sorted(result.skipped.items()))}
    for kind in SCORED:
        chosen = [one for one in result.scores if one.kind == kind]
        errors = [abs(one.error) for one in chosen]
        if kind == "exact":
            found[kind] = {"rows": len(chosen), "wrong": sum(one.wrong for one in chosen)}
        else:
            median = statistics.median(errors) if errors else None
            found[kind] = {"rows": len(chosen), "median": median, "p95": percentile(errors, 0.95) if errors else None}
    return found


def report(result: Result) -> list[str]:
    """Error by family, the worst ten with what they are made of, and what was skipped."""
    lines = [f"{'family':58} {'figure':9} {'rows':>4} {'median':>8} {'p95':>8} {'bias':>8}"]
    groups: dict[tuple[str, str], list[Score]] = {}
    for one in result.scores:
        groups.setdefault((one.family, one.kind), []).append(one)
    for (name, kind), scores in sorted(groups.items()):
        errors = [abs(one.error) for one in scores]
        lines.append(
            f"{name[:58]:58} {kind:9} {len(scores):4} {statistics.median(errors):8.2%} {percentile(errors, 0.95):8.2%} "
            f"{statistics.mean(one.error for one in scores):+8.2%}"
        )
    for kind in SCORED:
        chosen = sorted((one for one in result.scores if one.kind == kind), key=lambda one: -abs(one.error))
        lines += ["", f"worst of {kind}"] if chosen else []
        lines += [
            f"  {one.error:+8.2%} {one.measured / GIB:9.3f} -> {one.predicted / GIB:9.3f} GiB {one.name:8} {one.row}  {one.told}"
            for one in chosen[:10]
        ]
    lines += ["", "skipped"] + [
        f"  {number:4} {reason}" for reason, number in sorted(result.skipped.items(), key=lambda item: -item[1])
    ]
    return lines


class Reading(dict[str, Constant]):
    """The constants, and which of them were looked up."""

    def __init__(self, all_of_them: Mapping[str, Constant]) -> None:
        super().__init__(all_of_them)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Constant:
        self.asked.add(name)
        return super().__getitem__(name)


def moved(rows: list[Row], by: float = 1.1) -> dict[str, dict[str, int]]:
    """Constant -> family -> how many of its predictions change when the constant is scaled."""
    everything = constants()
    found: dict[str, dict[str, int]] = {name: {} for name in everything}
    for row in rows:
        reading = Reading(everything)
        with mock.patch.object(constant_table, "constants", lambda read=reading: read):
            base = scores_of(row)
        if isinstance(base, str):
            continue
        for name in sorted(reading.asked):
            with perturbed({name: by}):
                again = scores_of(row)
            differ = sum(new.predicted != old.predicted for new, old in zip(again, base, strict=True))
            if differ:
                found[name][base[0].family] = found[name].get(base[0].family, 0) + differ
    return found


def read(paths: Iterable[Path]) -> list[Row]:
    """The rows of files. Raises BadInput with file and line for what is no JSON object."""
    rows: list[Row] = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise BadInput(f"{path}: {error.strerror}") from None
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    rows.append(json.loads(line))
                except ValueError as error:
                    raise BadInput(f"{path}:{number}: no JSON object: {error}") from None
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, action="append")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--half", choices=("develop", "report"))
    parser.add_argument("--perturb", action="store_true", help="scale each constant by 10 % and list what moves")
    given = parser.parse_args(arguments)
    try:
        rows = [row for row in read(given.cases or [CASES]) if given.half in (None, half(row))]
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    if given.perturb:
        table = moved(rows)
        for name, families in table.items():
            told = ", ".join(f"{family} ({number})" for family, number in sorted(families.items())) or "nothing"
            print(json.dumps({name: families}) if given.json else f"{name}: {told}\n    {constants()[name].reason}")
        return 0
    result = score(rows)
    if not given.json:
        print("\n".join(report(result)))
    print(json.dumps(summary(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
