"""NeMo-RL's `defaults: parent.yaml`: a file on top of its parents, each path relative to the file that names it.

Of several parents the later one counts (nemo_rl/utils/config.py). A parent that is not at hand but whose name is one of
the table is taken from there.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

from flowledger.config.dotted import Tree, flat, merged, place
from flowledger.config.settings import table
from flowledger.config.yaml_text import document, text_of
from flowledger.flow.errors import BadInput, nearest

REPLACES = "_override_"


@dataclass(slots=True)
class Composed:
    """A tree, where each key stands, and what a user should know of how it was put together."""

    tree: Tree = field(default_factory=dict)
    marks: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def on_top(self, above: "Composed") -> None:
        """Put another tree above this one. A section at its top with `_override_: true` replaces the one below."""
        for name, section in above.tree.items():
            if isinstance(section, dict) and section.pop(REPLACES, False):
                self.tree.pop(name, None)
        self.tree = merged(self.tree, above.tree)
        self.marks |= above.marks
        self.notes += above.notes


def composed(path: Path, assume: Mapping[str, str], above: tuple[Path, ...] = ()) -> Composed:
    """A file with all its parents. Raises BadInput for a missing parent, a circle, or what is no configuration."""
    if path.resolve() in above:
        raise BadInput(f"{path}: inherits from itself ({' → '.join(file.name for file in (*above, path))})")
    tree, marks, line = document(text_of(path), str(path))
    if not isinstance(tree, dict):
        raise BadInput(f"{path}:{line or 1}: expected `key: value` lines, found {type(tree).__name__}")
    names = tree.pop("defaults", None)
    place_of = marks.pop("defaults", str(path))
    found = Composed()
    if not isinstance(names, str | list | None):
        raise BadInput(f"{place_of}: defaults = {names}: should be a path or a list of paths")
    for name in [names] if isinstance(names, str) else names or ():
        found.on_top(_parent(path, str(name), place_of, assume, (*above, path.resolve())))
    found.on_top(Composed(tree, {key: mark for key, mark in marks.items() if not key.startswith("defaults.")}))
    return found


def _parent(path: Path, name: str, where: str, assume: Mapping[str, str], above: tuple[Path, ...]) -> Composed:
    file = Path(name) if name.startswith("/") else path.parent / name
    if file.is_file():
        return composed(file, assume, above)
    known = table("nemo_rl")["parents"]
    stem = Path(assume.get("defaults", name)).stem
    if stem not in known:
        raise BadInput(
            f"{where}: defaults = {name}: no such file beside {path.name}; "
            f"bring it along, or --assume defaults={'|'.join(f'{one}.yaml' for one in known)}{nearest(stem, known)}"
        )
    version = table("nemo_rl")["version"]
    found = of_table(stem)
    found.notes.append(f"{where}: {name} is not at hand; its values are those of nemo_rl {version}")
    return found


def of_table(stem: str) -> Composed:
    """A base configuration of the table; its keys count as defaults, so they have no place."""
    row = deepcopy(dict(table("nemo_rl")["parents"][stem]))
    unset, parent = row.pop("unset", ()), row.pop("defaults", None)
    for key in unset:
        place(row, key, None)
    found = of_table(Path(parent).stem) if parent else Composed()
    found.on_top(Composed(row))
    return found


def places(found: Composed) -> dict[str, str]:
    """Leaf -> where it stands; a leaf of a section that an override or a parent gave whole stands with it."""
    return {key: found.marks[key] for key in flat(found.tree) if key in found.marks}
