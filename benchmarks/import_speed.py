"""How fast foreign files become a ledger, and how much memory that takes.

    python benchmarks/import_speed.py [--mb 200] [--only verl_file …] [--quick] [--json]

Each format is written in the form that its framework gives it, at the size asked for, and imported by a process of its
own: MB of input a second of CPU time, its writing thread included, so that a busy machine neither hides nor adds
cost; the same of wall time; and the peak of the process's resident memory, which must stay under 1 GiB for any input.
Beside it, in the same run, a *peer*: the shortest loop that takes the same numbers out of the same file and keeps
nothing (`json.loads`, a regular expression, `csv`), by its CPU time.

*Dense* inputs hold nothing but numbers; a log has noise around them, as real ones have. `one_line` is a log without an
end of line: nothing can be read of it, and its size must not matter.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from import_profiles import PROFILES

LIMIT_MB = 1024
QUICK_MB = 20
TARGETS = {"verl_file": 60.0, "verl_console": 30.0}
NAMES = [f"{group}/{name}" for group in ("actor", "critic", "timing_s", "perf", "rollout_corr") for name in (
    "pg_loss", "entropy", "grad_norm", "score/mean", "score/max", "advantages/mean", "returns/min", "step", "gen", "update_actor",
    "max_memory_allocated_gb", "kl", "ppl_ratio", "chi2_token", "total_num_tokens", "throughput", "lr", "ppo_kl", "pg_clipfrac", "values/mean",
)]  # fmt: skip
NOISE = (
    "\x1b[36m(WorkerDict pid=14456)\x1b[0m INFO:2026-11-29 16:15:22,315:update_weights done, time cost: 0.02s",
    "\x1b[36m(vLLMHttpServer pid=14562)\x1b[0m [transformers] `Qwen2VLImageProcessor` requires torchvision (not installed)",
    "\x1b[36m(TaskRunner pid=14377)\x1b[0m Training Progress:  50%|█████     | 1/2 [00:13<00:13, 13.22s/it]",
    "\x1b[36m(RewardLoopWorker pid=14532)\x1b[0m /venv/lib/python3.11/site-packages/verl/x.py:41: UserWarning: engine is not available",
    "\x1b[36m(WorkerDict pid=14456)\x1b[0m After offload model to cpu, memory allocated (GB): 0.50, memory reserved (GB): 1.25, "
    "device memory used/total (GB): 8.00/24.00",
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One format: MB a second of CPU time of the import and of its peer, and the peak of the importing process."""

    format: str
    mb: float
    mb_per_s: float
    mb_per_wall_s: float
    peer_mb_per_s: float
    peak_mb: float
    rows: int


def _numbers(draw: random.Random) -> dict[str, float]:
    return {name: draw.random() * 10 ** draw.randint(-4, 2) for name in NAMES}


def verl_file(draw: random.Random) -> Iterator[str]:
    step = 0
    while True:
        step += 1
        yield json.dumps({"step": step, "data": _numbers(draw)}) + "\n"


def verl_console_dense(draw: random.Random) -> Iterator[str]:
    step = 0
    while True:
        step += 1
        told = " - ".join(f"{name}:{value!r}" for name, value in _numbers(draw).items())
        yield f"\x1b[36m(TaskRunner pid=14377)\x1b[0m step:{step} - {told}\n"


def verl_console(draw: random.Random) -> Iterator[str]:
    """Around each step's line 120 lines of noise, half of a kind that is looked into."""
    dense = verl_console_dense(draw)
    while True:
        yield "".join(f"{draw.choice(NOISE)}\n" for _ in range(120))
        yield next(dense)


def verl_samples(draw: random.Random) -> Iterator[str]:
    step = 0
    while True:
        step += 1
        for at in range(256):
            text = " ".join(draw.choice(("the", "answer", "is", "therefore", "we", "see")) for _ in range(400))
            yield (
                json.dumps(
                    {
                        "input": f"question {step}-{at // 8}",
                        "output": text,
                        "gts": "42",
                        "score": float(at % 2),
                        "step": step,
                        "acc": 1.0,
                    }
                )
                + "\n"
            )


def trainer_state(draw: random.Random) -> Iterator[str]:
    yield '{"best_metric": null, "global_step": 1, "log_history": [\n'
    step = 0
    while True:
        step += 1
        entry = {f"completions/{name}": value for name, value in _numbers(draw).items()}
        yield ("" if step == 1 else ",\n") + json.dumps(
            {"epoch": step / 100, "loss": 0.1, "step": step, **entry}, indent=2
        )


def csv_export(draw: random.Random) -> Iterator[str]:
    yield ",".join(["_step", *NAMES]) + "\n"
    step = 0
    while True:
        step += 1
        yield f"{step}," + ",".join(repr(value) for value in _numbers(draw).values()) + "\n"


def one_line(draw: random.Random) -> Iterator[str]:
    while True:
        yield "step:1 - a:1 " * 4096


def peer_json(path: Path) -> int:
    found = 0
    with path.open() as file:
        for line in file:
            try:
                found += len(json.loads(line).get("data", ()))
            except ValueError:
                continue
    return found


def peer_document(path: Path) -> int:
    return sum(len(entry) for entry in json.loads(path.read_text())["log_history"])


def peer_console(path: Path) -> int:
    import re

    field, found = re.compile(r" - ([^\s]+):(\S+)"), 0
    with path.open(errors="replace") as file:
        for line in file:
            if "step:" in line:
                found += sum(1 for _, value in field.findall(line) if float(value) is not None)
    return found


def peer_csv(path: Path) -> int:
    import csv

    with path.open() as file:
        return sum(sum(1 for value in row.values() if float(value) is not None) for row in csv.DictReader(file))


def peer_lines(path: Path) -> int:
    with path.open() as file:
        return sum(1 for _ in file)


FORMATS: dict[str, tuple[Callable[[random.Random], Iterator[str | bytes]], str, Callable[[Path], int]]] = {
    "verl_file": (verl_file, "metrics.jsonl", peer_json),
    "verl_console": (verl_console, "console.log", peer_console),
    "verl_console_dense": (verl_console_dense, "dense.log", peer_console),
    "verl_samples": (verl_samples, "rollout.jsonl", peer_json),
    "trainer_state": (trainer_state, "trainer_state.json", peer_document),
    "csv": (csv_export, "export.csv", peer_csv),
    "one_line": (one_line, "one_line.log", peer_lines),
    **{name: (made, file, peer) for name, (made, file, peer, _) in PROFILES.items()},
}
ENDS = {"trainer_state": b"\n]}"} | {name: end for name, (_, _, _, end) in PROFILES.items()}


def write(path: Path, mb: float, pieces: Iterator[str | bytes], end: bytes = b"") -> None:
    """The pieces, until the file has its size."""
    written = 0
    with path.open("wb") as file:
        for piece in pieces:
            written += file.write(piece.encode() if isinstance(piece, str) else piece)
            if written >= mb * 1e6:
                break
        file.write(end)


CHILD = """
import json, sys, time
from pathlib import Path
import flowledger.record.importers.imported
from flowledger.cli.imports import imported
from flowledger.flow.errors import BadInput
began, cpu = time.perf_counter(), time.process_time()
try:
    rows = sum(imported([Path(sys.argv[1])], Path(sys.argv[2])).rows.values())
except BadInput:
    rows = 0
status = Path("/proc/self/status").read_text()  # a child's ru_maxrss begins with its parent's
peak = int(status.partition("VmHWM:")[2].split()[0]) / 1024
print(json.dumps([time.process_time() - cpu, time.perf_counter() - began, peak, rows]))
"""


def measure(name: str, mb: float, folder: Path) -> Measured:
    """Write, import and read by the peer."""
    pieces, file, peer = FORMATS[name]
    path = folder / file
    write(path, mb, pieces(random.Random(7)), ENDS.get(name, b""))
    size = path.stat().st_size / 1e6
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(folder / f"{name}-run")],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, wall_s, peak, rows = json.loads(done.stdout)
    began = time.process_time()
    peer(path)
    peer_s = time.process_time() - began
    speeds = (round(size / one, 1) for one in (seconds, wall_s, peer_s))
    return Measured(name, round(size, 1), *speeds, round(peak, 1), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mb", type=float, default=200)
    parser.add_argument("--only", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    results = []
    for name in asked.only:
        with tempfile.TemporaryDirectory() as folder:
            got = measure(name, QUICK_MB if asked.quick else asked.mb, Path(folder))
        results.append(got)
        print(
            f"{name:<20} {got.mb:>6.0f} MB  {got.mb_per_s:>6.1f} MB/s (wall {got.mb_per_wall_s:>5.1f})  peer {got.peer_mb_per_s:>6.1f} MB/s  "
            f"peak {got.peak_mb:>5.0f} MB  {got.rows:>9,} rows",
            file=sys.stderr if asked.json else sys.stdout, flush=True,
        )  # fmt: skip
    held = max(got.peak_mb for got in results) < LIMIT_MB
    slow = [got.format for got in results if got.mb_per_s < TARGETS.get(got.format, 0)]
    if asked.json:
        print(json.dumps({"formats": [asdict(got) for got in results], "memory_held": held, "below_target": slow}))
    if not held:
        sys.exit("a process took more than 1 GiB")


if __name__ == "__main__":
    main()
