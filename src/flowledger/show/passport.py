"""The passport of one sample: every stage it went through as a hop, its tokens, and its group beside it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from flowledger.flow.errors import BadInput
from flowledger.ledger.reader import Ledger
from flowledger.show import token_strip
from flowledger.show.plain import as_json
from flowledger.show.words import (
    ABSENT,
    harmless,
    human_map,
    human_number,
    human_shape,
    human_trained,
    written,
)

Rows = list[dict[str, Any]]

# Stage, phase -> the columns of the merged sample that are learnt there.
HOPS: dict[tuple[str, str | None], tuple[str, ...]] = {
    ("prompt", None): ("group_id", "prompt_length"),
    ("rollout", None): ("response_length", "finish_reason", "versions"),
    ("reward", None): ("rewards", "reward"),
    ("filter", None): ("dropped_reason",),
    ("balance", None): (),
    ("old_log_prob", None): (),
    ("ref_log_prob", None): (),
    ("values", None): (),
    ("advantage", None): ("advantage",),
    ("update_critic", None): (),  # as a whole: its micro-batches may be cut otherwise than the policy's
    ("update_actor", None): ("trained",),
    ("update_actor", "forward"): (),
    ("update_actor", "loss"): (),
    ("update_actor", "backward"): (),
    ("update_actor", "step"): (),
    ("weight_sync", None): (),
}
# Stage -> what its forward pass makes as any does: there it is the old or the reference policy's, or used by nobody.
BY_ANOTHER_NAME = {"old_log_prob": ("new_log_prob",), "ref_log_prob": ("new_log_prob", "entropy")}
APART = 96  # characters of a terminal from which on what is read and what is written have room beside each other


@dataclass(frozen=True, slots=True)
class Passport:
    """What is known of one sample. `hops` in the order of the step; `tokens` empty below level `tokens`."""

    sample: dict[str, Any]
    hops: Rows
    tokens: Rows
    group: Rows
    notes: tuple[str, ...]


def passport(ledger: Ledger, sample_id: str, listed: Sequence[str] = ()) -> Passport:
    """The passport of a sample. Raises BadInput for an id that the run does not have, with those it has.

    `listed`: the samples that are asked about together; a ledger that answers each question once is then asked less.
    """
    asked = [list(listed) if sample_id in listed else [sample_id]]

    def own(sql: str) -> Rows:
        return [row for row in ledger.rows(sql, asked) if row["sample_id"] == sample_id]

    attempts = own("FROM samples_merged WHERE sample_id IN (SELECT unnest(?)) AND source <> 'plan' ORDER BY attempt")
    if not attempts:
        raise BadInput(_unknown(ledger, sample_id))
    sample = attempts[-1]
    tokens = own("FROM tokens_merged WHERE sample_id IN (SELECT unnest(?)) ORDER BY position")
    group = ledger.rows("FROM samples_merged WHERE group_id = ? AND step IS NOT DISTINCT FROM ? AND source <> 'plan'",
                        [sample["group_id"], sample["step"]])  # fmt: skip
    return Passport(sample, _hops(ledger, sample), tokens, group, _notes(ledger, sample, tokens, len(attempts)))


def _hops(ledger: Ledger, sample: dict[str, Any]) -> Rows:
    spans = ledger.rows(
        "WITH each AS (SELECT process, stage, phase, span_kind, epoch, mini_batch, micro_batch, min(start_ns) AS start_ns, "
        "sum(latency_ms) AS latency_ms, count(*) AS calls FROM spans_view "
        "WHERE step IS NOT DISTINCT FROM ? AND stage IS NOT NULL "
        "AND source <> 'plan' AND span_kind IN ('stage', 'compute') GROUP BY ALL) "  # ranks do it at the same time
        "SELECT stage, phase, span_kind, epoch, mini_batch, micro_batch, min(start_ns) AS start_ns, "
        "max(latency_ms) AS latency_ms, max(calls) AS calls FROM each GROUP BY ALL ORDER BY start_ns",
        [sample["step"]],
    )
    origin = min((span["start_ns"] for span in spans), default=0)
    touched = ledger.rows(
        "SELECT DISTINCT stage, phase, micro_batch, tensor_name, access, local_shape, mask, dims FROM accesses "
        "WHERE step IS NOT DISTINCT FROM ? AND source <> 'plan' AND layer IS NULL ORDER BY access, tensor_name",
        [sample["step"]],
    )
    hops = [_hop(place, sample, spans, touched, origin) for place in HOPS]
    return [hop for hop in hops if hop["latency_ms"] is not None or hop["tensors"] or hop["values"]]


def _hop(
    place: tuple[str, str | None], sample: dict[str, Any], spans: Rows, touched: Rows, origin: int
) -> dict[str, Any]:
    """One stage (or phase) as the sample met it: of micro-batches only those that it was in."""
    stage, phase = place
    own = {(part["epoch"], part["mini_batch"], part["micro_batch"]) for part in sample["trained"] or ()}
    here = [
        span for span in spans
        if span["stage"] == stage and (span["phase"] == phase if phase else span["span_kind"] == "stage")
        and (not phase or span["micro_batch"] is None or not own
             or (span["epoch"] or 0, span["mini_batch"] or 0, span["micro_batch"]) in own)
    ]  # fmt: skip
    micro = {part["micro_batch"] for part in sample["trained"] or ()}
    tensors = [
        {"tensor_name": row["tensor_name"], "access": row["access"], "slice": _slice(row)}
        for row in touched
        if row["stage"] == stage and row["tensor_name"] not in BY_ANOTHER_NAME.get(stage, ()) and (row["phase"] == phase or (not phase and (stage, row["phase"]) not in HOPS))
        and (not phase or row["micro_batch"] is None or not micro or row["micro_batch"] in micro)
    ]  # fmt: skip
    start = min((span["start_ns"] for span in here), default=None)
    return {
        "stage": stage,
        "phase": phase,
        "at_ms": (start - origin) / 1e6 if start is not None else None,
        "latency_ms": sum(span["latency_ms"] or 0 for span in here) if here else None,
        "calls": sum(span["calls"] for span in here),
        "values": {name: sample[name] for name in HOPS[place] if sample[name] is not None},
        "tensors": _once(tensors),
    }


def _once(tensors: Rows) -> Rows:
    """Each tensor once an access; no shape where micro-batches differ and nobody knows which one was the sample's."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for tensor in tensors:
        seen = found.setdefault((tensor["tensor_name"], tensor["access"]), tensor)
        if seen["slice"] != tensor["slice"]:
            found[tensor["tensor_name"], tensor["access"]] = {**seen, "slice": None}
    return list(found.values())


PER_SAMPLE = ("B", "B_prompt", "B_admit", "B_prompt*G", "B_micro", "B_mini", "B_run")
IDENTITY = ("sample_id", "group_id")  # every hop carries them; they say nothing of the sample's way


def _slice(row: dict[str, Any]) -> list[int] | None:
    """The shape of one sample's part: without the dim that counts prompts or samples. None: no part is this sample's."""
    shape, dims = row["local_shape"], row["dims"]
    if shape is None or not dims or dims.split(",")[0].strip() not in PER_SAMPLE:
        return None
    return list(shape[1:]) if dims != "B_prompt, G" else []


def _notes(ledger: Ledger, sample: dict[str, Any], tokens: Rows, attempts: int) -> tuple[str, ...]:
    level = ledger.directory.manifest.level
    notes = []
    if attempts > 1:
        notes.append(f"attempt {sample['attempt']} of {attempts}; earlier ones were given up")
    if not tokens and level != "tokens":
        notes.append(
            f"no tokens: the run was recorded at level {level!r}; "
            "record.level=tokens writes those of record.groups groups a step"
        )
    elif not tokens:
        seen = ledger.rows(
            "SELECT DISTINCT sample_id FROM tokens WHERE step IS NOT DISTINCT FROM ? ORDER BY 1", [sample["step"]]
        )
        there = (
            f"; of step {sample['step']} those of {', '.join(row['sample_id'] for row in seen[:8])} were"
            if seen
            else ""
        )
        notes.append(f"no tokens: this sample's group was not among the record.groups groups written{there}")
    if sample["dropped_reason"]:
        notes.append(f"dropped: {sample['dropped_reason']}; none of its tokens is in the loss")
    return tuple(notes)


def _unknown(ledger: Ledger, sample_id: str) -> str:
    known = [
        row["sample_id"] for row in ledger.rows("SELECT DISTINCT sample_id FROM samples_merged WHERE source <> 'plan'")
    ]
    if not known:
        level = ledger.directory.manifest.level
        why = (
            "sample needs level tensors or tokens"
            if level not in ("tensors", "tokens")
            else "none was told to the recorder"
        )
        return f"run {ledger.run} has no samples (level {level!r}): {why}"
    numbers = sorted(int(name) for name in known if name.isdecimal())
    spread = f"it has {numbers[0]} to {numbers[-1]}" if len(numbers) == len(known) else f"it has {len(known)} others"
    return f"run {ledger.run} has no sample {sample_id!r}; {spread}"


def passport_json(found: Passport, run: str) -> str:
    """The passport for machines: one row a hop, with the sample, its tokens and its group beside them."""
    more = {"sample": found.sample, "tokens": found.tokens, "group": found.group, "notes": list(found.notes)}
    return as_json("sample", run, found.hops, **more)


def draw(found: Passport, screen: Console) -> None:
    """Print a passport."""
    sample = found.sample
    head = f"  group {sample['group_id'] or ABSENT}  step {sample['step']}"
    screen.print(Text.assemble((f"sample {sample['sample_id']}", "bold"), harmless(head)))
    screen.print(_hop_grid(found.hops, joined=screen.width < APART))
    if found.tokens:
        token_strip.draw(found.tokens, screen)
    if len(found.group) > 1:
        screen.print(_group_grid(found))
    for note in found.notes:
        screen.print(note, style="yellow")


def _hop_grid(hops: Rows, *, joined: bool = False) -> Grid:
    """The hops. `joined`: what is read and written in one column, where two would break the names."""
    grid = Grid(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for heading in ("hop", "at", "took", *(("read → written",) if joined else ("read", "written")), "learnt"):
        right, short = heading in ("at", "took"), heading in ("hop", "at", "took")
        grid.add_column(heading, justify="right" if right else "left", no_wrap=short, overflow="fold")
    for hop in hops:
        read, made = _touched(hop["tensors"], "read"), _touched(hop["tensors"], "write")
        grid.add_row(
            Text(f"  {hop['phase']}" if hop["phase"] else hop["stage"], style="cyan") if hop["phase"] is None
            else Text(f"{hop['stage'].removeprefix('update_')} {hop['phase']}", style="cyan"),
            written(hop["at_ms"], "milliseconds"), written(hop["latency_ms"], "milliseconds"),
            *([f"{read} → {made}".strip() if made else read] if joined else [read, made]), _values(hop["values"]),
        )  # fmt: skip
    return grid


def _touched(tensors: Rows, access: str) -> str:
    """Tensors by name with the shape of this sample's part; a part of one value has no shape to tell."""
    parts = {
        row["tensor_name"]: f"{row['tensor_name']} {human_shape(row['slice'])}" if row["slice"] else row["tensor_name"]
        for row in tensors
        if row["access"] == access and row["slice"] is not None and row["tensor_name"] not in IDENTITY
    }
    return ", ".join(text.replace(" [", "\u00a0[") for text in parts.values())


def _values(values: dict[str, Any]) -> Text:
    forms: dict[str, Callable[[Any], str]] = {
        "rewards": human_map,
        "trained": human_trained,
        "versions": lambda seen: ", ".join(map(str, seen)),
    }
    lines = []
    for name, value in values.items():
        text = forms[name](value) if name in forms else human_number(value) if isinstance(value, float) else str(value)
        lines.append(f"{name.replace('_', ' ')} {text}")
    return Text(harmless("\n".join(lines)))


def _group_grid(found: Passport) -> Grid:
    grid = Grid(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in ("its group", "response", "finish", "reward", "advantage", "trained", "dropped"):
        right = heading in ("response", "reward", "advantage")
        grid.add_column(heading, justify="right" if right else "left", overflow="fold")
    for row in found.group:
        own = row["sample_id"] == found.sample["sample_id"]
        trained = ABSENT if row["trained"] is None else human_trained(row["trained"])
        grid.add_row(
            f"{'▸' if own else ' '} {row['sample_id']}", written(row["response_length"], "count"),
            row["finish_reason"] or ABSENT, written(row["reward"], "number"), written(row["advantage"], "number"),
            trained, row["dropped_reason"] or ABSENT,
            style="bold" if own else "",
        )  # fmt: skip
    return grid
