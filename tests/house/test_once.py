"""What is said in one place of the house alone: the environment's words, and functions that would else have a twin."""

import ast
from collections import defaultdict
from pathlib import Path

from flowledger.run.parallel import environment

SOURCE = Path(__file__).parents[2] / "src" / "flowledger"
FILES = sorted(path for room in ("run", "cli") for path in (SOURCE / room).rglob("*.py"))
WORDS = {environment.WORLD, *environment.NEEDED, *(name for name, _ in environment.LOCAL)}  # of torchrun
LEAST = 40  # of a body that is told as code: what is shorter may be alike by chance


def words(source: str) -> set[str]:
    """The words of torchrun's environment that stand as strings of their own in a file."""
    return WORDS & {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}


def bodies(source: str) -> list[tuple[str, str]]:
    """(name, body with its docstring) of each function; what a method is told without a docstring may be alike by its interface."""
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    return [(one.name, ast.unparse(ast.Module(one.body, [])).strip()) for one in functions if ast.get_docstring(one)]


def test_torchruns_environment_is_read_in_one_file() -> None:
    found = {path.relative_to(SOURCE).as_posix() for path in FILES if words(path.read_text(encoding="utf-8"))}
    assert found == {"run/parallel/environment.py"}


def test_no_function_of_run_and_cli_has_a_twin() -> None:
    twins = defaultdict(list)
    for path in FILES:
        for name, body in bodies(path.read_text(encoding="utf-8")):
            if len(body) >= LEAST:
                twins[body].append(f"{path.relative_to(SOURCE)}: {name}")
    assert [places for places in twins.values() if len(places) > 1] == []


def test_a_word_and_a_twin_are_found() -> None:
    assert words("import os\nhere = os.environ.get('LOCAL_RANK')  # RANK") == {"LOCAL_RANK"}
    one = 'def a(x):\n    """What it promises, in so many words."""\n    return x  # here\n'
    assert bodies(one)[0][1] == bodies(one.replace("def a", "def b").replace("  # here", ""))[0][1]
