"""What a mesh asks of a run: refused with key, value, rule and the nearest value that works, and the same by `check`."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowledger.config import shards
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
# what is asked for -> the words of the refusal, and the rule of `flowledger check` that says the same
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...], str]] = {
    "heads": ({"tp": 8}, {"tiny": {"ffn_size": 64}}, ("mesh.tp = 8", "12 attention heads", "use mesh.tp = 6"), "model.heads_tp"),
    "kv heads": ({"tp": 3}, {}, ("mesh.tp = 3", "4 key/value heads", "use mesh.tp = 2"), "flowledger.kv_heads"),
    "width": ({"tp": 4}, {"tiny": {"ffn_size": 50}}, ("mesh.tp = 4", "50 FFN channels", "use mesh.tp = 5"), "flowledger.ffn"),
    "ulysses": ({"sp": 5}, {}, ("mesh.sp = 5", "12 attention heads", "use mesh.sp = 4"), "model.heads_sp"),
    "tp and ulysses": ({"tp": 2, "sp": 4}, {}, ("mesh.tp*mesh.sp = 2*4", "use mesh.sp = 3"), "flowledger.heads"),
    "heads over cp": ({"cp": 8, "cp_kind": "all_to_all"}, {}, ("mesh.cp = 8", "use mesh.cp = 6"), "flowledger.heads"),
    "layers": ({"pp": 4}, {}, ("mesh.pp*mesh.vpp = 4*1", "6 layers", "use mesh.pp = 3", "[2, 2, 1, 1]"), "model.layers_pp"),
    "chunks": ({"pp": 2, "vpp": 2}, {}, ("mesh.pp*mesh.vpp = 2*2 = 4 stages", "6 layers", "use mesh.pp = 3"), "model.layers_pp"),
    "chunks alone": ({"vpp": 2}, {}, ("mesh.vpp = 2", "mesh.pp = 1", "use mesh.vpp = 1"), "flowledger.chunks"),
    "rest": ({"pp": 3}, {"actor": {"engine": LAST}}, ("3*1", "5 of the 6 layers", "[2, 2, 2]"), "model.layers_pp"),
    "stages": ({"pp": 2}, {"actor": {"engine": {"layers_in_stages": [4, 3]}}}, ("layers_in_stages = [4, 3]", "use [3, 3]"), "flowledger.stages"),
    "stages for few": ({"pp": 3}, {"actor": {"engine": {"layers_in_stages": [3, 3]}}}, ("[3, 3]", "use [2, 2, 2]"), "flowledger.stages"),
    "ep and dp": ({"dp": 4, "ep": 3}, {"tiny": {"experts": 6}}, ("mesh.ep = 3", "mesh.dp = 4", "use mesh.ep = 2"), "flowledger.ep_dp"),
    "experts": ({"dp": 4, "ep": 4}, {"tiny": {"experts": 6}}, ("mesh.ep = 4", "6 experts", "use mesh.ep = 3"), "model.experts_ep"),
    "no experts": ({"dp": 2, "ep": 2}, {}, ("mesh.ep = 2", "no experts", "use mesh.ep = 1"), "flowledger.experts"),
    "mini-batch": ({"dp": 5}, {}, ("4*3 = 12 samples", "mesh.dp = 5", "use mesh.dp = 4"), "flowledger.mini_dp"),
    "critic": (
        {"dp": 4}, {"critic": {"mini_batch_prompts": 2}, "algorithm": {"advantage": "gae"}},
        ("critic.mini_batch_prompts", "2*3 = 6 samples", "use mesh.dp = 3"), "flowledger.critic_mini_dp",
    ),
    "padded": ({"sp": 2}, {"actor": {"packed": False}}, ("actor.packed = false", "mesh.sp = 2", "use actor.packed = true"), "flowledger.packed"),
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
    ({"pp": 3, "vpp": 2}, {}),
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


def test_the_processes_must_be_as_many_as_the_mesh_asks_for() -> None:
    for mesh, processes, told in (
        ({"dp": 2, "tp": 2}, 1, "mesh.dp*mesh.tp = 4 and there is 1 process; use --nproc 4"),
        ({"tp": 2}, 6, "mesh.tp = 2 and there are 6 processes; use --nproc 2 or mesh.dp = 3"),
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


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 3), st.integers(1, 12), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_values_that_are_proposed_work_and_none_is_nearer(layers: int, pp: int, vpp: int, heads: int, tp: int) -> None:
    vpp = vpp if pp > 1 else 1
    asked = worlds.config(mesh={"pp": pp, "vpp": vpp, "tp": tp})
    sizes = {"L": layers, "A": heads, "K": heads, "F": 27720}
    if heads % tp:
        with pytest.raises(BadInput, match="attention heads") as refused:
            shards.check_sizes(asked, sizes)
        better = int(str(refused.value).rpartition("mesh.tp = ")[2])
        assert heads % better == 0
        assert not any(heads % n == 0 for n in range(1, heads + 1) if abs(n - tp) < abs(better - tp))
    elif pp > 1 and (layers % (pp * vpp) or layers < pp * vpp):
        with pytest.raises(BadInput, match="layers of model") as refused:
            shards.check_sizes(asked, sizes)
        for key, value in re.findall(
            r"(mesh\.pp|layers_in_stages) = (\d+|\[.*\])", str(refused.value).partition("; use")[2]
        ):
            told = json.loads(value)
            mended = {"mesh": {"pp": told, "vpp": vpp, "tp": tp}} if key == "mesh.pp" else {"mesh": asked.mesh}
            engine = {"layers_in_stages": told} if key == "layers_in_stages" else {}
            shards.check_sizes(worlds.config(**mended, actor={"engine": engine}), sizes)
    else:
        shards.check_sizes(asked, sizes)
