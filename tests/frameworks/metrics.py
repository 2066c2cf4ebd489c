"""What a framework printed of its own metrics, one mapping a step."""

import ast
import re
from collections.abc import Iterator

VERL_STEP = re.compile(r"step:\d+ - .*")
MEASURED = ("timing", "perf/", "agent_loop/", "actor/perf/")
VERL_METRIC = re.compile(r"([^\s:]+):(?:np\.\w+\()?(nan|[-+]?inf|[-+.\de]+)")


def of_verl(printed: str) -> list[dict[str, float]]:
    """`step:1 - actor/loss:0.5 - …`, with whatever Ray puts before it."""
    lines = VERL_STEP.findall(printed)
    return [{name: float(value) for name, value in VERL_METRIC.findall(line)} for line in lines]


def timeless_verl(printed: str) -> list[dict[str, float]]:
    """The same less what measures time and memory: what two runs on the same rollouts have in common."""
    return [{name: value for name, value in step.items() if not name.startswith(MEASURED)} for step in of_verl(printed)]


def of_trl(printed: str) -> list[dict[str, float]]:
    """`{'loss': '0.5', …}`, as the Trainer of transformers prints it; the summary of the run is left out."""
    rows = [{name: float(value) for name, value in row.items()} for row in _rows(printed)]
    return [row for row in rows if "loss" in row]


def timeless(printed: str) -> list[dict[str, float]]:
    """The same of TRL less the time that a step took: what two equal runs have in common."""
    return [{name: value for name, value in step.items() if name != "step_time"} for step in of_trl(printed)]


def _rows(printed: str) -> Iterator[dict[str, str]]:
    for line in printed.splitlines():
        if line.startswith("{'"):
            yield ast.literal_eval(line)
