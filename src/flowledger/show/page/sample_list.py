"""The samples of a run: which of them tell most, and a list to choose from."""

from collections.abc import Sequence
from typing import Any

from flowledger.show.page.book import Book, Rows

MOST = 400  # samples in the list
TELLING = 64  # samples that are worth a look

COLUMNS = (
    "sample_id",
    "step",
    "group_id",
    "reward",
    "advantage",
    "length",
    "finish_reason",
    "dropped_reason",
    "tokens",
)

# The last attempt of each sample, with how many of its tokens are there and how its group stands out.
SAMPLES = """
WITH kept AS (SELECT source, sample_id, count(DISTINCT position) AS tokens FROM tokens WHERE source <> 'plan' GROUP BY source, sample_id),
last AS (
    SELECT s.source, s.sample_id, attempt, step, group_id, reward, advantage, finish_reason, dropped_reason, coalesce(kept.tokens, 0) AS tokens, prompt_length + response_length AS length
    FROM samples_merged s LEFT JOIN kept ON s.sample_id = kept.sample_id AND s.source = kept.source
    WHERE s.source <> 'plan' QUALIFY row_number() OVER (PARTITION BY s.sample_id ORDER BY attempt DESC) = 1)
SELECT *, max(tokens > 0 AND advantage IS NOT NULL AND dropped_reason IS NULL) OVER same AS has_tokens,
    max(abs(coalesce(advantage, 0))) OVER same AS spread, min(dropped_reason IS NULL) OVER same AS is_whole
FROM last WINDOW same AS (PARTITION BY step, group_id)
"""
# `telling`: its place among those worth a look. Samples with tokens come first; of these the group whose advantages are widest, then
# those of the last and the first step. `listed`: its place in the list, where samples with tokens, dropped ones and the extremes come first.
PLACED = f"""
WITH found AS ({SAMPLES}),
ranked AS (
    SELECT *, count(*) OVER () AS n, row_number() OVER (ORDER BY tokens = 0, abs(coalesce(advantage, 0)) DESC, sample_id) AS best,
        row_number() OVER (ORDER BY tokens = 0, dropped_reason IS NULL, abs(coalesce(advantage, 0)) DESC, sample_id) AS listed FROM found),
groups AS (
    SELECT step, group_id, row_number() OVER (ORDER BY bool_or(best = 1) DESC, NOT bool_or(tokens > 0), step DESC, min(best)) AS place
    FROM ranked GROUP BY step, group_id),
placed AS (
    SELECT ranked.*, row_number() OVER (ORDER BY best <> 1, place, TRY_CAST(sample_id AS BIGINT), sample_id) AS telling
    FROM ranked JOIN groups ON groups.step IS NOT DISTINCT FROM ranked.step AND groups.group_id IS NOT DISTINCT FROM ranked.group_id)
SELECT {", ".join(COLUMNS)}, n, telling, listed FROM placed WHERE telling <= {TELLING} OR listed <= {MOST}
ORDER BY step, TRY_CAST(sample_id AS BIGINT), sample_id
"""


def telling(book: Book) -> Rows:
    """Samples, the most telling first: the one that `report` shows, its group, then other groups."""
    worth = [row for row in book.ledger.rows(PLACED) if row["telling"] <= TELLING]
    return sorted(worth, key=lambda row: int(row["telling"]))


def listed(book: Book, held: Sequence[str]) -> dict[str, Any]:
    """`rows` of COLUMNS, those that are `held` first; `all`: how many there are. Of many: with tokens, dropped, and the extremes."""
    rows = book.ledger.rows(PLACED)
    kept = [row for row in rows if row["sample_id"] in held]
    others = sorted((row for row in rows if row["sample_id"] not in held), key=lambda row: int(row["listed"]))
    last = others[: MOST - len(kept)][-1:]  # of the others that are shown, in the order of the list
    shown = kept + [row for row in rows if row["sample_id"] not in held and last and row["listed"] <= last[0]["listed"]]
    return {
        "names": list(COLUMNS),
        "rows": [[row[name] for name in COLUMNS] for row in shown],
        "all": rows[0]["n"] if rows else 0,
    }
