"""Two recordings of flowledger's own loop, watched operator by operator, and the plan of the same configuration."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import pytest

from flowledger import cli
from flowledger.config.detect import Asked, read
from flowledger.ledger.reader import Ledger
from flowledger.plan.ask import Question, make
from flowledger.plan.lengths import parse
from flowledger.plan.plan import Plan

EXAMPLES = Path(__file__).parents[2] / "examples"
PADDED = 7  # tokens of the longest prompt, `digits:`: what a step of the example pads to
COMMON = ("steps=2", "record.ops_every=1", f"data.max_prompt_tokens={PADDED}")
WATCHED = 1  # the step that is compared: the optimizer has its states by then

VARIANT = (
    "model.tiny.hidden_size=128", "model.tiny.layers=3", "model.tiny.heads=8", "model.tiny.ffn_size=384",
    "actor.activation_checkpointing=true", "actor.packed=false", "actor.mini_batch_prompts=4", "rollout.weights=shared",
    "actor.old_log_prob=true",
)  # fmt: skip


CHANGES = {"usual": (), "alone": ("actor.shared_prompts=false",), "variant": VARIANT}


@dataclass(frozen=True)
class Witnesses:
    """The same step twice: as it was recorded, and as it was planned."""

    ledger: Ledger
    plan: Plan


def planned(source: str, *overrides: str, **question: object) -> Plan:
    """The plan of an example."""
    if isinstance(spec := question.get("lengths"), str):
        question["lengths"] = parse(spec)
    return make(read(str(EXAMPLES / source), Asked(overrides=overrides)), Question(**question))  # type: ignore[arg-type]


def record(path: Path, *overrides: str, source: str = "tiny.yaml") -> Path:
    """A run of an example, in this process and without its report, which takes as long as the run."""
    command = ["flowledger", "run", str(EXAMPLES / source), *overrides, "-o", str(path), "-q"]
    with patch.object(sys, "argv", command), patch("flowledger.cli.page.write"):
        cli.main()
    return path


def with_observed_tokens(plan: Plan, ledger: Ledger) -> Plan:
    """The plan for the fullest micro-batch that was met: responses are rarely all as long as they may get."""
    seen = ledger.rows(
        "SELECT stage, max(local_shape[2]) AS tokens FROM accesses WHERE step = ? AND tensor_name = 'hidden_states' "
        "AND dims = '1, T, H' GROUP BY stage",
        [WATCHED],
    )
    tokens = {row["stage"]: row["tokens"] for row in seen}
    plan.__dict__["loads"] = {
        stage: replace(load, tokens=tokens.get(stage, load.tokens)) for stage, load in plan.loads.items()
    }
    return plan


@pytest.fixture(scope="session")
def witnesses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Witnesses]]:
    """`usual` (packed, two mini-batches, a copy of the weights for the rollout), `alone` (the same without shared prompts)
    or `variant` (the opposite of all that)."""
    made: dict[str, Witnesses] = {}

    def of(name: str) -> Witnesses:
        if name not in made:
            overrides = (*COMMON, *CHANGES[name])
            ledger = Ledger(record(tmp_path_factory.mktemp("witness") / name, *overrides))
            made[name] = Witnesses(ledger, with_observed_tokens(planned("tiny.yaml", *overrides), ledger))
        return made[name]

    yield of
    for one in made.values():
        one.ledger.close()
