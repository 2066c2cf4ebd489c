"""The facts of one algorithm: its row of the table, with the shapes of its inputs from the flow."""

from collections.abc import Iterator
from typing import Any

from flowledger.flow.tensors import tensor
from flowledger.show.languages import Language, said
from flowledger.tables.algorithms import GRAINS, NEEDS, WHATS, Method, algorithms, names

# Those that work on the micro-batch that is being updated; the others on all samples of the step.
IN_MICRO_BATCH = ("policy_loss", "aggregation", "value_loss", "entropy")

# Tensor or stage -> the algorithms that decide what is in it.
MADE_BY: dict[str, tuple[str, ...]] = {
    "advantage": ("advantage",),
    "advantages": ("advantage",),
    "returns": ("advantage",),
    "kl": ("kl_form", "kl_control"),
    "kl_loss": ("kl_form", "kl_control", "aggregation"),
    "loss_mat": ("policy_loss",),
    "policy_loss": ("policy_loss", "aggregation"),
    "value_loss": ("value_loss", "aggregation"),
    "entropy_loss": ("entropy", "aggregation"),
    "rollout_is_weights": ("importance",),
    "loss_mask": ("rejection",),
}


def facts_of(row: Method, word: str, lang: Language) -> dict[str, Any]:
    """The facts of an algorithm, `what` and `name` first; `word` is the name or alias that was asked for."""
    english, chinese, setting = WHATS[row.what]
    return {
        "what": row.what,
        "name": row.name,
        "asked": word,
        "is": said(english, chinese, lang),
        "purpose": said(row.purpose, row.purpose_zh, lang),
        "formula": said(row.formula, row.formula_zh or row.formula, lang),
        "source": row.source,
        "chosen_by": setting,
        "grain": said(*GRAINS[row.grain], lang),
        "to_tokens": said(row.to_tokens, row.to_tokens_zh, lang),
        "inputs": [{"tensor": name, "shape": _shape(name, row.what)} for name in row.inputs],
        "needs": {word: said(*text, lang) for word, text in NEEDS.items() if word in row.needs},
        "settings": list(row.settings),
        "surprise": row.surprise and said(row.surprise, row.surprise_zh or "", lang),
        "common_bug": said(row.bug, row.bug_zh, lang),
        "aliases": list(row.aliases),
    }


def algorithms_of(name: str) -> dict[str, list[str]]:
    """Setting or sort -> names of the algorithms that may fill this tensor, or run in this stage."""
    return {WHATS[what][2] or WHATS[what][0]: list(names(what)) for what in MADE_BY.get(name, ())}


def algorithm_words() -> Iterator[str]:
    """Every name and alias of an algorithm."""
    for row in algorithms().values():
        yield from (row.name, *row.aliases)


def _shape(name: str, what: str) -> str:
    """The form of a tensor that the algorithm meets: a micro-batch's, or that of the whole step."""
    forms = tensor(name).forms
    micro = [form for form in forms if any("B_micro" in dim.symbols for dim in form.dims)]
    whole = [form for form in forms if form not in micro]
    return ((micro or whole) if what in IN_MICRO_BATCH else (whole or micro))[0].shape
