"""What one word means: a tensor, a stage, a dimension, a mesh axis, a kind of memory, a metric, an algorithm.

`meanings` gives the facts under the names that the ledger uses; `explain` sets the same facts as text, English or
Chinese.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol
from unicodedata import east_asian_width

from flowledger.flow.axes import AXES, CUTS
from flowledger.flow.dims import SYMBOLS, parse_shape
from flowledger.flow.errors import BadInput, folded, nearest
from flowledger.flow.kinds import KINDS
from flowledger.flow.stages import Stage, stages
from flowledger.flow.tensors import Form, Tensor, tensors
from flowledger.show import explain_cuts, explain_headers, explain_sequence, explain_settings, explain_words
from flowledger.show.explain_algorithms import algorithm_words, algorithms_of, facts_of
from flowledger.show.explain_labels import LABELS_ZH, LISTED
from flowledger.show.languages import Language, said
from flowledger.show.progress import WATCHED
from flowledger.show.token_columns import MADE_BY_THE_LOSS
from flowledger.tables import algorithms
from flowledger.tables.metrics import Metric, canonical, find, metrics, name_tables


class Glossary(Protocol):
    """Another room's words, which no view knows: asked where nothing here is called so."""

    def facts(self, word: str, lang: Language, /) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each meaning of a word, with its sort."""
        ...

    def words(self) -> Iterator[str]:
        """Every word that it knows."""
        ...


def explain_rows(name: str, lang: Language = "en") -> dict[str, Any]:
    """The facts of one word, `what` and `name` first. Raises BadInput with the nearest known word.

    A word that is two things (`values` and `advantage` are stage and tensor) gives the tensor; `stage:values` asks for
    the stage, and `tensor:`, `dim:`, `axis:`, `scheme:`, `kind:`, `column:`, `metric:`, `word:`, `heading:` likewise. `advantage:gpg` asks for the estimator of
    that name, `policy_loss:gpg` for the loss.
    """
    return meanings(name, lang)[0]


def explain(name: str, lang: Language = "en", more: Callable[[], Glossary] | None = None) -> str:
    """The same facts as text, every meaning of the word one after another. Raises BadInput with the nearest word."""
    found = "\n\n".join("\n".join(_lines(facts, lang)) for facts in meanings(name, lang, more))
    several = explain_cuts.several(name.rpartition(":")[2], lang)
    return found if several is None else f"{several}\n{found}"


def meanings(name: str, lang: Language = "en", more: Callable[[], Glossary] | None = None) -> list[dict[str, Any]]:
    """The facts of every meaning of a word, the tensor first. Raises BadInput with the nearest known word.

    `more` gives the words of another room where this one has none; it is called then only, for that room takes time to load.
    """
    what, colon, word = name.rpartition(":")
    found = _meanings(name, lang) or _meanings(what + colon + _spelt(word), lang) or _symbols(word, lang)
    found = found or [facts for _, facts in explain_headers.facts(name, lang)]  # a heading may have a colon of its own
    if not found and more is not None:
        found = [facts for sort, facts in more().facts(word, lang) if what in ("", sort)]
    if not found:
        known = algorithms.names(what) if what in algorithms.WHATS else [*_words(), *(more().words() if more else ())]
        raise BadInput(f"nothing in the flow is called {name!r}{nearest(word, known)}")
    return found


def _symbols(word: str, lang: Language) -> list[dict[str, Any]]:
    """Of a shape or a product, such as `[B_prompt*G, S_resp]`: each of its symbols; none where it has others than the flow's."""
    try:
        dims = parse_shape(word if word.startswith("[") else f"[{word}]")
    except BadInput:
        return []
    named = sorted({symbol for dim in dims for symbol in dim.symbols}, key=word.index)
    return [_dim(name, lang) for name in named] if set(named) <= SYMBOLS.keys() else []


def _meanings(name: str, lang: Language) -> list[dict[str, Any]]:
    what, colon, word = name.rpartition(":")
    asked = what if colon else None
    rows = tensors()
    tensor = rows.get(word) or next((row for row in rows.values() if word in (*row.aliases, row.token_column)), None)
    candidates = (
        ("tensor", tensor and _tensor(tensor, word, lang)),
        ("stage", word in stages() and _stage(stages()[word], lang)),
        ("axis", word in AXES and _axis(word, word, lang)),
        ("dim", word in SYMBOLS and word not in AXES and _dim(word, lang)),
        ("kind", word in KINDS and _kind(word, lang)),
        ("column", word in MADE_BY_THE_LOSS and _column(word, lang)),
        *(("metric", _metric(row, word, lang)) for row in metrics_of(word)),
        ("comparison", folded(word) == folded(explain_sequence.NAME) and explain_sequence.facts(lang)),
        *((row.what, facts_of(row, word, lang)) for row in algorithms.find(word)),
        *explain_cuts.facts(word, lang),
        *explain_words.facts(word, lang),
        *explain_settings.facts(word, lang),
        *explain_headers.facts(word, lang),
        ("axis", word not in AXES and (axis := explain_cuts.axis_of(word)) and _axis(axis, word, lang)),
    )
    return [facts for kind, facts in candidates if facts and asked in (None, kind)]


def metrics_of(word: str) -> list[Metric]:
    """The metrics that a word means: by their name, by a framework's, or by the short one of a progress line."""
    told = [name for title, name, _ in WATCHED if title == word]
    names = [word, *(canonical(table, word) for table in name_tables()), *told]
    return list({row.name: row for name in names if (row := find(name)) is not None}.values())


def _tensor(row: Tensor, word: str, lang: Language) -> dict[str, Any]:
    columns = {"tokens": row.token_column, "samples": row.sample_column}
    return {
        "what": "tensor",
        "name": row.name,
        "asked": word,
        "purpose": said(row.purpose, row.purpose_zh, lang),
        "forms": [_form(row, form) for form in (*row.forms, *row.foreign)],
        "dtype": row.dtype,
        "kind": row.kind,
        "mask": row.mask,
        "producer": row.producer,
        "also_written_by": list(row.also_written_by),
        "readers": list(row.readers),
        "freed_by": row.freed_by,
        "also_freed_by": list(row.also_freed_by),
        "lifetime": row.lifetime,
        "owner": row.owner,
        "placement": row.placement_of(),
        "variants": {name: dict(placed) for name, placed in row.variants.items()},
        "common_bug": said(row.common_bug, row.common_bug_zh, lang),
        "aliases": list(row.aliases),
        "columns": [f"{table}.{column}" for table, column in columns.items() if column],
        "algorithms": algorithms_of(row.name),
    }


def _form(row: Tensor, form: Form) -> dict[str, Any]:
    return {
        "form": form.name,
        "shape": form.shape,
        "padding": form.padding,
        "broadcast": form.broadcast,
        "source": form.source,
        "placement": row.placement_of(form),
    }


def _stage(row: Stage, lang: Language) -> dict[str, Any]:
    return {
        "what": "stage",
        "name": row.name,
        "purpose": said(row.purpose, row.purpose_zh, lang),
        "role": row.role,
        "phases": list(row.phases),
        "works_on": list(row.works_on),
        "aggregates": said(row.aggregates, row.aggregates_zh, lang),
        "reads": list(row.reads),
        "writes": list(row.writes),
        "frees": list(row.frees),
        "optional": row.optional,
        "algorithms": algorithms_of(row.name),
    }


def _axis(name: str, word: str, lang: Language) -> dict[str, Any]:
    cut = {row.name: row.placement_of()[name] for row in tensors().values()}
    return {
        "what": "axis",
        "name": name,
        "asked": word,
        "meaning": said(*SYMBOLS[name], lang),
        "purpose": said(*CUTS[name], lang),
        "placement": {tensor: placed for tensor, placed in cut.items() if placed != "Replicate()"},
    }


def _dim(name: str, lang: Language) -> dict[str, Any]:
    using = [
        row.name for row in tensors().values() if any(name in dim.symbols for form in row.forms for dim in form.dims)
    ]
    return {"what": "dim", "name": name, "meaning": said(*SYMBOLS[name], lang), "used_by": using}


def _kind(name: str, lang: Language) -> dict[str, Any]:
    using = [row.name for row in tensors().values() if row.kind == name]
    return {"what": "kind", "name": name, "meaning": said(*KINDS[name], lang), "used_by": using}


def _column(name: str, lang: Language) -> dict[str, Any]:
    return {
        "what": "column",
        "name": name,
        "meaning": said(*MADE_BY_THE_LOSS[name], lang),
        "columns": [f"tokens.{name}"],
    }


def _metric(row: Metric, word: str, lang: Language) -> dict[str, Any]:
    return {
        "what": "metric",
        "name": row.name,
        "asked": word,
        "meaning": said(row.definition, row.definition_zh, lang),
        "unit": row.unit,
        "level": row.level,
        # infinity cannot stand in JSON: an open end is null
        "healthy": row.healthy and [None if abs(bound) == float("inf") else bound for bound in row.healthy],
        "told_by": list(row.told_by) or None,
        "no_alarm": said(row.silent, row.silent_zh, lang) or None,
    }


def _lines(facts: Mapping[str, Any], lang: Language) -> Iterator[str]:
    """`label  value` lines under a heading; what is empty is left out, except that a scalar's placement still shows."""
    asked = facts.get("asked", facts["name"])
    alias = f"  (= {asked})" if asked != facts["name"] else ""
    yield f"{facts['name']}{alias}  [{facts['what']}]"
    shown = {key: value for key, value in facts.items() if key not in ("what", "name", "asked") and _is_said(value)}
    labels = {key: LABELS_ZH[key] if lang == "zh" else key.replace("_", " ") for key in shown}
    for key, value in shown.items():
        label = f"  {labels[key]}".ljust(18 - _wide(labels[key]))
        for number, text in enumerate(_texts(key, value, ": " if lang == "en" else "：")):
            yield (label if number == 0 else " " * 18) + text


def _wide(text: str) -> int:
    """How many of its characters take two columns of a terminal."""
    return sum(east_asian_width(one) in "WF" for one in text)


def _is_said(value: object) -> bool:
    return value is not None and value is not False and value != [] and value != {}


def _texts(key: str, value: Any, colon: str) -> Iterator[str]:
    if key == "forms":
        yield from (_form_text(form) for form in value)
    elif key == "inputs":
        yield from (f"{one['tensor']}  {one['shape']}" for one in value)
    elif isinstance(value, dict) and key in LISTED:
        yield from (
            f"{word}{colon}{text if isinstance(text, str) else ', '.join(text)}" for word, text in value.items()
        )
    elif key == "healthy":
        low, high = value
        yield f"{'-inf' if low is None else low} … {'inf' if high is None else high}"
    elif key == "bounds":
        yield from (f"{bound} = {number}" for bound, number in value.items())
    elif key == "variants":
        yield from (
            f"{name}{colon}{'  '.join(f'{axis}={at}' for axis, at in placed.items())}" for name, placed in value.items()
        )
    elif isinstance(value, dict):
        yield "  ".join(f"{axis}={placed}" for axis, placed in value.items())
    elif isinstance(value, list):
        yield ", ".join(value)
    else:
        yield "yes" if value is True else str(value)


def _form_text(form: Mapping[str, Any]) -> str:
    notes = [
        f"padded {form['padding']}" if form["padding"] in ("left", "right", "both") else form["padding"],
        form["broadcast"] and f"repeats along {form['broadcast']}",
        form["source"] and f"from {form['source']}",
    ]
    said = ", ".join(note for note in notes if note and note != "none")
    cut = " ".join(f"{axis}={placed}" for axis, placed in form["placement"].items() if placed != "Replicate()")
    return f"{form['form']}: {form['shape']}" + (f"  {said}" if said else "") + (f"  {{{cut}}}" if cut else "")


def _spelt(word: str) -> str:
    """A known word that differs in case, `-` and `_` only, where there is one."""
    asked = folded(word).replace(" ", "_")
    return next((known for known in _words() if folded(known).replace(" ", "_") == asked), word)


def _words() -> list[str]:
    aliases = [alias for row in tensors().values() for alias in row.aliases]
    columns = [*MADE_BY_THE_LOSS, *(row.token_column for row in tensors().values() if row.token_column)]
    more = (
        *aliases,
        *columns,
        *algorithm_words(),
        *explain_cuts.words(),
        *explain_words.words(),
        *explain_settings.words(),
        *explain_headers.words(),
        explain_sequence.NAME,
    )
    return [*tensors(), *stages(), *SYMBOLS, *KINDS, *metrics(), *(title for title, *_ in WATCHED), *more]
