"""Does the loop learn? A tiny model from random weights, with each advantage estimator and seed, on examples/learns.yaml.

    python benchmarks/learns.py [--estimators grpo,rloo,reinforce_plus_plus,gae] [--seeds 0,1,2] [--set key=value …] [--json] [--quick]

Chance is measured on the start model (learning rate 0; with --quick in step 0, which samples from it). The task depends on its prompt: a policy that does not read it
gets 1/3 at most. Exit code 1 when a seed misses the bar.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STARTED = time.monotonic()  # before torch is imported: that is part of what --quick may take
CONFIG = Path(__file__).resolve().parent.parent / "examples" / "learns.yaml"
ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus", "gae")
WINDOW = 5  # steps that a mean is taken over
BAR, LIMIT_S = 0.9, 180.0
QUICK_BAR, QUICK_LIMIT_S = 0.5, 36.0  # one seed, ended at the bar; still out of reach without reading the prompt
CHANCE_STEPS = 10
NEEDS = {  # estimator -> what it needs beside examples/learns.yaml; whitening magnifies the last failures of a step
    "gae": ("critic.path=start", "critic.lr=0.005", "optim.lr=0.003"),
    "reinforce_plus_plus": ("optim.lr=0.003",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """One seed of one estimator."""

    seed: int
    chance: float  # mean reward of the start model
    final: float  # mean reward of the last steps
    reached: int | None  # the step at which the mean of the last steps was first above the bar
    steps: int
    seconds: float  # wall time of building and training
    cpu_s: float  # what this process computed meanwhile

    def missed(self, bar: float, limit_s: float) -> bool:
        return self.reached is None or self.final <= bar or self.seconds > limit_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print a line for each seed and, last, the key figures. 0 when every seed kept the bar and the time."""
    asked = _asked(arguments)
    bar, limit_s = (QUICK_BAR, QUICK_LIMIT_S) if asked.quick else (BAR, LIMIT_S)
    print(f"bar {bar} within {limit_s:.0f} s; blind to its prompt a policy gets at most {1 / 3:.2f}")
    found: dict[str, list[Learnt]] = {}
    for name in asked.estimators or ESTIMATORS[: 1 if asked.quick else None]:
        for seed in asked.seeds[:1] if asked.quick else asked.seeds:
            overrides = [f"algorithm.advantage={name}", *NEEDS.get(name, ()), f"seed={seed}", *asked.set]
            made = learn(overrides, bar=bar, quick=asked.quick)
            found.setdefault(name, []).append(made)
            print(_line(name, made, bar), flush=True)
    if asked.json:
        print(json.dumps({"estimators": {name: summary(made) for name, made in found.items()}}))
    return int(any(made.missed(bar, limit_s) for several in found.values() for made in several))


def learn(overrides: Sequence[str], *, bar: float = BAR, quick: bool = False) -> Learnt:
    """Train once. `quick`: no longer than until the bar is reached, or until the time is up."""
    from flowledger.config.read import read
    from flowledger.run import loop

    chance = None if quick else _chance(overrides)
    config = read(CONFIG, overrides)
    began, worked = time.monotonic(), time.process_time()
    rewards: list[float] = []
    reached = None
    with loop.prepared(config) as world:
        for report in loop.train(world):
            rewards.append(report.metrics["reward/mean"])
            if reached is None and len(rewards) >= WINDOW and _recent(rewards) > bar:
                reached = report.step
            if quick and (reached is not None or time.monotonic() - STARTED > QUICK_LIMIT_S):
                break
    return Learnt(
        seed=config.seed, chance=rewards[0] if chance is None else chance, final=_recent(rewards), reached=reached, steps=len(rewards),
        seconds=time.monotonic() - began, cpu_s=time.process_time() - worked,
    )  # fmt: skip


def summary(several: Sequence[Learnt]) -> dict[str, Any]:
    """The key figures of an estimator, each from its worst seed; `reached` is null when one seed did not get there."""
    steps = [made.reached for made in several]
    return {
        "chance": round(max(made.chance for made in several), 4),
        "final": round(min(made.final for made in several), 4),
        "seconds": round(max(made.seconds for made in several), 2),
        "seeds": [made.seed for made in several],
        "reached": None if None in steps else max(step for step in steps if step is not None),
        "each": [asdict(made) for made in several],
    }


def _chance(overrides: Sequence[str]) -> float:
    """Mean reward of the start model: the same run with a learning rate of 0."""
    from flowledger.config.read import read
    from flowledger.run import loop

    with loop.prepared(read(CONFIG, [*overrides, "optim.lr=0", f"steps={CHANCE_STEPS}"])) as world:
        return sum(report.metrics["reward/mean"] for report in loop.train(world)) / CHANCE_STEPS


def _recent(rewards: Sequence[float]) -> float:
    last = rewards[-WINDOW:]
    return sum(last) / len(last)


def _line(name: str, made: Learnt, bar: float) -> str:
    reached = f"above {bar} at step {made.reached}" if made.reached is not None else f"never above {bar}"
    return (
        f"{name} seed {made.seed}: chance {made.chance:.3f}, {reached}, mean of the last {WINDOW} of {made.steps} steps "
        f"{made.final:.3f}, {made.seconds:.1f} s ({made.cpu_s:.1f} s CPU)"
    )


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--estimators", type=lambda text: text.split(","), help="names, with commas; with --quick only the first"
    )
    parser.add_argument("--seeds", type=lambda text: [int(n) for n in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="changes the configuration")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument(
        "--quick", action="store_true", help=f"one seed, bar {QUICK_BAR}, about {QUICK_LIMIT_S:.0f} s at most"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    from flowledger.flow.errors import BadInput

    try:
        sys.exit(main())
    except BadInput as error:
        print(error, file=sys.stderr)
        sys.exit(2)
