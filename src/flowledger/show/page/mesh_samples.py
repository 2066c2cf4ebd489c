"""Where the samples of a step travelled: which rank sampled each, scored it, trained on it, and on which of its tokens."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flowledger.flow.errors import BadInput
from flowledger.show import layout as ledger_layout
from flowledger.show.page.book import Book, Text, text
from flowledger.show.page.mesh_ranks import only_planned

MOST = 64  # samples of a step whose way a file holds
PLANNED = text(
    "No sample has travelled yet: this is a plan. The cells say which samples each rank would train on.",
    "样本尚未流动：这里只有计划。单元格中写明每个 rank 将训练哪些样本。",
)
NOBODY = text(
    "No sample was recorded in this step: record.level=tensors and above write who sampled and trained on each.",
    "本步没有记录样本：record.level=tensors 及以上会记录每个样本由谁采样、由谁训练。",
)


def step_of(book: Book, sample: str) -> int | None:
    """The step that made a sample."""
    rows = book.ledger.rows("SELECT max(step) AS step FROM samples WHERE sample_id = ? AND source <> 'plan'", [sample])
    return rows[0]["step"] if rows else None


def ways(book: Book, step: int | None) -> tuple[list[dict[str, Any]], list[Text], Text | None]:
    """One a sample, by its number: `hops` (stage, ranks) in the order of the step, `trained` on every rank; what is missing; and where others are."""
    if only_planned(book):
        return [], [PLANNED], None
    facts = book.ledger.rows(
        "SELECT s.sample_id, s.attempt, group_id, prompt_length, response_length, finish_reason, reward, advantage, dropped_reason "
        "FROM samples_merged s LEFT JOIN (SELECT DISTINCT sample_id FROM tokens) t ON s.sample_id = t.sample_id "
        "WHERE s.source <> 'plan' AND s.step IS NOT DISTINCT FROM ? "
        "QUALIFY row_number() OVER (PARTITION BY s.sample_id ORDER BY attempt DESC) = 1 "
        "ORDER BY t.sample_id IS NULL, dropped_reason IS NULL, abs(coalesce(advantage, 0)) DESC, s.sample_id",
        [step],
    )
    if not facts:
        return [], [NOBODY], None
    kept = sorted(facts[:MOST], key=lambda row: _number(row["sample_id"]))
    stops = _stops(book, [row["sample_id"] for row in kept])
    slices = _slices(book, step)
    found = [
        {**row, **_way(stops.get((row["sample_id"], row["attempt"]), []), row["sample_id"], slices)} for row in kept
    ]
    return found, [], _more(len(facts), book) if len(facts) > MOST else None


def _number(sample: str) -> tuple[int, str]:
    return (int(sample), "") if sample.isdecimal() else (2**62, sample)


def _stops(book: Book, samples: Iterable[str]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """What each stage wrote of these samples, and on which ranks."""
    rows = book.ledger.rows(
        "SELECT sample_id, attempt, stage, list(DISTINCT rank ORDER BY rank) FILTER (rank IS NOT NULL) AS ranks, "
        "flatten(list(trained ORDER BY rank, seq) FILTER (trained IS NOT NULL)) AS trained "
        "FROM samples LEFT JOIN flow_stages USING (stage) "
        "WHERE source <> 'plan' AND stage IS NOT NULL AND sample_id IN (SELECT unnest(?)) "
        "GROUP BY sample_id, attempt, stage ORDER BY min(position) NULLS LAST, stage",
        [list(samples)],
    )
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["sample_id"], row["attempt"]), []).append(row)
    return found


def _way(stops: list[dict[str, Any]], sample: str, slices: "Slices") -> dict[str, Any]:
    trained = [part for stop in stops for part in stop["trained"] or ()]
    return {
        "hops": [{"stage": stop["stage"], "ranks": stop["ranks"] or []} for stop in stops],
        "trained": [{**part, "tokens": slices.of(sample, part["rank"])} for part in trained],
    }


class Slices:
    """Which tokens of a sample each rank of its row had, where axes cut rows."""

    def __init__(self, book: Book, samples: Mapping[int, ledger_layout.Trained]) -> None:
        self._book, self._samples, self._on = book, samples, ledger_layout.mesh_of(book.ledger)

    def of(self, sample: str, rank: int) -> list[list[int]] | None:
        """Intervals of its tokens; None where a rank had all of them, or nobody knows."""
        on = self._on
        if not sample.isdecimal() or int(sample) not in self._samples:
            return None
        mine = self._samples[int(sample)]
        length = mine.prompt + mine.response
        try:
            row, place, last = ledger_layout.row_of(self._book.ledger, self._samples, int(sample), length - 1)
            pieces = replace(row, cp=on.degree("cp"), sp=on.degree("sp")).of_rank(
                cp=on.at(rank, "cp"), sp=on.at(rank, "sp")
            )
        except BadInput:
            return None
        moved = length - 1 - last  # a prompt that its neighbour holds for both
        held = [(piece.start + moved, min(piece.stop + moved, length)) for piece in pieces if piece.sample == place]
        return [[start, stop] for start, stop in held if start < stop]


def _slices(book: Book, step: int | None) -> Slices:
    on = ledger_layout.mesh_of(book.ledger)
    cut = on.degree("cp") * on.degree("sp") > 1
    return Slices(book, ledger_layout.trained(book.ledger, step) if cut else {})


def _more(count: int, book: Book) -> Text:
    return text(
        f"The ways of {MOST} of the step's {count:,} samples are here; any other: flowledger show {book.ledger.run} mesh --sample ID",
        f"此处有本步 {count:,} 个样本中 {MOST} 个的路径；其余请用：flowledger show {book.ledger.run} mesh --sample ID",
    )


def way_of(book: Book, sample: Mapping[str, Any], listed: Sequence[str]) -> dict[str, Any]:
    """The way of one sample; `listed`: those that are asked about together."""
    name = sample["sample_id"]
    stops = _stops(book, listed if name in listed else [name])
    return _way(stops.get((name, sample["attempt"]), []), name, _slices(book, sample["step"]))
