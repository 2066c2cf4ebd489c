"""Are our algorithms verl's? Every vector that verl computed, through our functions: values and gradients.

    python benchmarks/golden_verl.py [--cases DIR]

DIR (default: `tests/data`) holds `core_algos.npz` (arrays `<case>/in/<tensor>` and `<case>/<section>/<what>/<output>`) and
`golden.json` (groups, settings, single figures, what verl refuses), or both under the names `verl_golden.*`. Names of cases,
shapes, group sizes, dtypes and settings come from there. What cannot be read is a failure; what has no counterpart here,
and what the file of facts does not hold, is listed in `left_out` with its reason.

A vector's distance is max|Δ| / max|reference|, max|Δ| where the reference is all 0, over the places where verl's is finite:
where it is NaN or infinite ours may be a defined value. Last line: JSON {"compared", "worst_relative", "failed", "left_out"}.
Exit code 1 where a distance is above 1e-5.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from golden_facts import FACTS, READ_ELSEWHERE
from golden_sections import INPUTS, SECTIONS, Case
from torch import Tensor

SHIPPED = Path(__file__).resolve().parent.parent / "tests/data"
FILES = (("core_algos.npz", "golden.json"), ("verl_golden.npz", "verl_golden.json"))  # arrays and facts of a folder
BAR = 1e-5
NOT_FINITE = "verl's is NaN or infinite"
ROUNDED = "verl's stay in bfloat16; here log-probs are float32, whatever the dtype of the logits"
NO_FACT = "the file of facts does not hold it"
NO_MASK = "no function makes masks from token ids here: generation counts what it has sampled"
Made = Mapping[str, Any]


@dataclass(kw_only=True)
class Score:
    """How far every vector is from verl's, and what could not be compared."""

    distances: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)  # of failures that are not a distance
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> list[str]:
        return sorted({*self.reasons, *(name for name, far in self.distances.items() if not far <= BAR)})

    def figures(self) -> dict[str, Any]:
        return {
            "compared": len(self.distances),
            "worst_relative": max(self.distances.values(), default=0.0),
            "failed": self.failed,
            "left_out": self.left_out,
        }


def distance(ours: Tensor, verls: Tensor) -> float | None:
    """max|Δ| / max|reference| over what is finite in verl's; None where nothing is.

    Infinite where shapes differ, or where ours is not finite and verl's is.
    """
    if ours.shape != verls.shape:
        return math.inf
    finite = verls.isfinite()
    if not finite.any():
        return None if finite.numel() else 0.0
    there, ours = verls[finite].double(), ours.detach()[finite].double()
    scale = float(there.abs().max())
    far = float((ours - there).abs().max()) / (scale or 1.0)
    return far if math.isfinite(far) else math.inf


def compare(folder: Path) -> Score:
    """Every vector of this folder, which holds one pair of FILES."""
    stored, told = next(pair for pair in FILES if _has(folder, pair))
    arrays = {name: torch.from_numpy(array) for name, array in _arrays(folder / stored)}
    facts = json.loads((folder / told).read_text(encoding="utf-8"))
    score = Score(left_out={name: NO_FACT for name in FACTS if name not in facts})
    for stem, outputs in _by_stem(arrays).items():
        name = "/".join(filter(None, stem))
        if name == "tf":
            score.left_out["tf/get_response_mask"] = NO_MASK
            continue
        if outputs.pop("logprobs_bf16", None) is not None:
            score.left_out[f"{name}/logprobs_bf16"] = ROUNDED
        case = Case(name=stem[0], arrays=arrays, facts=facts)
        _take(score, lambda case=case, stem=stem: SECTIONS[stem[1]](case, stem[2:]), name, outputs)
    for name in facts:
        if name in FACTS:
            for check in FACTS[name](facts, arrays):
                if check.left_out:
                    score.left_out[check.name] = check.left_out
                else:
                    _take(score, check.call, check.name, check.verls or {})
        elif name not in READ_ELSEWHERE:
            score.reasons[name] = "the file of facts holds what this benchmark cannot read"
    return score


def _has(folder: Path, names: Sequence[str]) -> bool:
    return all((folder / name).is_file() for name in names)


def _arrays(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    with np.load(file) as stored:
        yield from ((name, stored[name]) for name in stored.files)


def _by_stem(arrays: Mapping[str, Tensor]) -> dict[tuple[str, ...], dict[str, Tensor]]:
    """(case, section, …) -> {output: verl's}: outputs of one call stand together."""
    stems: dict[tuple[str, ...], dict[str, Tensor]] = {}
    for name, array in arrays.items():
        parts = name.split("/")
        if parts[0] in SECTIONS or len(parts) == 1:  # a vector without a case
            parts = ["", *parts]
        if parts[1] != "in" and "/".join(parts[1:]) not in INPUTS:
            stems.setdefault(tuple(parts[:-1]), {})[parts[-1]] = array
    return stems


def _take(score: Score, call: Callable[[], Made], name: str, verls: Mapping[str, Any]) -> None:
    """Run it and hold every output against verl's; an output that goes wrong is a failure, with its reason."""
    made, wrong = _attempt(call)
    for output, reference in verls.items():
        key = f"{name}/{output}"
        far, different = (None, wrong) if wrong else _attempt(partial(_held, made, output, reference))
        if different:
            score.reasons[key] = different
        elif far is None:
            score.left_out[key] = NOT_FINITE
        else:
            score.distances[key] = far


def _held(made: Made, output: str, reference: Any) -> float | None:
    return distance(torch.as_tensor(made[output]), torch.as_tensor(reference))


def _attempt(call: Callable[[], Any]) -> tuple[Any, str]:
    """What it gives, and why it does not: a crash in one vector must not hide the others."""
    try:
        return call(), ""
    except Exception as error:  # noqa: BLE001
        return None, f"{type(error).__name__}: {error}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the worst vectors, the reasons of failures, and the figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    pairs = [" and ".join(pair) for pair in FILES]
    parser.add_argument("--cases", type=Path, default=SHIPPED, help=f"folder with {' or '.join(pairs)}")
    folder = parser.parse_args(arguments).cases
    if not any(_has(folder, pair) for pair in FILES):
        print(f"{folder} has neither {' nor '.join(pairs)}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    score = compare(folder)
    for name, far in sorted(score.distances.items(), key=lambda pair: -pair[1])[:10]:
        print(f"{far:9.2e}  {name}")
    for name, reason in score.reasons.items():
        print(f"   failed  {name}: {reason}")
    print(json.dumps(score.figures(), ensure_ascii=False))
    return 1 if score.failed else 0


if __name__ == "__main__":
    sys.exit(main())
