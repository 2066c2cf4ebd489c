"""What recording from outside costs the real verl and TRL: the recorder's own CPU time, and steps with it and without.

    python benchmarks/attach.py [--frameworks trl,verl] [--rounds 2] [--steps 10]

Launches alternate: unrecorded, level `steps`, level `tensors`, again from the start. The recorder's CPU time (all processes
of the job, the writers' threads included) over the time of a step must stay under 0.2 % at `steps` and 1 % at `tensors`:
exit code 1 above. Each launch's first step is left out: engines warm up in it. The environments are those of
`make test-frameworks`. The last line is JSON.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "frameworks"))

import launch
import metrics
import tiny

from flowledger.ledger.reader import Ledger

TARGETS = {"steps": 0.002, "tensors": 0.01}
WIDTH, LAYERS = 512, 6  # of the model: a step is to take a second or more
STEP_TIME = {"trl": "step_time", "verl": "timing_s/step"}
OWN = "SELECT sum(spent) AS spent FROM (SELECT max(value) - min(value) AS spent FROM metrics WHERE name = ? GROUP BY process)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table and, last, the key figures. 1 when a share is above its target."""
    asked = _asked(arguments)
    found = {name: figures(name, asked) for name in asked.frameworks}
    print(json.dumps(found))
    return int(any(made[f"share_{level}"] > most for made in found.values() for level, most in TARGETS.items()))


def figures(framework: str, asked: argparse.Namespace) -> dict[str, float]:
    """Seconds of a step by level, and of the recorder the share and the bytes a step."""
    taken: dict[str, list[dict[str, float]]] = {level: [] for level in ("off", *TARGETS)}
    with tempfile.TemporaryDirectory() as folder:
        tiny.write(Path(folder), width=WIDTH, layers=LAYERS)
        for number in range(asked.rounds):
            for level, several in taken.items():
                several.append(one(framework, level, Path(folder), asked.steps, number))
    middle = {
        level: {key: median(each[key] for each in all_of_it) for key in all_of_it[0]}
        for level, all_of_it in taken.items()
    }
    made = {f"step_s_{level}": each["step_s"] for level, each in middle.items()}
    for level in TARGETS:
        made |= {
            f"share_{level}": middle[level]["own_s"] / middle[level]["step_s"],
            f"wall_{level}": middle[level]["step_s"] / middle["off"]["step_s"],
            f"bytes_per_step_{level}": middle[level]["bytes"],
        }
    _print(framework, made, asked)
    return {name: round(value, 5) for name, value in made.items()}


def one(framework: str, level: str, folder: Path, steps: int, number: int) -> dict[str, float]:
    """One launch: the median time of a step, and what the recorder took and wrote for one."""
    job, where = _launch(framework, folder, steps), folder / f"{framework}-{level}-{number}"
    environment = {"TRAIN_STEPS": str(steps)}
    if level != "off":
        environment |= {"FLOWLEDGER_RUN": str(where), "FLOWLEDGER_LEVEL": level}
    printed = launch.run(job, folder / f"{where.name}.txt", **environment)
    told = metrics.of_trl(printed) if framework == "trl" else metrics.of_verl(printed)
    found = {"step_s": median(step[STEP_TIME[framework]] for step in told[1:])}
    if level != "off":
        with Ledger(where) as ledger:
            found |= {key: _spent(ledger, name) / (steps - 1) for key, name in (("own_s", "cpu_s"), ("bytes", "bytes"))}
    return found


def _spent(ledger: Ledger, what: str) -> float:
    """What all processes counted of it after their first step."""
    (row,) = ledger.rows(OWN, [f"recorder/{what}"])
    return float(row["spent"])


def _launch(framework: str, folder: Path, steps: int) -> launch.Launch:
    if framework == "trl":
        return launch.trl(folder)
    return launch.verl_v0(folder, settings=(f"trainer.total_training_steps={steps}", "trainer.total_epochs=100"))


def _print(framework: str, made: Mapping[str, float], asked: argparse.Namespace) -> None:
    print(f"{framework}: {asked.rounds} launches of each level, {asked.steps - 1} steps counted of each, medians")
    print(f"  a step without a recorder takes {made['step_s_off']:.2f} s")
    for level, most in TARGETS.items():
        print(
            f"  {level:>8}: the recorder's CPU time is {made[f'share_{level}']:.3%} of a step (at most {most:.1%}), "
            f"steps take {made[f'wall_{level}']:.3f} times as long, {made[f'bytes_per_step_{level}'] / 1e3:.0f} kB a step",
            flush=True,
        )


def _asked(arguments: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names: Any = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--frameworks", type=names, default=["trl", "verl"], help="names, with commas")
    parser.add_argument("--rounds", type=int, default=2, help="launches of each level")
    parser.add_argument("--steps", type=int, default=10, help="steps of a launch, the first of which is not counted")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
