"""The passport of one sample: where it went, its tokens with all that was made of each, and its group beside it."""

from collections.abc import Sequence
from typing import Any

from flowledger.flow.errors import BadInput
from flowledger.show import passport
from flowledger.show.page import mesh_samples, sample_list, sample_strip
from flowledger.show.page.book import Book, Rows, Text, text
from flowledger.show.page.choice import Choice
from flowledger.show.page.mesh_ranks import only_planned
from flowledger.show.page.once import asking_once
from flowledger.show.words import written

MOST = 12  # samples that a file holds
MOST_TOKENS = 8000  # of all of them together, a first one aside
ABSENT = text("No sample was recorded.", "没有记录任何样本。")
PLANNED = text(
    "This is a plan: no sample has been made yet. A run at record.level=tokens has the passport of each sample of record.groups groups.",
    "这里只有计划，尚无样本。以 record.level=tokens 运行后，record.groups 个组的每个样本都有护照。",
)
LEVEL = text(
    "Samples are written at record.level=tensors and above, their tokens at record.level=tokens.",
    "样本在 record.level=tensors 及以上记录，其 token 在 record.level=tokens 记录。",
)
IMPORTED = text(
    "What was imported has metrics only; samples come with dumps of rollouts (flowledger import DUMP).",
    "导入的内容只有指标；样本来自 rollout 转储文件（flowledger import DUMP）。",
)


def choices(book: Book) -> Sequence[Choice]:
    """The most telling samples first, each with its group; of the others those that stand out."""
    found, tokens = list[Choice](), 0
    for row in sample_list.telling(asking_once(book)):
        tokens += row["tokens"]
        if found and (len(found) >= MOST or tokens > MOST_TOKENS):
            break
        found.append(Choice(sample=row["sample_id"]))
    return found or [Choice()]


def data(book: Book, at: Choice) -> dict[str, Any]:
    """What `flowledger sample RUN ID --json` has, tokens column by column; beside the first sample the list of all."""
    book = asking_once(book)
    listed = [one.sample for one in choices(book) if one.sample is not None]
    first = next(iter(listed), None)
    chosen = at.sample if at.sample is not None else first
    if chosen is None:
        return {"absent": True, "missing": _why(book)}
    try:
        found = passport.passport(book.ledger, chosen, listed)
    except BadInput as error:
        return {"missing": [text(f"{error}.", f"没有这个样本：{error}。")], "list": sample_list.listed(book, listed)}
    way = mesh_samples.way_of(book, found.sample, listed)
    ranks = {hop["stage"]: hop["ranks"] for hop in way["hops"]}
    texts = sample_strip.texts(found.tokens)
    strip = sample_strip.strip([] if texts else found.tokens)
    return {
        "sample": found.sample,
        "hops": [{**hop, "ranks": ranks.get(hop["stage"], [])} for hop in found.hops],
        "trained": way["trained"],
        "strip": strip,
        "texts": texts,
        "group": [_member(row) for row in found.group],
        "missing": _missing(book, found, strip),
        **({"list": sample_list.listed(book, listed), "why": _why_first(found)} if chosen == first else {}),
    }


def _why_first(found: passport.Passport) -> Text:
    """Why this sample is shown before all others: by the order of `sample_list.telling`."""
    advantage = found.sample["advantage"]
    of = (
        ("of the samples whose tokens are kept", "在保留了 token 的样本中")
        if found.tokens
        else ("of all", "在所有样本中")
    )
    if not advantage:
        return text(
            f"Shown first: {of[0]} no advantage stands out, so it is the first.",
            f"首先显示：{of[1]}，没有突出的优势，故取第一个。",
        )
    size = written(advantage, "number")
    return text(
        f"Shown first: {of[0]} its advantage, {size}, is the farthest from 0.",
        f"首先显示：{of[1]}，其优势 {size} 离 0 最远。",
    )


def _member(row: dict[str, Any]) -> dict[str, Any]:
    """What the group shows of each of its samples."""
    names = ("sample_id", "attempt", "response_length", "finish_reason", "reward", "advantage", "dropped_reason")
    return {**{name: row[name] for name in names}, "trained": len(row["trained"] or ())}


def _why(book: Book) -> list[Text]:
    if only_planned(book):
        return [PLANNED]
    return [ABSENT, IMPORTED if book.ledger.directory.manifest.level == "import" else LEVEL]


def _missing(book: Book, found: passport.Passport, strip: dict[str, Any]) -> list[Text]:
    """What there is not of this sample, and why."""
    sample, notes = found.sample, list[Text]()
    if sample["attempt"]:
        notes.append(
            text(
                f"Attempt {sample['attempt']}; earlier ones were given up.",
                f"第 {sample['attempt']} 次尝试；之前的已放弃。",
            )
        )
    if strip["left_out"]:
        notes.append(sample_strip.cut(strip, book.ledger.run, sample["sample_id"]))
    if not found.tokens:
        notes.append(_no_tokens(book, sample))
    if sample["dropped_reason"]:
        notes.append(
            text(
                f"Dropped ({sample['dropped_reason']}): none of its tokens is in the loss.",
                f"已丢弃（{sample['dropped_reason']}）：其 token 均不计入损失。",
            )
        )
    return notes


def _no_tokens(book: Book, sample: dict[str, Any]) -> Text:
    level = book.ledger.directory.manifest.level
    if level == "import":
        return text("The dump has no tokens of this sample.", "转储中没有这个样本的 token。")
    if level != "tokens":
        return text(
            f"No tokens: the run was recorded at level {level}; tokens are kept at record.level=tokens, of record.groups groups a step.",
            f"没有 token：本次运行的记录级别是 {level}；record.level=tokens 会保留每步 record.groups 个组的 token。",
        )
    there = _kept(book.ledger.rows(
        "SELECT DISTINCT sample_id FROM tokens WHERE step IS NOT DISTINCT FROM ?", [sample["step"]]
    ))  # fmt: skip
    return text(
        f"No tokens: this sample's group is not among the record.groups groups whose tokens are kept{there and '; of this step those of ' + there + ' are'}.",
        f"没有 token：该样本所在的组不在保留 token 的 record.groups 个组中{there and '；本步保留的是 ' + there}。",
    )


def _kept(rows: Rows) -> str:
    names = sorted((row["sample_id"] for row in rows), key=lambda name: (not name.isdecimal(), len(name), name))
    return ", ".join(names[:8]) + (" …" if len(names) > 8 else "")
