"""What one wants to know first: is it healthy, how fast is it, where do time and memory go."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flowledger.ledger.manifest import Manifest
from flowledger.show.page import signals
from flowledger.show.page.book import Book, Metric, Text, text
from flowledger.show.page.choice import Choice
from flowledger.show.page.evidence import evidence_of
from flowledger.show.page.figures import figures, own_cost, said_of_cost
from flowledger.show.page.overview_peak import memory_of
from flowledger.show.page.overview_time import time_of

Data = dict[str, Any]

COLUMNS = (
    "id", "scope", "order", "position", "verdict", "severity", "stage", "step", "rank", "message", "evidence", "needs",
    "fix", "next_step", "confidence", "fires_at",
)  # fmt: skip

ONE_RANK = text("one rank", "单个 rank")


def choices(book: Book) -> Sequence[Choice]:
    """There is one overview."""
    return [Choice()]


def data(book: Book, at: Choice) -> Data:
    """Findings, worst first, each with the way to its evidence; figures; time; memory; what the run is, or the plan."""
    time, memory = time_of(book), memory_of(book)
    cost = own_cost(book)
    return {
        "findings": [_finding(row) for row in book.findings],
        "counts": dict(Counter(row["verdict"] for row in book.findings)),
        "stopped": stopped(book),
        "plan": plan_of(book),
        "figures": figures(book),
        "unhealthy": unhealthy(book),
        "cost": cost,
        "cost_said": cost and said_of_cost(cost),
        "time": time,
        "memory": memory,
        "facts": facts(book),
        "missing": [],
    }


def unhealthy(book: Book) -> list[Data]:
    """Metrics whose last number lies outside the range that is healthy: no alarm by themselves, but to be known."""
    out = [metric for metric in book.metrics if signals.is_outside(metric)]
    return [{"name": metric.name, "unit": metric.unit, **_last(metric)} for metric in out]


def _last(metric: Metric) -> Data:
    step = max(metric.values)
    value = metric.values[step]
    return {"value": value if math.isfinite(value) else str(value), "step": step}


def _finding(row: Mapping[str, Any]) -> Data:
    kept = {name: row.get(name) for name in COLUMNS}
    return {**kept, "zh": row.get("zh") or {}, "link": evidence_of(row) if row["verdict"] in ("fail", "warn") else None}


def _is_plan(book: Book) -> bool:
    """Whether this was written by `plan`: a run that has recorded nothing yet is none."""
    return book.ledger.directory.manifest.level == "plan"


# ------------------------------------------------------------------------------------------------------------- where it stopped


def stopped(book: Book) -> Data | None:
    """Of a run that has not ended well: the innermost that had begun, and how many ranks were in it."""
    state = book.ledger.directory.state
    if state == "closed" or _is_plan(book):
        return None
    rows = book.seen(
        "WITH innermost AS (SELECT * FROM open_spans WHERE span_kind <> 'comm' QUALIFY row_number() OVER (PARTITION BY source, process "
        "ORDER BY stage IS NULL, started_ns DESC, id DESC) = 1) SELECT source, step, stage, phase, "
        "list(rank ORDER BY rank) AS ranks, max(seconds) AS seconds FROM innermost GROUP BY ALL ORDER BY len(ranks) DESC, step, stage"
    )
    if rows:
        return {"state": state, "places": rows}
    (last,) = book.ledger.rows("SELECT max(step) AS step FROM metrics WHERE source <> 'plan'")
    return {"state": state, "places": [], "step": last["step"]}


# ------------------------------------------------------------------------------------------------------------ what it is


def facts(book: Book) -> list[tuple[str, Any]]:
    """What the run is: (word of the page, value)."""
    ledger, manifest = book.ledger, book.ledger.directory.manifest
    steps = ledger.rows(
        "SELECT count(DISTINCT step) AS steps FROM metrics WHERE source <> 'plan' AND step IS NOT NULL"
    )[0]["steps"]
    asked = None if _is_plan(book) else ledger.setting("steps")
    versions = [f"{name} {version}" for name, version in manifest.versions.items() if name != manifest.framework]
    hardware = manifest.hardware
    pairs = {
        "fact_framework": " ".join(filter(None, (manifest.framework, manifest.framework_version))),
        "fact_model": ledger.setting("model.path"),
        "fact_mesh": " · ".join(f"{axis} {degree}" for axis, degree in ledger.mesh.items() if degree > 1) or _ranks(manifest),
        "fact_device": ledger.setting("hardware.gpu") or (None if _is_plan(book) else hardware.get("gpu") or hardware.get("cpu")),
        "fact_steps": None if _is_plan(book) else f"{steps} / {asked}" if asked else str(steps),
        "fact_level": manifest.level,
        "fact_state": None if _is_plan(book) else ledger.directory.state,
        "fact_created": manifest.created.replace("T", " ").replace("+00:00", " UTC"),
        "fact_torn": ledger.torn or None,
        "fact_versions": ", ".join(versions),
    }  # fmt: skip
    return [(word, value) for word, value in pairs.items() if value is not None and value != ""]


def _ranks(manifest: Manifest) -> Text | None:
    """How many there were where no axis cuts anything; of an import that may be all that is known, or not even that."""
    many = manifest.ranks
    if "ranks" in manifest.sources:
        return text(f"{many:,} ranks or more", f"至少 {many:,} 个 rank") if many > 1 else None
    if many > 1:
        return text(f"{many:,} ranks", f"{many:,} 个 rank")
    return ONE_RANK if many == 1 or manifest.level != "import" else None


# ---------------------------------------------------------------------------------------------------------------------- the plan


def plan_of(book: Book) -> Data | None:
    """What was planned: whether it starts and fits, the batch chain, the fullest stage. None without a plan."""
    ledger = book.planned or book.ledger
    if book.planned is None and "plan" not in book.sources():
        return None
    checks = [row for row in book.findings if row["scope"] == "plan"]
    rules = Counter(row["verdict"] for row in checks if row["order"] != "oom")
    room = {row["id"]: row["verdict"] for row in checks if row["order"] == "oom"}
    verdicts = {room.get("memory.fits"), room.get("memory.engine")} - {None}
    fits = "fail" if "fail" in verdicts else "skipped" if not verdicts or "skipped" in verdicts else "pass"
    return {"starts": not rules["fail"], "rules": dict(rules), "fits": fits, "chain": chain(ledger.directory.manifest.bindings, ledger.mesh)}  # fmt: skip


def chain(bindings: Mapping[str, int], mesh: Mapping[str, int]) -> list[Data]:
    """The batch chain, from prompts to what one rank takes at once; links whose numbers are not bound are left out."""
    found: list[Data] = []
    for symbol, name in CHAIN:
        if (size := bindings.get(symbol)) is not None:
            found.append({"symbol": symbol, "name": name, "size": size})
    sizes = {row["symbol"]: row["size"] for row in found}
    cut = mesh.get("dp", 1)
    for row in found:
        if row["symbol"] in SHARED and cut > 1 and row["size"] % cut == 0:
            row["per_rank"] = row["size"] // cut
        whole = sizes.get(PARTS.get(row["symbol"], ""))
        row |= {
            "times": -(-whole // row["size"]) if whole and row["size"] else None,
            "part_of": PARTS.get(row["symbol"]),
        }
    return found


CHAIN: tuple[tuple[str, Text], ...] = (
    ("B_prompt", text("prompts a step", "每步 prompt 数")),
    ("G", text("responses per prompt", "每个 prompt 的 response 数")),
    ("B", text("samples a step", "每步样本数")),
    ("B_mini", text("samples an optimizer step", "每次优化器更新的样本数")),
    ("B_micro", text("samples a micro-batch", "每个 micro-batch 的样本数")),
    ("T", text("tokens of a full micro-batch", "满的 micro-batch 的 token 数")),
)
SHARED = ("B", "B_mini", "B_micro", "T")  # counted over all dp ranks together
PARTS = {"B_mini": "B", "B_micro": "B_mini"}  # what each is a part of
