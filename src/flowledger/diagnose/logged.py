"""A plan beside a log that was imported: it has no shapes and no memory by stage, but a peak and the longest lengths."""

from collections.abc import Mapping
from typing import Any

from flowledger.diagnose import common_ground
from flowledger.diagnose.measures import series_of
from flowledger.diagnose.peak_pairs import KINDS
from flowledger.diagnose.planned import Planned
from flowledger.flow.errors import BadInput
from flowledger.ledger.reader import Ledger

PEAK = "memory/allocated_peak"
# Metric -> the symbol of the length that limits it.
LENGTHS = {"prompt_length/max": "S_prompt", "response_length/max": "S_resp"}
ENGINE = "rollout"  # verl's counter does not see the engine's process
LACKS = (
    "compared is what a log tells: the peak of its worker, the longest lengths; shapes, memory by stage and checks need the launch "
    "itself recorded (flowledger record -o RUN -- …)"
)
NO_PEAK = "it tells of no peak (perf/max_memory_allocated_gb)"


def is_log(ledger: Ledger) -> bool:
    """Whether a run was imported and has steps, but no interval of one."""
    if ledger.directory.manifest.level != "import":
        return False
    spans = ledger.rows("SELECT 1 FROM spans WHERE step IS NOT NULL AND source <> 'plan' LIMIT 1")
    return not spans and bool(ledger.rows("SELECT 1 FROM metrics WHERE step IS NOT NULL LIMIT 1"))


def document(planned: Planned, ledger: Ledger) -> dict[str, Any]:
    """What both tell of, as plain values. Raises BadInput where they are not of one job, or tell of nothing alike."""
    common_ground.of_one_job(planned, ledger)
    series = series_of(ledger)
    told = {name: max(found.values()) for name in (*LENGTHS, PEAK) if (found := series.by_step(name))}
    rows = [
        _length(name, planned.sizes[symbol], told[name])
        for name, symbol in LENGTHS.items()
        if name in told and symbol in planned.sizes
    ]
    peaks = [(sum(getattr(one, kind) for kind in KINDS), one.stage) for one in planned.rows if one.stage != ENGINE]
    if PEAK in told and peaks:
        rows.append(_peak(*max(peaks), told[PEAK]))
    if not rows:
        raise BadInput(
            f"{ledger.directory.path} was imported from a log that tells of no length and no peak of memory: nothing to compare with"
        )
    agrees = all(row["outcome"] != "unequal" for row in rows)
    return {
        "rows": rows, "agrees": agrees, "lacks": LACKS if PEAK in told else f"{LACKS}; {NO_PEAK}", "verdict": _verdict(rows),
        "plan": planned.run, "recorded": {"framework": ledger.directory.manifest.framework, "level": "import"},
    }  # fmt: skip


def _length(name: str, limit: int, longest: float) -> dict[str, Any]:
    over = longest > limit
    why = f"longer than the limit of {limit:,}" if over else "" if longest == limit else "none was as long as it may be"
    return {
        "what": name, "unit": "tokens", "planned": limit, "recorded": int(longest), "difference": None,
        "outcome": "unequal" if over else "equal" if longest == limit else "explained", "why": why,
    }  # fmt: skip


def _peak(planned: int, stage: str, told: float) -> dict[str, Any]:
    return {
        "what": PEAK, "unit": "bytes", "planned": planned, "recorded": round(told), "difference": planned / told - 1 if told else None,
        "outcome": "compared", "why": f"planned in {stage}; the log has one worker's most so far, without the engine's process",
    }  # fmt: skip


def _verdict(rows: list[dict[str, Any]]) -> str:
    over = [row for row in rows if row["outcome"] == "unequal"]
    said = (
        f"plan and log differ: {', '.join(_apart(row) for row in over)}"
        if over
        else "plan and log agree in what a log tells"
    )
    peak = next((row["difference"] for row in rows if row["what"] == PEAK), None)
    return said if peak is None else f"{said}; peak planned {peak:+.1%}"


def _apart(row: Mapping[str, Any]) -> str:
    return f"{row['what']} {row['recorded']:,} where at most {row['planned']:,} were planned"
