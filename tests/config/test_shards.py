"""What a mesh asks of a run: refused with key, value, rule and the nearest value that works, and the same by `check`."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.config import shards, ways
from flowledger.config.read import read
from flowledger.config.schema import RunConfig
from flowledger.flow.errors import BadInput
from flowledger.plan.checks import check as plan_checks
from flowledger.plan.subject import architecture_of
from tests.run import worlds

TINY = {"hidden_size": 96, "layers": 6, "heads": 12, "kv_heads": 4, "ffn_size": 48}


def config(mesh: dict[str, Any], **sections: Any) -> RunConfig:
    """Six layers, 12 heads, 4 key/value heads, width 48; 12 samples a step."""
    model = {"tiny": {**TINY, **sections.pop("tiny", {})}, **sections.pop("model", {})}
    data = {"prompts_per_step": 4, **sections.pop("data", {})}
    return worlds.config(mesh=mesh, model=model, data=data, **sections)


def size(mesh: dict[str, Any]) -> int:
    return math.prod(mesh.get(axis, 1) for axis in ("dp", "tp", "pp", "cp", "sp"))


LAST = {"layers_in_last_stage": 1}
CHUNKS = {"pp": 2, "vpp": 2}


def engine(**settings: Any) -> dict[str, Any]:
    return {"actor": {"engine": settings}}


# what is asked for -> the words of the refusal, and the rule of `flowledger check` that says the same
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...], str]] = {
    "heads": ({"tp": 8}, {"tiny": {"ffn_size": 64}}, ("mesh.tp = 8", "12 attention heads", "use mesh.tp = 4 and --nproc 4"), "model.heads_tp"),
    "kv heads": ({"tp": 3}, {}, ("mesh.tp = 3", "4 key/value heads", "use mesh.tp = 2"), "flowledger.kv_heads"),
    "width": ({"tp": 4}, {"tiny": {"ffn_size": 50}}, ("mesh.tp = 4", "50 FFN channels", "use mesh.tp = 2 and --nproc 2"), "flowledger.ffn"),
    "ulysses": ({"sp": 5}, {}, ("mesh.sp = 5", "12 attention heads", "use mesh.sp = 4"), "model.heads_sp"),
    "tp and ulysses": ({"tp": 2, "sp": 4}, {}, ("mesh.tp*mesh.sp = 2*4", "use mesh.sp = 3"), "flowledger.heads"),
    "heads over cp": ({"cp": 8, "cp_kind": "all_to_all"}, {}, ("mesh.cp = 8", "use mesh.cp = 6"), "flowledger.heads"),
    "layers": ({"pp": 4}, {}, ("mesh.pp*mesh.vpp = 4*1", "6 layers", "use mesh.pp = 3", "[2, 2, 1, 1]"), "model.layers_pp"),
    "chunks": (CHUNKS, engine(pipeline="interleaved"), ("mesh.pp*mesh.vpp = 2*2 = 4 stages", "6 layers", "use mesh.pp = 3"), "model.layers_pp"),
    "chunks alone": ({"vpp": 2}, {}, ("mesh.vpp = 2", "mesh.pp = 1", "use mesh.vpp = 1"), "flowledger.chunks"),
    "rest": ({"pp": 3}, {"actor": {"engine": LAST}}, ("3*1", "5 of the 6 layers", "[2, 2, 2]"), "model.layers_pp"),
    "order of chunks": (CHUNKS, {}, ("actor.engine.pipeline = 1f1b", "mesh.vpp = 2", "use mesh.vpp = 1"), "flowledger.interleaved"),
    "order without": ({"pp": 2}, engine(pipeline="interleaved"), ("= interleaved", "mesh.vpp = 1", "use actor.engine.pipeline = 1f1b"), "flowledger.interleaved"),
    "critic's order": (
        CHUNKS, {**engine(pipeline="interleaved"), "critic": {"engine": {"pipeline": "gpipe"}}, "algorithm": {"advantage": "gae"}, "tiny": {"layers": 8}},
        ("critic.engine.pipeline = gpipe", "use critic.engine.pipeline = interleaved"), "flowledger.interleaved",
    ),
    "first in chunks": (
        CHUNKS, engine(pipeline="interleaved", layers_in_first_stage=3), ("3 of the 6 layers", "beside actor.engine.layers_in_first_stage = 3", "[2, 2, 1, 1]"),
        "model.layers_pp",
    ),
    "ends in chunks": (
        CHUNKS, engine(pipeline="interleaved", layers_in_first_stage=3, layers_in_last_stage=3), ("0 of the 6 layers", "[2, 2, 1, 1]"), "flowledger.end_chunks",
    ),
    "nothing between": ({"pp": 3}, engine(layers_in_stages=[3, 0, 3]), ("layers_in_stages = [3, 0, 3]", "use actor.engine.layers_in_stages = [2, 2, 2]"), "flowledger.stages"),
    "mesh of an engine": ({"tp": 2}, engine(mesh={"tp": 4}), ("actor.engine.mesh", "one mesh", "use actor.engine.mesh = null"), "flowledger.one_mesh"),
    "stages": ({"pp": 2}, {"actor": {"engine": {"layers_in_stages": [4, 3]}}}, ("layers_in_stages = [4, 3]", "use actor.engine.layers_in_stages = [3, 3]"), "flowledger.stages"),
    "stages for few": ({"pp": 3}, {"actor": {"engine": {"layers_in_stages": [3, 3]}}}, ("[3, 3]", "use actor.engine.layers_in_stages = [2, 2, 2]"), "flowledger.stages"),
    "ep and dp": ({"dp": 4, "ep": 3}, {"tiny": {"experts": 6}}, ("mesh.ep = 3", "mesh.dp = 4", "use mesh.ep = 2"), "flowledger.ep_dp"),
    "experts": ({"dp": 4, "ep": 4}, {"tiny": {"experts": 6}}, ("mesh.ep = 4", "6 experts", "use mesh.ep = 2"), "model.experts_ep"),
    "no experts": ({"dp": 2, "ep": 2}, {}, ("mesh.ep = 2", "no experts", "use mesh.ep = 1"), "flowledger.experts"),
    "mini-batch": ({"dp": 5}, {}, ("4*3 = 12 samples", "mesh.dp = 5", "use mesh.dp = 4"), "flowledger.mini_dp"),
    "critic": (
        {"dp": 4}, {"critic": {"mini_batch_prompts": 2}, "algorithm": {"advantage": "gae"}},
        ("critic.mini_batch_prompts", "2*3 = 6 samples", "use mesh.dp = 3"), "flowledger.critic_mini_dp",
    ),
    "padded": ({"sp": 2}, {"actor": {"packed": False}}, ("actor.packed = false", "mesh.sp = 2", "use actor.packed = true"), "flowledger.packed"),
    "padded, cut": (
        {"tp": 2}, {"actor": {"packed": False, "engine": {"sequence_parallel": True}}},
        ("actor.packed = false", "actor.engine.sequence_parallel = true", "use actor.packed = true"), "flowledger.packed",
    ),
    "shared": ({"dp": 2}, {"rollout": {"weights": "shared"}}, ("rollout.weights = shared", "use rollout.weights = copy"), "flowledger.shared_weights"),
    "adapters": ({"pp": 2}, {"model": {"lora": {}}}, ("model.lora", "mesh.pp = 2", "use mesh.pp = 1"), "flowledger.lora"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_mesh_that_cannot_be_is_refused_with_the_nearest_that_can(name: str) -> None:
    mesh, sections, words, rule = REFUSED[name]
    asked = config(mesh, **sections)
    with pytest.raises(BadInput) as refused:
        shards.check(asked, size(mesh))
    assert all(word in str(refused.value) for word in words), str(refused.value)
    verdicts = {row.id: row.verdict for row in plan_checks(asked, architecture_of(asked, None), None)}
    assert verdicts[rule] == "fail"


FINE: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {}),
    ({"dp": 12}, {}),
    ({"tp": 4, "sp": 3}, {}),
    ({"cp": 8}, {}),
    ({"pp": 3, "vpp": 2}, engine(pipeline="interleaved")),
    (CHUNKS, engine(pipeline="interleaved", layers_in_first_stage=2)),
    (CHUNKS, engine(pipeline="interleaved", layers_in_stages=[0, 3, 3, 0])),
    ({"pp": 3}, engine(layers_in_first_stage=0)),
    ({"pp": 2}, engine(layers_in_stages=[6, 0])),
    ({"tp": 2}, {"actor": {"packed": False}}),
    ({"dp": 2}, {"actor": {"packed": False, "engine": {"sequence_parallel": True}}}),
    ({"pp": 4}, {"actor": {"engine": {"layers_in_stages": [1, 2, 2, 1]}}}),
    ({"pp": 3}, {"actor": {"engine": {"layers_in_first_stage": 1, "layers_in_last_stage": 3}}}),
    ({"dp": 4, "ep": 2}, {"tiny": {"experts": 6}}),
    ({"dp": 2, "cp": 2}, {"model": {"lora": {}}}),
)


@pytest.mark.parametrize(("mesh", "sections"), FINE)
def test_a_mesh_that_can_be_is_let_through_by_both(mesh: dict[str, Any], sections: dict[str, Any]) -> None:
    asked = config(mesh, **sections)
    shards.check(asked, size(mesh))
    rows = plan_checks(asked, architecture_of(asked, None), None)
    assert [row.id for row in rows if row.verdict == "fail" and row.id.startswith(("flowledger", "model"))] == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("mesh.dp=1.5", "mesh.dp = 1.5 should be a whole number; use 2"),
        ("mesh.dp=-1.5", "mesh.dp = -1.5 should be a whole number; use 1"),
        ("mesh.dp=null", "mesh.dp = null should be a whole number; use 1"),
        ("mesh.dp=two", "mesh.dp = 'two' should be a whole number; use 1"),
        ("actor.engine.layers_in_stages=two", "actor.engine.layers_in_stages = 'two' should be a list of whole numbers; use []"),
        ("actor.engine.layers_in_stages=2", "actor.engine.layers_in_stages = 2 should be a list of whole numbers; use [2]"),
    ],
)  # fmt: skip
def test_what_is_no_degree_is_refused_in_the_user_s_words(given: str, told: str) -> None:
    with pytest.raises(BadInput) as refused:
        read(None, ["data.task=x", given])
    assert str(refused.value) == f"command line: {told}"


def test_the_processes_must_be_as_many_as_the_mesh_asks_for() -> None:
    for mesh, processes, told in (
        ({"dp": 2, "tp": 2}, 1, "mesh.dp*mesh.tp = 4 and there is 1 process; use --nproc 4"),
        ({"tp": 2}, 6, "mesh.tp = 2 and there are 6 processes; use --nproc 2 or mesh.dp = 3"),
        ({"dp": 2}, 5, "mesh.dp = 2 and there are 5 processes; use --nproc 2"),
        ({}, 4, "mesh.dp = 1 and there are 4 processes; use --nproc 1 or mesh.dp = 4"),
    ):
        with pytest.raises(BadInput) as refused:
            shards.check(config(mesh), processes)
        assert str(refused.value) == told


def test_sizes_are_read_from_the_model_s_own_file_and_wait_for_it_where_there_is_none(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 60,
        "num_hidden_layers": 2,
        "num_attention_heads": 5,
        "intermediate_size": 64,
        "vocab_size": 99,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    described = config({"tp": 2}, model={"path": str(tmp_path)})
    with pytest.raises(BadInput, match=r"mesh\.tp = 2 does not divide the 5 attention heads of model\.path"):
        shards.check(described, 2)
    unknown = config({"tp": 2}, model={"path": str(tmp_path / "weights.gguf")})
    shards.check(unknown, 2)
    with pytest.raises(BadInput, match="5 attention heads"):
        shards.check_sizes(unknown, {"L": 2, "A": 5, "K": 5, "F": 64})
    critic = config({"tp": 2}, critic={"path": str(tmp_path)}, algorithm={"advantage": "gae"})
    with pytest.raises(BadInput, match=r"5 attention heads of critic\.path"):
        shards.check(critic, 2)


def proposals(refusal: str) -> list[list[tuple[str, Any]]]:
    """What is to be set for each way that a refusal offers, and `--nproc` where it is to change."""
    offered = refusal.rpartition("; use ")[2]
    pairs = [[re.split(r" = | (?=\d+$)", part) for part in way.split(" and ")] for way in offered.split(" or ")]
    return [[(key, yaml.safe_load(value)) for key, value in way] for way in pairs]


# a mesh of the tiny model (2 layers, 4 heads, 2 key/value heads, 8 samples a mini-batch) and its processes -> the ways
OFFERED: tuple[tuple[int, dict[str, Any], str], ...] = (
    (3, {"mesh.dp": 2}, "--nproc 2"),
    (3, {"mesh.dp": 3}, "mesh.dp = 2 and --nproc 2"),
    (100, {"mesh.dp": 100}, "mesh.dp = 8 and --nproc 8"),
    (4, {"mesh.dp": 2000}, "mesh.dp = 4"),
    (8, {"mesh.cp": 8, "mesh.cp_kind": "all_to_all"}, "mesh.cp = 4 and --nproc 4"),
    (3, {"mesh.tp": 3}, "mesh.tp = 2 and --nproc 2"),
    (3, {"mesh.pp": 3}, "model.tiny.layers = 3 or mesh.pp = 2 and --nproc 2"),
    (6, {"mesh.tp": 2, "mesh.sp": 3}, "mesh.sp = 2 and --nproc 4"),
    (2, {"mesh.ep": 2}, "mesh.dp = 2 and mesh.ep = 1"),
    (2, {"mesh.ep": 2, "model.tiny.experts": 4}, "mesh.dp = 2"),
    (2, {"mesh.pp": 2, "actor.engine.layers_in_first_stage": 5}, "actor.engine.layers_in_first_stage = 1"),
    (
        2, {"mesh.pp": 2, "mesh.vpp": 2, "actor.engine.pipeline": "interleaved"},
        "model.tiny.layers = 4 or mesh.vpp = 1 and actor.engine.pipeline = 1f1b",
    ),
)  # fmt: skip


@pytest.mark.parametrize(("processes", "asked", "offered"), OFFERED)
def test_what_is_offered_works_in_the_same_command(processes: int, asked: dict[str, Any], offered: str) -> None:
    tiny = worlds.config(
        data={"prompts_per_step": 4}, rollout={"samples_per_prompt": 4}, actor={"mini_batch_prompts": 2}
    )
    given = ways.changed(tiny, asked)
    with pytest.raises(BadInput) as refused:
        shards.check(given, processes)
    assert str(refused.value).endswith(f"; use {offered}")
    for way in map(dict, proposals(str(refused.value))):
        there = way.pop("--nproc", processes)
        shards.check(ways.changed(given, way), there)


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 3), st.integers(1, 12), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_values_that_are_proposed_work_and_none_is_nearer(layers: int, pp: int, vpp: int, heads: int, tp: int) -> None:
    vpp = vpp if pp > 1 else 1
    order = {"pipeline": "interleaved" if vpp > 1 else "1f1b"}
    asked = worlds.config(mesh={"pp": pp, "vpp": vpp, "tp": tp}, actor={"engine": order})
    sizes = {"L": layers, "A": heads, "K": heads, "F": 27720}
    if heads % tp:
        with pytest.raises(BadInput, match="attention heads") as refused:
            shards.check_sizes(asked, sizes)
        ((better, *_),) = proposals(str(refused.value))
        assert better[0] == "mesh.tp" and heads % better[1] == 0
        assert not any(heads % n == 0 for n in range(1, heads + 1) if abs(n - tp) < abs(better[1] - tp))
    elif pp > 1 and (layers % (pp * vpp) or layers < pp * vpp):
        with pytest.raises(BadInput, match="layers of model") as refused:
            shards.check_sizes(asked, sizes)
        for way in proposals(str(refused.value)):
            mended, layers_now = ways.changed(asked, dict(way)), dict(way).get("model.tiny.layers", layers)
            shards.check_sizes(mended, {**sizes, "L": layers_now})
    else:
        shards.check_sizes(asked, sizes)
