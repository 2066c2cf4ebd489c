"""How lengths, rewards, advantages and ratios are spread in each step: counts between edges that hold for the whole run, and quantiles."""

from typing import Any

from flowledger.show.page.book import Book, Rows, Text, text

BINS = 24
NAMED = 8  # whole numbers that an axis has room to name
QUANTILES = (0.1, 0.5, 0.9)

NOTHING = text(
    "No sample was recorded: how lengths and rewards are spread is not known beyond the metrics.",
    "没有记录样本：长度与 reward 的分布只能从指标得知。",
)
# What is counted: of which view, and what it is.
COUNTED: dict[str, tuple[str, Text]] = {
    "response_length": ("samples", text("tokens of a response", "一条 response 的 token 数")),
    "prompt_length": ("samples", text("tokens of a prompt", "一条 prompt 的 token 数")),
    "reward": ("samples", text("reward of a sample", "一个样本的 reward")),
    "advantage": ("samples", text("advantage of a sample", "一个样本的 advantage")),
    "ratio": ("tokens", text("probability of a token, new over old, in the loss", "loss 中一个 token 的新旧概率之比")),
    "rollout_gap": ("tokens", text("log-prob of a token, trainer less rollout", "一个 token 的 log-prob：训练端减 rollout")),
    "entropy": ("tokens", text("entropy at a token", "一个 token 处的熵")),
}  # fmt: skip
VALUES = {"rollout_gap": "old_log_prob - rollout_log_prob"}
# Edges are the same for all steps. Where a few values lie far out they stand in the outermost bins, `open`: else the others would share one.
# Of whole numbers a bin has equally many.
QUERY = """
WITH wide AS (SELECT step, {values} FROM {view} WHERE source <> 'plan' AND step IS NOT NULL {where}),
long AS (UNPIVOT wide ON {names} INTO NAME name VALUE value),
finite AS MATERIALIZED (FROM long WHERE isfinite(value)),
ends AS (
    SELECT name, min(value) AS least, max(value) AS most, quantile_cont(value, [0.005, 0.995]) AS far_out, bool_and(value = floor(value)) AS whole
    FROM finite GROUP BY name),
cut AS (
    SELECT name, whole, far_out[1] AS q_low, far_out[2] AS q_high, most - least > 3 * (q_high - q_low) AND q_high > q_low AS far,
        CASE WHEN far THEN q_low ELSE least END AS low, CASE WHEN far THEN q_high ELSE most END AS high FROM ends),
edges AS (
    SELECT name, whole, far, CASE WHEN whole THEN floor(low) - 0.5 WHEN high > low THEN low ELSE low - 0.5 END AS first,
        CASE WHEN whole THEN ceil((floor(high) - floor(low) + 1) / {bins}) WHEN high > low THEN high / {bins} - low / {bins} ELSE 1.0 / {bins} END AS width FROM cut),
counted AS (
    SELECT name, step, greatest(0, least({bins} - 1, floor((value - first) / width)))::BIGINT AS bin, count(*) AS samples
    FROM finite JOIN edges USING (name) GROUP BY name, step, bin),
steps AS (
    SELECT name, step, count(*) AS samples, quantile_cont(value, {quantiles}) AS quantiles
    FROM finite GROUP BY name, step)
SELECT name, first, width, far, step, steps.samples, quantiles, bins FROM steps JOIN edges USING (name)
JOIN (SELECT name, step, MAP(list(bin), list(samples)) AS bins FROM counted GROUP BY name, step) USING (name, step) ORDER BY name, step
"""


def distributions(book: Book) -> list[dict[str, Any]]:
    """One a quantity: `edges`, and in the order of `steps` the `counts` between them and the `quantiles`. `only`: the value that all have;
    `ticks`: what the axis names, where it is not to choose."""
    rows: Rows = []
    for view, where in {"samples": "", "tokens": "AND loss_mask"}.items():
        values = {name: VALUES.get(name, name) for name, (of, _) in COUNTED.items() if of == view}
        query = QUERY.format(
            values=", ".join(f"({value})::DOUBLE AS {name}" for name, value in values.items()), names=", ".join(values),
            view=f"{view}_merged", where=where, bins=BINS, quantiles=list(QUANTILES),
        )  # fmt: skip
        rows += book.ledger.rows(query)
    by_name = {name: [row for row in rows if row["name"] == name] for name in COUNTED}
    return [_distribution(name, mine) for name, mine in by_name.items() if mine]


def _distribution(name: str, rows: Rows) -> dict[str, Any]:
    first, width = rows[0]["first"], rows[0]["width"]
    only = _only(rows)
    if only is not None:  # one value has no width: a thin bar at it
        room = abs(only) / 10 or 1.0
        first, width = only - room, 2 * room / (BINS + 1)
        rows = [{**row, "bins": {BINS // 2: row["samples"], BINS: 0}} for row in rows]
    used = max(max(row["bins"]) for row in rows) + 1  # of whole numbers there may be fewer than bins
    whole = only is None and width == 1 and first % 1 == 0.5 and used <= NAMED
    return {
        "name": name, "what": COUNTED[name][1], "of": COUNTED[name][0], "open": rows[0]["far"], "only": only,
        "ticks": [only] if only is not None else [first + 0.5 + at for at in range(used)] if whole else None,
        "edges": [first + width * at for at in range(used + 1)],
        "steps": [row["step"] for row in rows], "counts": [[row["bins"].get(at, 0) for at in range(used)] for row in rows],
        "quantiles": [row["quantiles"] for row in rows],
    }  # fmt: skip


def _only(rows: Rows) -> float | None:
    """The value that all have in all steps: two that differ never share a bin."""
    if len({at for row in rows for at in row["bins"]}) > 1:
        return None
    value: float = rows[0]["quantiles"][len(QUANTILES) // 2]
    return value
