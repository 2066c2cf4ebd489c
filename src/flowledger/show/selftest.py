"""The matrix of a self-test: each fault with who noticed it and when, then the clean runs, then the sums."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from flowledger.show import terminal
from flowledger.show.columns import Column, Table

FAULTS = (
    Column("goal"), Column("id", "fault"), Column("what"), Column("status"), Column("by", "noticed by"),
    Column("when", "step"), Column("others", "also fired", wide=True),
)  # fmt: skip
CLEAN = (Column("id", "clean run"), Column("status"), Column("message", "said", sparse=True))
SIGNS = {"caught": "✓", "missed": "✗ missed", "waiting": "waits", "silent": "✓ silent", "false_alarm": "✗ false alarm"}
GOOD = ("caught", "silent")


def draw(
    faults: Sequence[Mapping[str, Any]], clean: Sequence[Mapping[str, Any]], summary: Mapping[str, Any],
    screen: Console, *, wide: bool = False, zh: bool = False,
) -> None:  # fmt: skip
    """Print the matrix, and beneath it why faults were missed and what the sums are."""
    rows = [_fault(row, zh=zh) for row in sorted(faults, key=lambda row: str(row["goal"]))]
    if rows:
        terminal.draw(Table("selftest", "selftest", FAULTS, rows, section="goal"), screen, wide=wide)
    if clean:
        said = [{**row, "status": SIGNS[row["status"]]} for row in clean]
        terminal.draw(Table("selftest_clean", "selftest", CLEAN, said), screen, wide=wide)
    for row in faults:
        if row["status"] == "missed":
            why = (
                row["message"]
                or f"expected {', '.join(row['expects']) or 'any error'}; fired: {', '.join(row['fired']) or 'nothing'}"
            )
            screen.print(Text(f"missed {row['id']}: {why}", style="yellow"))
    screen.print(sums(summary))


def sums(summary: Mapping[str, Any]) -> Text:
    """The last line."""
    fine = not summary["missed"] and not summary["false_alarms"]
    waits = f"; {len(summary['waiting'])} wait for parts that the loop does not have" if summary["waiting"] else ""
    return Text(
        f"{summary['caught']} of {summary['faults']} faults caught within two steps of their effect; "
        f"{summary['false_alarms']} of {summary['clean_runs']} clean runs had something said of them{waits}",
        style="green" if fine else "bold red",
    )


def _fault(row: Mapping[str, Any], *, zh: bool) -> dict[str, Any]:
    """`+0`: noticed in the step of its effect; `+1` in the next."""
    others = [name for name in row["fired"] if name not in row["caught_by"]]
    return {
        **row,
        "what": row["zh"] or row["what"] if zh else row["what"],
        "status": SIGNS[row["status"]],
        "by": ", ".join(row["caught_by"]) or None,
        "when": None if row["after"] is None else f"{row['step']} (+{row['after']})",
        "others": ", ".join(others) or None,
    }
