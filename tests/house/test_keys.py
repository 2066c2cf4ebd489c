"""Every key of a configuration is read by the loop, or stands below with the reason why not."""

import ast
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.run import worlds

from flowledger.cli import recorded
from flowledger.config.algorithm import Algorithm, Rejection, RolloutCorrection
from flowledger.config.engine import Engine, Hardware, Logits, Offload, Optimizer, Recompute, Serving
from flowledger.config.reward import Component
from flowledger.config.schema import Async, RunConfig
from flowledger.config.section import Section

SOURCE = Path(__file__).parents[2] / "src" / "flowledger"
REFUSED = "refused where it is not as usual"
PLAN = "changes plans and not runs, as the docs say of it"
OF_ENGINES = ("sequence_parallel", "pipeline", "layers_in_first_stage", "layers_in_last_stage", "layers_in_stages")
Key = tuple[str, str]  # section, field

UNREAD: dict[Key, str] = {
    **{("Engine", name): PLAN for name in Engine.model_fields if name not in (*OF_ENGINES, "mesh")},  # mesh: refused
    **{("Serving", name): PLAN for name in Serving.model_fields},
    **{
        (part.__name__, name): PLAN
        for part in (Async, Logits, Offload, Optimizer, Recompute)
        for name in part.model_fields
    },
    **{("Hardware", name): PLAN for name in Hardware.model_fields},
    ("RunConfig", "async_"): PLAN,
    ("Rollout", "serving"): PLAN,
    ("Rollout", "log_probs"): "what an objective needs is held against it; the loop's own rollout has them in any case",
    ("Ref", "path"): REFUSED,
    ("Ref", "engine"): PLAN,
    ("Lora", "dtype"): REFUSED,
    ("Lora", "extra_trainable"): REFUSED,
    ("Actor", "log_prob_entropy"): PLAN,
    ("Mesh", "etp"): PLAN,
    ("RunConfig", "hardware"): PLAN,
    ("RunConfig", "raw"): "what a foreign framework's reader keeps for its plan",
    ("RunConfig", "framework_version"): "of a foreign framework",
}


def keys(section: type[Section]) -> Iterator[Key]:
    """Every key of a section and of those inside of it."""
    for name, field in section.model_fields.items():
        yield section.__name__, name
        for inner in _sections(field.annotation):
            yield from keys(inner)


def _sections(kind: Any) -> Iterator[type[Section]]:
    if isinstance(kind, type) and issubclass(kind, Section):
        yield kind
    for part in typing.get_args(kind):
        yield from _sections(part)


# Keys that are read with some methods, or on several ranks: that one of the loop's files has the attribute is enough.
BY_METHOD = {key for section in (Algorithm, RolloutCorrection, Rejection, Component) for key in keys(section)}
BY_RANKS = {("Engine", name) for name in OF_ENGINES}
CASES: tuple[dict[str, Any], ...] = (
    {
        "ref": {"path": "start", "micro_batch": {"samples": 3}}, "checkpoint": {"every_steps": 1},
        "algorithm": {"kl_coef": 0.1, "rollout_correction": {"importance": "token", "rejections": [{"kind": "token_k1"}]}},
        "model": {"lora": {"rank": 2}},
    },
    {
        "critic": {"path": "start"}, "algorithm": {"advantage": "gae"}, "actor": {"mini_batch_prompts": 1, "micro_batch": {"max_tokens": 60}},
        "data": {"path": None, "task": "simple_equations"}, "reward": {"components": [{"name": "right", "kind": "task"}]},
    },
)  # fmt: skip


def attributes() -> set[str]:
    """Every attribute that a file of the loop reads."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (SOURCE / "run").rglob("*.py"))
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[Key]:
    """The keys that anybody reads from now on."""
    found: set[Key] = set()

    def watched(self: Section, name: str) -> Any:
        if name in type(self).model_fields:
            found.add((type(self).__name__, name))
        return object.__getattribute__(self, name)

    monkeypatch.setattr(Section, "__getattribute__", watched, raising=False)
    return found


def test_every_key_is_read_by_the_loop(read: set[Key], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [worlds.config(**case, record={"level": "steps"}) for case in CASES]
    read.clear()  # what looks at it while it is made only looks whether it is well
    for number, one in enumerate(settings):
        recorded.train(one, Path(f"run-{number}"), recorded.Recorded(), quiet=True)
    here = attributes()
    read |= {key for key in BY_METHOD | BY_RANKS if key[1] in here and key not in UNREAD}
    unread = {key for key in keys(RunConfig) if key not in read}
    assert sorted(unread - set(UNREAD)) == [], "accepted, and read by nobody"
    assert sorted(set(UNREAD) & read) == [], "listed here, and read after all"


SET: tuple[dict[str, Any], ...] = (
    {"model": {"lora": {"dtype": "bfloat16"}}},
    {"model": {"lora": {"extra_trainable": ["lm_head"]}}},
    {"ref": {"path": "elsewhere"}},
)


@pytest.mark.parametrize("changes", SET)
def test_what_the_loop_does_not_read_is_refused_by_name(changes: dict[str, Any]) -> None:
    key, inner = [], changes
    while isinstance(inner, dict):
        name = list(inner)[-1]
        key.append(name)
        inner = inner[name]
    with pytest.raises(ValueError, match=re.escape(".".join(key))):
        worlds.config(**changes)


def test_another_framework_may_say_it() -> None:
    lora = worlds.config(framework="verl", model={"lora": {"dtype": "bfloat16"}}).model.lora
    assert lora is not None and lora.dtype == "bfloat16"
