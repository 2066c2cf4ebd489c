"""Every tensor that the loop makes says where it lives, or stands below with the reason why it is on the CPU."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "src" / "flowledger" / "run"
FACTORIES = {
    "arange", "as_tensor", "empty", "empty_strided", "eye", "from_numpy", "full", "Generator", "linspace", "logspace",
    "normal", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices",
    "zeros",
}  # fmt: skip

PYTHON = "only Python reads it"
ROWS = "picks rows: an index may be on the CPU whatever it indexes"
TRAVELS = "numbers of Python, which travel by gloo and are read by Python again"
MOVED = "made of lengths that Python knows; moved where it is used"
SAME = "drawn on the CPU: the same numbers on every device"
PROMPTS = "prompts are made on the CPU; the stage moves them"
REWARDS = "rewards are made on the CPU; what a step is given of them is moved at the end"

# file: function: why what it makes is on the CPU
ON_THE_CPU = {
    "algorithms/covariance_losses.py": {"clip_cov": SAME},
    "dropped.py": {"codes": PYTHON},
    "figures.py": {"": TRAVELS, "figures": TRAVELS},
    "measures.py": {"_flat_groups": PYTHON, "_kept": ROWS},
    "parallel/ring.py": {"_positions": MOVED},
    "parallel/rows.py": {"exchanged": ROWS, "held_rows": ROWS},
    "parallel/schedules.py": {"_run": PYTHON},
    "parallel/slices.py": {"places": MOVED},
    "prompts.py": {"tokenise": PROMPTS},
    "recut.py": {"recut": TRAVELS},
    "respond.py": {"respond": ROWS, "_equally_wide": TRAVELS},
    "responses.py": {"collect": PYTHON},
    "rewards.py": {"_beyond_bounds": REWARDS, "_fuse": REWARDS, "_placed": REWARDS},
    "segments.py": {"places": MOVED, "real": MOVED},
    "stages.py": {"filter": TRAVELS, "prompt": PYTHON},
    "sums.py": {"metrics": TRAVELS},
    "update.py": {"mini_batch_totals": TRAVELS, "rows_of": ROWS},
    "world.py": {"_build": SAME},
}


def homeless(source: str) -> Iterator[tuple[str, int]]:
    """(function, line) of each factory of torch that is called without a device."""

    def within(node: ast.AST, function: str) -> Iterator[tuple[str, int]]:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.Call) and _makes(node.func) and "device" not in {key.arg for key in node.keywords}:
            yield function, node.lineno
        for child in ast.iter_child_nodes(node):
            yield from within(child, function)

    return within(ast.parse(source), "")


def _makes(called: ast.expr) -> bool:
    if not isinstance(called, ast.Attribute) or not isinstance(called.value, ast.Name):
        return False
    return called.value.id == "torch" and called.attr in FACTORIES


FILES = sorted(str(path.relative_to(RUN)) for path in RUN.rglob("*.py"))


@pytest.mark.parametrize("file", FILES)
def test_every_tensor_says_where_it_lives(file: str) -> None:
    found = list(homeless((RUN / file).read_text(encoding="utf-8")))
    known = ON_THE_CPU.get(file, {})
    assert [f"{file}:{line} ({function})" for function, line in found if function not in known] == []
    assert set(known) <= {function for function, _ in found}, (
        "what is listed here and makes nothing on the CPU any more"
    )


def test_the_list_names_files_that_are_there() -> None:
    assert set(ON_THE_CPU) <= set(FILES)


def test_a_factory_without_a_device_is_found() -> None:
    source = """
def made(x):
    def inner():
        return torch.zeros(3), torch.ones(3, device=x.device), x.new_zeros(3)
    return inner, [torch.arange(4) for _ in x]
"""
    assert list(homeless(source)) == [("inner", 4), ("made", 5)]
