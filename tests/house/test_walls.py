"""The rooms import only what they may, wherever in a file the import stands; and the walls are shown to be able to fail."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "flowledger"

MAY_IMPORT: dict[str, set[str]] = {
    "flow": set(),
    "tables": {"flow"},
    "config": {"flow", "tables"},
    "ledger": {"flow", "tables"},
    "plan": {"flow", "tables", "config", "ledger"},
    "run": {"flow", "tables", "config"},
    "record": {"flow", "tables", "ledger"},
    "diagnose": {"flow", "tables", "ledger"},
    "show": {"flow", "tables", "ledger"},
    "cli": {"flow", "tables", "config", "ledger", "plan", "run", "record", "diagnose", "show"},
}
TORCH = {"torch", "transformers", "peft", "tensordict"}
STDLIB_ONLY = {"flow", "tables"}
THIRD_PARTY = {"duckdb", "msgspec", "psutil", "pydantic", "yaml", "rich", "typer", *TORCH}
# Files of record/ that touch torch itself: the hooks. The rest sees tensors only by their attributes.
RECORD_HOOKS = {"hooks.py", "operators.py", "sampled.py"}
PLAN_TRACE = "trace"  # of plan/: runs the model under FakeTensor; all else of it is arithmetic


def imports(source: str) -> set[str]:
    """Every module a file names in an import, at the top, inside functions and under TYPE_CHECKING alike."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise AssertionError("relative imports hide the room; write the whole name")
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def breaches(room: str, file: str, source: str) -> list[str]:
    """What this file of this room imports and may not."""
    named = imports(source)
    rooms = {name.split(".")[1] for name in named if name.startswith("flowledger.")} - {room}
    wrong = [
        f"{room}/{file} imports {other}/" for other in sorted(rooms - MAY_IMPORT[room]) if (SOURCE / other).is_dir()
    ]
    outside = {name.split(".")[0] for name in named}
    if room in STDLIB_ONLY:
        wrong += [f"{room}/{file} imports {name}: stdlib only" for name in sorted(outside & THIRD_PARTY)]
    may = (
        room == "run" or (room == "record" and file in RECORD_HOOKS) or (room == "plan" and file.startswith(PLAN_TRACE))
    )
    if not may:
        wrong += [f"{room}/{file} imports {name}" for name in sorted(outside & TORCH)]
    return wrong


def rooms_and_files() -> list[tuple[str, Path]]:
    return [(path.relative_to(SOURCE).parts[0], path) for path in sorted(SOURCE.rglob("*.py")) if path.parent != SOURCE]


@pytest.mark.parametrize(
    ("room", "path"), rooms_and_files(), ids=lambda value: value.name if isinstance(value, Path) else value
)
def test_a_room_imports_only_what_its_row_allows(room: str, path: Path) -> None:
    assert breaches(room, path.relative_to(SOURCE / room).as_posix(), path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("flow", "import msgspec"),
        ("run", "from flowledger.record import attach"),
        ("record", "def f():\n    from flowledger.run import loop"),
        ("show", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("ledger", "import flowledger.config.schema"),
        ("plan", "import torch"),
    ],
)
def test_a_forbidden_import_is_caught_wherever_it_stands(room: str, source: str) -> None:
    assert len(breaches(room, "control.py", source)) == 1


def test_every_folder_is_a_room_with_a_row() -> None:
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= MAY_IMPORT.keys()
