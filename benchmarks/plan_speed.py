"""How long a plan takes: a 1,024-GPU Megatron MoE launch, every rank class, all ledgers and checks.

`plan_s` is the plan alone, after imports and after the launch was read once; `cli_s` the command from start to finish
with the bytecode that an installation makes; `read_s` the reading of the launch. The best of several runs each.
`--json` prints {"plan_s", "cli_s", "ranks", …}.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "examples" / "verl_qwen3_235b_megatron.sh"
PLAN_S, CLI_S = 0.3, 1.0


def best(function: Callable[[], object], times: int) -> float:
    """Seconds of the fastest of several calls."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    return min(found)


def measure(script: Path, times: int) -> dict[str, float]:
    from flowledger.config.detect import Asked, read
    from flowledger.plan.ask import Question, answer, make

    question = Question(gpu="h100-80g", tables=True)

    def reread(more: object) -> object:
        raise AssertionError("nothing is set")

    reading = read(str(script), Asked())
    command = [sys.executable, "-m", "flowledger.cli", "plan", str(script), "--gpu", "h100-80g"]
    with tempfile.TemporaryDirectory() as compiled:
        # bytecode is written as an installation does, whatever this environment says
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = compiled
        run = partial(subprocess.run, command, check=True, capture_output=True, env=environment)
        run()
        cli = best(run, times)
    return {
        "plan_s": best(lambda: answer(make(reading, question), question, reread), times),  # type: ignore[arg-type]
        "cli_s": cli,
        "read_s": best(lambda: read(str(script), Asked()), times),
        "ranks": reading.config.hardware.world,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--script", type=Path, default=SCRIPT)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = measure(given.script, given.times)
    if given.json:
        print(json.dumps(found))
        return
    print(f"{found['ranks']:.0f} ranks: plan {found['plan_s']:.3f} s (target {PLAN_S}), "
          f"command {found['cli_s']:.3f} s (target {CLI_S}), reading {found['read_s']:.3f} s")  # fmt: skip


if __name__ == "__main__":
    main()
