"""What `diagnose` does where a configuration is not there, or not whole: the sizes of `--model`, the bytes of `--gpu`, settings
that nothing takes, and values that a launch must have and a diagnosis can do without.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flowledger.flow.errors import BadInput, nearest

if TYPE_CHECKING:
    from flowledger.config.foreign import Reading
    from flowledger.plan.plan import Plan
    from flowledger.tables.gpus import Gpu
    from flowledger.tables.models import Architecture

NO_CONFIG = (
    "no CONFIG among the sources that takes it: give a script or YAML file too, or a framework's name for its defaults"
)


def sizes_of(model: str | None) -> dict[str, int]:
    """Symbol -> size of a model by its name or file; none where none is named. Raises BadInput with the nearest."""
    if model is None:
        return {}
    found = _architecture(model)
    return {
        "V": found.vocab, "H": found.hidden, "L": found.layers, "A": found.heads, "K": found.kv_heads, "D": found.head_dim,
        "F": found.ffn,
    }  # fmt: skip


def bytes_of(gpu: str | None) -> int | None:
    """The memory of a device by its name; None for a CPU. Raises BadInput with the nearest."""
    return None if gpu is None or gpu == "cpu" else _device(gpu).memory_bytes


def reading_of(
    path: Path, settings: Sequence[str], framework: str | None, assume: Sequence[str]
) -> "tuple[Reading, list[str]]":
    """A configuration, and the `key=value` that it was read with because it leaves them open. Raises BadInput as `plan` does."""
    from flowledger.cli.plan import read_source

    taken: list[str] = []
    while True:
        try:
            return read_source(str(path), settings, framework, None, [*assume, *taken], None, None), taken
        except BadInput as error:
            if (more := _assumable(str(error))) is None or more in taken:
                raise
            taken.append(more)


def in_language(plan: "Plan", language: str) -> dict[str, str]:
    """English sentence -> the same in a language, of the rules that a configuration is checked against."""
    from flowledger.plan.checks import check

    if language == "en":
        return {}
    asked = plan.config, plan.architecture, plan.lengths
    pairs = zip(check(*asked), check(*asked, language=language), strict=True)
    return {
        text: said
        for row, other in pairs
        for text, said in ((row.message, other.message), (row.next_step, other.next_step))
        if text and said and row.id == other.id
    }


def _assumable(why: str) -> str | None:
    """What a configuration may be read with that lacks only this."""
    from flowledger.cli.reports import NEEDED

    found = re.search(r"--assume (\S+)=VALUE", why)
    return f"{found[1]}={NEEDED[found[1]]}" if found and found[1] in NEEDED else None


def not_taken(settings: Sequence[str], framework: str | None, assume: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(what was given, why it counts for nothing) of what only a configuration takes."""
    from flowledger.config.detect import READERS

    for word in settings:
        yield word, f"{NO_CONFIG} ({', '.join(READERS)})"
    for word in assume:
        yield f"--assume {word}", NO_CONFIG
    if framework is not None and settings:
        yield (
            f"--framework {framework}",
            f"it says whose files these are; for a plan of its defaults name {framework} as a source",
        )


def _architecture(model: str) -> "Architecture":
    from flowledger.config.model_file import read_model
    from flowledger.tables.models import find, models

    if (found := find(model)) is not None:
        return found
    if Path(model).expanduser().exists():
        return read_model(Path(model).expanduser())
    last = model.rstrip("/").rpartition("/")[2]
    raise BadInput(
        f"--model {model!r}: no such model in the catalogue, and no such file{nearest(last, models())}; give a name, or a config.json"
    )


def _device(name: str) -> "Gpu":
    from flowledger.tables.gpus import gpu

    try:
        return gpu(name)
    except BadInput as error:
        raise BadInput(f"--gpu: {error}") from None
