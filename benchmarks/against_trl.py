"""Faster than TRL? The same model, prompts, group size, lengths and micro-batch in TRL's GRPOTrainer and in this loop.

    python benchmarks/against_trl.py [--quick] [--kl 0.04] [--threads N] [--steps N]

Steps alternate: TRL, here, here recorded, TRL … Samples per second here ÷ TRL's must reach 2.0 for a tiny model and 1.2
for one of 30 M parameters: exit code 1 below. The last line is JSON. --quick: the tiny model only.
"""

import argparse
import gc
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import trl_sides
from trl_sides import Case, Taken

CASES = (
    Case(
        name="tiny", hidden_size=64, layers=2, heads=4, kv_heads=2, ffn_size=128, prompts=4, group_size=8,
        prompt_tokens=(16, 32), response_tokens=32, micro_batch=8, steps=9, bar=2.0,
    ),
    Case(
        name="30m", hidden_size=512, layers=8, heads=8, kv_heads=4, ffn_size=1920, prompts=2, group_size=8,
        prompt_tokens=(32, 64), response_tokens=64, micro_batch=8, steps=3, bar=1.2,
    ),
)  # fmt: skip
WARM_UP = 1  # steps of each side that are not counted: the first makes the optimizer's state
SIDES = ("trl", "ours", "recorded")
MISSING = 'TRL is not installed; run: pip install "trl==1.16.*" (beside flowledger[run])'


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table per model and, last, the key figures. 1 when a ratio is below its bar, 2 without TRL."""
    asked = _asked(arguments)
    if importlib.util.find_spec("trl") is None:
        print(MISSING, file=sys.stderr)
        return 2
    cases = [replace(case, steps=asked.steps or case.steps) for case in CASES if case.name in asked.cases]
    if asked.peak:
        print(json.dumps(peak(cases[0], asked.peak, asked)))
        return 0
    found = {case.name: figures(case, asked) for case in cases}
    print(json.dumps(summary(found, asked)))
    return int(any(found[case.name]["ratio"] < case.bar for case in cases))


def figures(case: Case, asked: argparse.Namespace) -> dict[str, Any]:
    """Ratios, times by part and peaks of one case, printed as they come."""
    taken = alternate(case, asked)
    medians = {side: middle(steps) for side, steps in taken.items()}
    peaks = {side: _peak_of_child(case, side, asked) for side in ("trl", "ours")}
    made = {
        "ratio": medians["trl"].wall["step"] / medians["ours"].wall["step"],
        "ratio_cpu": medians["trl"].cpu["step"] / medians["ours"].cpu["step"],
        "ratio_recorded": medians["trl"].wall["step"] / medians["recorded"].wall["step"],
        "peak_ratio": peaks["ours"] / peaks["trl"],
        "peak_bytes": peaks,
        "samples_per_s": {side: case.samples / step.wall["step"] for side, step in medians.items()},
        "split": {side: dict(step.wall) for side, step in medians.items()},
        "split_cpu": {side: dict(step.cpu) for side, step in medians.items()},
    }
    _print(case, made)
    return made


def alternate(case: Case, asked: argparse.Namespace) -> dict[str, list[Taken]]:
    """What each counted step took, by side."""
    import torch

    taken: dict[str, list[Taken]] = {side: [] for side in SIDES}
    with _prepared(case, asked) as folder, trl_sides.ours(folder / "run.yaml") as (world, step):
        made = trl_sides.trainer(case, folder, kl_coef=asked.kl)
        with recorder_of(world, folder / "book") as recording:
            torch.set_num_threads(asked.threads)

            def each(theirs: Taken) -> bool:
                taken["trl"].append(theirs)
                gc.collect()
                taken["ours"].append(step())
                with recording():
                    taken["recorded"].append(step())
                gc.collect()
                return len(taken["trl"]) < case.steps + WARM_UP

            trl_sides.train(made, each)
    return {side: steps[WARM_UP:] for side, steps in taken.items()}


@contextmanager
def recorder_of(world: Any, folder: Path) -> Iterator[Callable[[], Any]]:
    """What attaches a recorder of level `tensors` to the loop, as `flowledger run` does; one book for all its steps."""
    from flowledger.ledger.writer import Writer
    from flowledger.record.adapters.loop import PROBES
    from flowledger.record.attach import attach
    from flowledger.record.recorder import Recorder

    folder.mkdir()
    ink = Writer(folder)
    recorder = Recorder(ink, level="tensors", bindings=world.bindings, ops_every=0)
    yield lambda: attach(PROBES, recorder)
    ink.close()
    if ink.failure:
        raise RuntimeError(f"the recorder failed: {ink.failure}")


def middle(steps: Sequence[Taken]) -> Taken:
    """The median of each part and of the whole."""
    wall = {part: median(step.wall[part] for step in steps) for part in steps[0].wall}
    cpu = {part: median(step.cpu[part] for step in steps) for part in steps[0].cpu}
    return Taken(wall=wall, cpu=cpu)


def summary(found: dict[str, dict[str, Any]], asked: argparse.Namespace) -> dict[str, Any]:
    """The key figures: a ratio per case, the worst ratio of peaks, and all else by case."""
    return {
        **{f"ratio_{name}": round(made["ratio"], 3) for name, made in found.items()},
        **{f"ratio_{name}_cpu": round(made["ratio_cpu"], 3) for name, made in found.items()},
        **{f"ratio_{name}_recorded": round(made["ratio_recorded"], 3) for name, made in found.items()},
        "peak_ratio": round(max(made["peak_ratio"] for made in found.values()), 3),
        "peak_bytes": {name: made["peak_bytes"] for name, made in found.items()},
        "split": {name: made["split"] for name, made in found.items()},
        "split_cpu": {name: made["split_cpu"] for name, made in found.items()},
        "threads": asked.threads,
        "kl": asked.kl,
    }


# ---------------------------------------------------------------------------------------------------------------- peak


def peak(case: Case, side: str, asked: argparse.Namespace) -> int:
    """Highest bytes of tensors in the second step: what lives before it, and torch's profiler from then on."""
    import torch

    with _prepared(case, asked) as folder:
        torch.set_num_threads(asked.threads)
        if side == "ours":
            with trl_sides.ours(folder / "run.yaml") as (_, step):
                step()
                return _watched_peak(step)
        return _peak_of_trainer(trl_sides.trainer(case, folder, kl_coef=asked.kl))


def _watched_peak(step: Callable[[], Any]) -> int:
    with ExitStack() as stack:
        live, profiler = _watch(stack)
        step()
    return live + _highest(profiler)


def _peak_of_trainer(made: Any) -> int:
    watching: list[tuple[int, Any]] = []
    with ExitStack() as stack:

        def each(_: Taken) -> bool:
            if watching:
                stack.close()
                return False
            watching.append(_watch(stack))
            return True

        trl_sides.train(made, each)
    live, profiler = watching[0]
    return live + _highest(profiler)


def _watch(stack: ExitStack) -> tuple[int, Any]:
    """(bytes of tensors that live now, a profiler that has begun)."""
    import torch

    living = living_bytes()
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    return living, stack.enter_context(profiler)


def living_bytes() -> int:
    """Of all tensors of this process."""
    import torch

    gc.collect()
    plain = (torch.Tensor, torch.nn.Parameter)  # what stands for a tensor without memory (a FakeTensor) is none of them
    tensors = [thing for thing in gc.get_objects() if type(thing) in plain]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _highest(profiler: Any) -> int:
    """The highest sum of bytes taken and given back since the profiler began."""
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        highest = max(highest, total)
    return highest


def _peak_of_child(case: Case, side: str, asked: argparse.Namespace) -> int:
    command = [sys.executable, __file__, "--peak", side, "--cases", case.name, "--kl", str(asked.kl)]
    done = subprocess.run([*command, "--threads", str(asked.threads)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{side} in a process of its own failed:\n{done.stderr}")
    return int(done.stdout.splitlines()[-1])


# -------------------------------------------------------------------------------------------------------------- around


@contextmanager
def _prepared(case: Case, asked: argparse.Namespace) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        trl_sides.write_inputs(case, Path(name), kl_coef=asked.kl)
        yield Path(name)


def _print(case: Case, made: dict[str, Any]) -> None:
    low, high = case.prompt_tokens
    print(
        f"{case.name}: {case.prompts} prompts of {low} to {high} tokens x {case.group_size} responses of "
        f"{case.response_tokens}, micro-batches of {case.micro_batch}, fp32; {case.steps} steps of each, medians in ms"
    )
    for clock, split in (("wall", made["split"]), ("CPU", made["split_cpu"])):
        print("  " + "".join(f"{name:>12}" for name in (f"({clock})", *split["trl"])))
        for side in SIDES:
            print(f"  {side:>12}" + "".join(f"{seconds * 1e3:12.1f}" for seconds in split[side].values()))
    held = ", ".join(f"{side} {size / 1e6:.1f} MB" for side, size in made["peak_bytes"].items())
    print(f"  memory peak: {held}")
    print(
        f"  {made['ratio']:.2f} times TRL's samples per second (bar {case.bar}), recorded {made['ratio_recorded']:.2f}; "
        f"by CPU time {made['ratio_cpu']:.2f}",
        flush=True,
    )


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the tiny model only")
    parser.add_argument(
        "--kl", type=float, default=0.0, help="KL coefficient; above 0 both sides keep a reference model"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch threads, on both sides")
    parser.add_argument("--steps", type=int, help="counted steps of each side")
    parser.add_argument("--cases", type=lambda text: text.split(","), help="names, with commas")
    parser.add_argument("--peak", choices=("trl", "ours"), help="only the memory peak of one side, in this process")
    asked = parser.parse_args(arguments)
    asked.cases = asked.cases or [case.name for case in CASES][: 1 if asked.quick else None]
    return asked


if __name__ == "__main__":
    sys.exit(main())
