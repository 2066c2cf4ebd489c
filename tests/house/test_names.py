"""Names, sizes and start-up: what keeps the house readable and quick to enter."""

import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "flowledger"
VAGUE = {"util", "utils", "helper", "helpers", "manager", "common", "misc", "base", "core"}
HEAVY = ("torch", "transformers", "duckdb", "pandas", "pyarrow")


def test_no_file_has_a_name_that_says_nothing() -> None:
    assert [path.name for path in SOURCE.rglob("*.py") if path.stem in VAGUE] == []


def test_files_stay_short_enough_to_be_one_concept() -> None:
    long = {
        str(path.relative_to(ROOT)): n
        for path in SOURCE.rglob("*.py")
        if (n := len(path.read_text().splitlines())) > 400
    }
    assert long == {}


def test_folders_go_two_deep_except_for_the_named_third_level() -> None:
    third = {path.relative_to(SOURCE).parent.as_posix() for path in SOURCE.rglob("*.py")}
    deep = {folder for folder in third if folder.count("/") >= 1}
    readers = {f"config/{name}" for name in ("verl", "trl", "openrlhf", "slime", "areal", "nemo_rl", "shell")}
    engines = {"plan/megatron", "plan/fsdp", "plan/trace"}
    rest = {
        "record/adapters",
        "record/gpu",
        "record/importers",
        "run/algorithms",
        "run/faults",
        "run/parallel",
        "show/page",
    }
    meanings = {f"diagnose/{name}" for name in ("alarms", "checks", "diff", "measures", "orders", "reports")}
    assert deep <= readers | engines | rest | meanings


def test_importing_the_package_or_its_front_door_loads_nothing_heavy() -> None:
    code = f"import sys, flowledger, flowledger.cli; print([m for m in {HEAVY!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_the_command_line_starts_within_half_a_second() -> None:
    """Of processor time: what a user waits for on a machine that does nothing else. Where the standard library alone takes longer than
    it should, the processor is a slow one at the moment, and everything may take as much longer."""
    for _ in range(5):
        library, ours = _cost("-c", f"import {LIBRARY}"), _cost("-m", "flowledger.cli", "--help")
        if ours < 0.5 * max(1.0, library / LIBRARY_S):
            return  # once is enough: what else runs makes it slower and never faster
    raise AssertionError(f"it takes {ours:.2f} s, and {LIBRARY} {library:.3f} s")


LIBRARY, LIBRARY_S = "json, typing, inspect, dataclasses", 0.05


def _cost(*words: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
