"""What each rank did in a step: tokens, seconds, how long it waited, its peak memory. As `balance` and `peaks` have it."""

from bisect import bisect_right
from collections.abc import Sequence

from flowledger.show.page.book import Book, Rows, Text, text
from flowledger.show.page.mesh_ranks import MOST_CELLS, MOST_SQUARES, only_planned

Numbers = list[float | None]  # one a rank
# What is shown of a stage -> its column in `balance`.
COLUMNS = {"tokens": "tokens", "seconds": "seconds", "waited": "waited_seconds"}
ALL = ""  # every stage together
MOST_STAGES = 4  # of which numbers of every rank are kept where ranks are many: those that take longest

UNWAITED = text(
    "How long ranks waited for one another is not known: that takes the collectives of every rank (record.level=tensors, on all ranks).",
    "各 rank 互相等待的时间未知：需要所有 rank 的集合通信记录（record.level=tensors，且所有 rank 都记录）。",
)
UNADDED = text(
    "How long ranks waited for one another is not added up for a run as large as this; `flowledger show RUN balance` works it out.",
    "此运行太大，未累计各 rank 互相等待的时间；可用 `flowledger show RUN balance` 计算。",
)
UNMEASURED = text(
    "Tokens, time and waits per rank are known of a run only; this is a plan.",
    "每个 rank 的 token、时间与等待只有运行后才知道；这里只有计划。",
)


def heat(
    book: Book, step: int | None, size: int, together: Sequence[int]
) -> tuple[dict[str, dict[str, Numbers]], list[Text]]:
    """What is shown -> stage (`ALL`: all of them) -> a number for each rank; and what is not known, and why.

    `together`: the steps that are asked about one after another; waits are worked out for all steps at once.
    """
    if size > MOST_SQUARES:
        return {}, [
            text(
                f"{size:,} ranks are too many to be drawn one by one; their classes are shown.",
                f"{size:,} 个 rank 无法逐一绘制；仅显示各类。",
            )
        ]
    rows = _balance(book, step, together) if step is not None else []
    found = {name: _by_stage(rows, column, size) for name, column in COLUMNS.items()}
    found["peak"] = _peaks(book, step, size)
    if size > MOST_CELLS:
        found = {name: _longest(stages, found["seconds"]) for name, stages in found.items()}
    known = {name: stages for name, stages in found.items() if stages}
    if not rows:
        return known, [UNMEASURED] if only_planned(book) else []
    if "waited" in known or size == 1:
        return known, []
    return known, [UNADDED if book.ledger.changes else UNWAITED]


def _balance(book: Book, step: int, together: Sequence[int]) -> Rows:
    steps = list(together) if step in together else [step]
    rows = book.seen("FROM balance_at(NULL) WHERE list_contains(?::BIGINT[], step)", [steps])
    return [row for row in rows if row["step"] == step]


def _by_stage(rows: Rows, column: str, size: int) -> dict[str, Numbers]:
    """Seconds add up over stages; tokens do not, for each stage goes through the same ones."""
    found: dict[str, Numbers] = {}
    for row in rows:
        value, rank = row[column], row["rank"]
        if value is None or rank is None or not 0 <= rank < size:
            continue
        for stage in (row["stage"],) if column == "tokens" else (ALL, row["stage"]):
            numbers = found.setdefault(stage, [None] * size)
            numbers[rank] = (numbers[rank] or 0) + value
    return found


def _peaks(book: Book, step: int | None, size: int) -> dict[str, Numbers]:
    """Bytes at each rank's peak; a plan has one rank of a class, which speaks for those after it."""
    seen = [
        row
        for row in book.seen("SELECT source, rank, step, peak FROM peaks WHERE rank IS NOT NULL")
        if row["step"] in (step, None)
    ]
    numbers: Numbers = [None] * size
    for row in seen:
        if 0 <= row["rank"] < size:
            numbers[row["rank"]] = max(numbers[row["rank"]] or 0, row["peak"])
    if not seen and only_planned(book):
        planned: dict[int, int] = {}
        for row in book.expected("SELECT source, rank, peak FROM peaks WHERE rank IS NOT NULL"):
            planned[row["rank"]] = max(planned.get(row["rank"], 0), row["peak"])
        numbers = _spread(planned, size)
    return {ALL: numbers} if any(number is not None for number in numbers) else {}


def _spread(planned: dict[int, int], size: int) -> Numbers:
    first: Sequence[int] = sorted(planned)
    return [planned[first[at - 1]] if (at := bisect_right(first, rank)) else None for rank in range(size)]


def _longest(stages: dict[str, Numbers], seconds: dict[str, Numbers]) -> dict[str, Numbers]:
    """Of many ranks the few stages that take longest, and numbers no finer than a microsecond."""
    ordered = sorted(seconds, key=lambda stage: -max((number or 0 for number in seconds[stage]), default=0))
    kept = {ALL, *ordered[: MOST_STAGES + 1], "rollout", "update_actor"}
    return {
        stage: [number if number is None or isinstance(number, int) else round(number, 6) for number in numbers]
        for stage, numbers in stages.items()
        if stage in kept
    }
