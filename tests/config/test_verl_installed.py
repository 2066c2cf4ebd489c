"""An installed verl composes by itself: a small one of our own, with groups, interpolations and a search path.

What Hydra makes of its files is worked out by hand beside each assertion; no verl is imported, and none is needed.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowledger.config.shell.launches import Launched
from flowledger.config.verl import installed
from flowledger.config.verl.compose import Composed
from flowledger.config.verl.compose import compose as by_table
from flowledger.config.verl.launch import Launch, of_file
from flowledger.config.verl.read import read
from flowledger.flow.errors import BadInput
from flowledger.tables import verl

FILES = {
    "trainer/config/ppo_trainer.yaml": (
        "defaults: [{model_engine: dp}, {'actor@actor_rollout_ref.actor': '${model_engine}_actor'}, _self_]\n"
        "actor_rollout_ref: {rollout: {name: '???', n: 1, mode: async}, model: {path: none}}\n"
        "data: {train_batch_size: 77, max_prompt_length: 5, rows: '${data.train_batch_size}-${trainer.nnodes}'}\n"
        "trainer: {nnodes: 1, logger: [console], who: '${oc.env:WHO,nobody}', token: '${oc.env:TOKEN,none}'}\n"
    ),
    "trainer/config/ppo_megatron_trainer.yaml": "defaults: [ppo_trainer, {override model_engine: megatron}, _self_]\n",
    "trainer/config/model_engine/dp.yaml": "# @package _global_\nmodel_engine: dp\n",
    "trainer/config/model_engine/megatron.yaml": "# @package _global_\nmodel_engine: megatron\n",
    "trainer/config/actor/dp_actor.yaml": "strategy: fsdp\nppo_mini_batch_size: 7\nsteps: ${oc.select:data.train_batch_size,1}\n",
    "trainer/config/actor/megatron_actor.yaml": "strategy: megatron\nppo_mini_batch_size: 9\nmegatron: {tp: 3}\n",
    "experimental/fully_async_policy/config/fully_async_ppo_trainer.yaml": (
        "hydra: {searchpath: ['file://verl/trainer/config']}\ndefaults: [ppo_trainer, _self_]\nrollout: {nnodes: 4}\n"
    ),
}  # fmt: skip
FULLY = "verl.experimental.fully_async_policy.fully_async_main"
NOTE = "composed by verl 0.9.7's own configuration files through Hydra"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with a verl 0.9.7 in it, whose modules fail when they are imported."""
    folder = tmp_path / "a site, with 'quotes'"
    for name, text in FILES.items():
        file = folder / "verl" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    (folder / "verl/__init__.py").write_text("raise AssertionError('verl is imported')\n", encoding="utf-8")
    (folder / "verl-0.9.7.dist-info").mkdir()
    (folder / "verl-0.9.7.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.9.7\n")
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    assert "verl" not in sys.modules


def composed(*overrides: str, config: str | None = None, module: str = verl.DEFAULT_MODULE, **env: str) -> Composed:
    there = installed.installed()
    assert there is not None
    placed = tuple((text, f"run.sh:{line}") for line, text in enumerate(overrides, 1))
    return installed.compose(Launch(module, config, placed), there, env)


def test_groups_and_interpolations_are_those_of_the_installed_files(site: Path) -> None:
    found = composed("data.train_batch_size=8", "+data.mine=[1,a]", "~data.max_prompt_length", "trainer.nnodes=2")
    assert (found.version, found.config, found.engine) == ("0.9.7", "ppo_trainer", "dp")
    assert found.leaves == {
        "model_engine": "dp",
        "actor_rollout_ref.actor.strategy": "fsdp",
        "actor_rollout_ref.actor.ppo_mini_batch_size": 7,
        "actor_rollout_ref.actor.steps": 8,
        "actor_rollout_ref.rollout.name": "???",
        "actor_rollout_ref.rollout.n": 1,
        "actor_rollout_ref.rollout.mode": "async",
        "actor_rollout_ref.model.path": "none",
        "data.train_batch_size": 8,
        "data.rows": "8-2",
        "data.mine": [1, "a"],
        "trainer.nnodes": 2,
        "trainer.logger": ["console"],
        "trainer.who": "nobody",
        "trainer.token": "none",
    }
    assert found.places == {"data.train_batch_size": "run.sh:1", "data.mine": "run.sh:2", "trainer.nnodes": "run.sh:4"}


@pytest.mark.parametrize("how", [("model_engine=megatron", None), ("hydra.run.dir=x", "ppo_megatron_trainer.yaml")])
def test_an_engine_is_chosen_by_its_group_or_by_the_configuration(site: Path, how: tuple[str, str | None]) -> None:
    found = composed(how[0], config=how[1])
    assert found.engine == "megatron"
    assert found.leaves["actor_rollout_ref.actor.megatron.tp"] == 3
    assert found.hydra == tuple(text for text in how[:1] if text.startswith("hydra."))


def test_a_trainer_that_builds_on_another_folder_finds_it_from_anywhere(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = composed("rollout.nnodes=6", module=FULLY)
    assert (found.config, found.leaves["rollout.nnodes"], found.leaves["data.train_batch_size"]) == (
        "fully_async_ppo_trainer", 6, 77,
    )  # fmt: skip


def test_the_environment_is_the_scripts_own(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    found = composed(WHO="me").leaves
    assert (found["trainer.who"], found["trainer.token"]) == ("me", "none")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.train_batchsize=4", "Could not override 'data.train_batchsize'. verl 0.9.7 has no such key; did you mean data.train_batch_size?; "
         "to add it nonetheless use +data.train_batchsize=…"),
        ("+data.train_batch_size=4", "Could not append to config. An item is already at 'data.train_batch_size' (it is 77); "
         "use data.train_batch_size=… without the plus, or ++data.train_batch_size=… to force it"),
        ("~data.batch", "Could not delete from config. 'data.batch' does not exist"),
        ("trainer.logger={a:1}", "Error merging override trainer.logger={a:1}: it is a list, not a dictionary"),
        ("model_engine=megatrom", "model_engine = megatrom: Could not find 'model_engine/megatrom'; use dp, megatron"),
        ("actor/x=y", "actor/x=y looks like a config group override, but config group 'actor/x' does not exist"),
        ("trainer.who=${trainer.nothing}", "trainer.who = ${trainer.nothing} refers to a key that has no value"),
        ("trainer.who=${oc.env:WHO}", "trainer.who needs the environment variable WHO; give --assume WHO=value"),
        ("trainer.nnodes=1,2", "trainer.nnodes = 1,2: 1,2 is a sweep over several values; give one, or quote it as '[1,2]'"),
        ("npu_profile@x=y", "Override npu_profile@x=y looks like a config group override, but config group 'npu_profile' does not exist"),
    ],
)  # fmt: skip
def test_what_hydra_refuses_has_our_words_and_its_place(site: Path, override: str, said: str) -> None:
    with pytest.raises(BadInput) as refusal:
        composed("trainer.nnodes=1", override)
    assert str(refusal.value).startswith(f"run.sh:2: {said}")
    assert "\n" not in str(refusal.value)


def test_a_configuration_that_the_installed_verl_lacks(site: Path) -> None:
    with pytest.raises(
        BadInput, match=r"verl 0\.9\.7: no configuration 'ppo_trainers' in .*did you mean ppo_trainer\?"
    ):
        composed(config="ppo_trainers")


def test_a_reading_says_what_composed_it_and_another_version_is_our_tables(site: Path) -> None:
    given = ["actor_rollout_ref.rollout.name=vllm"]
    table = read(None, given, version="0.9.1")
    assert table.config.data.prompts_per_step == 1024  # verl 0.9.1's own default
    assert NOTE not in table.notes
    with pytest.raises(BadInput, match=r"--verl 0\.9\.8: only 0\.9\.1 and head are known"):
        read(None, given, version="0.9.8")


def test_a_dump_and_a_part_lie_over_the_installed_configuration(site: Path, tmp_path: Path) -> None:
    there = installed.installed()
    assert there is not None
    part = tmp_path / "part.yaml"
    part.write_text("data:\n  train_batch_size: 3\nmodel_engine: megatron\n")
    found = installed.compose(of_file(part), there)
    assert (found.leaves["data.rows"], found.leaves["actor_rollout_ref.actor.strategy"]) == ("3-1", "megatron")
    assert found.places["data.train_batch_size"] == f"{part}:2"
    part.write_text("data:\n  train_batchsize: 3\n")
    with pytest.raises(BadInput, match=r"part\.yaml:2: Could not override 'data\.train_batchsize'.*did you mean"):
        installed.compose(of_file(part), there)
    leaves = {**found.leaves, "data.rows": "as it was", "extra.of_mine": None}
    assert installed.compose(Launch(whole=leaves), there).leaves == leaves


def test_a_users_own_file_and_groups_are_composed_by_hydra(site: Path, tmp_path: Path) -> None:
    (tmp_path / "conf/actor").mkdir(parents=True)
    (tmp_path / "conf/actor/mine.yaml").write_text("strategy: fsdp2\nppo_mini_batch_size: 21\n")
    (tmp_path / "conf/mine.yaml").write_text(
        "hydra: {searchpath: ['file://verl/trainer/config']}\n"
        "defaults:\n  - ppo_trainer\n  - override actor@actor_rollout_ref.actor: mine\n  - _self_\n"
        "data: {train_batch_size: 42}\nextra: {a: 1}\n"
    )
    launch = replaced(of_file(tmp_path / "conf/mine.yaml"), "data.max_prompt_length=6")
    there = installed.installed()
    assert there is not None
    found = installed.compose(launch, there)
    assert found.leaves["actor_rollout_ref.actor.ppo_mini_batch_size"] == 21  # of the user's own group
    assert (found.leaves["data.rows"], found.leaves["extra.a"], found.leaves["data.max_prompt_length"]) == (
        "42-1",
        1,
        6,
    )
    assert launch.left_out == (
        f"{tmp_path}/conf/mine.yaml: `override actor@actor_rollout_ref.actor: mine` of its defaults is not composed "
        "without an installed verl",
    )


def replaced(launch: Launch, *overrides: str) -> Launch:
    placed = tuple((text, "run.sh:1") for text in overrides)
    return Launch(
        launch.module,
        launch.config_name,
        placed,
        launch.whole,
        launch.marks,
        file=launch.file,
        left_out=launch.left_out,
    )


def test_hydra_over_our_table_of_defaults_gives_what_our_own_composition_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of 0.9.1 written out as one file of an installed 0.9.1: overrides and interpolations are Hydra's."""
    import yaml

    trees = tmp_path / "verl/trainer/config"
    (trees / "model_engine").mkdir(parents=True)
    for engine in ("dp", "megatron"):
        (trees / f"model_engine/{engine}.yaml").write_text(
            "# @package _global_\n" + yaml.safe_dump(verl.defaults("0.9.1", "ppo_trainer", engine))
        )
    (trees / "ppo_trainer.yaml").write_text("defaults: [{model_engine: dp}, _self_]\n")
    (tmp_path / "verl-0.9.1.dist-info").mkdir()
    (tmp_path / "verl-0.9.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.9.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    given = ["actor_rollout_ref.rollout.name=vllm", "algorithm.adv_estimator=grpo", "model_engine=megatron",
             "data.train_batch_size=64", "actor_rollout_ref.actor.use_dynamic_bsz=true",
             "+trainer.mine={a: [1, b]}", "~trainer.logger"]  # fmt: skip
    placed = Launch(overrides=tuple((text, "run.sh:1") for text in given))
    there = installed.installed()
    assert there is not None
    assert installed.compose(placed, there) == by_table(placed, "0.9.1")
    reading = read(None, given)
    assert "composed by verl 0.9.1's own configuration files through Hydra" in reading.notes
    assert reading.config.framework_version == "0.9.1"
    assert reading.config.data.prompts_per_step == 64


def test_without_its_files_or_without_hydra_no_verl_counts(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed.installed() is not None
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "hydra", None)
        assert installed.installed() is None
    (site / "verl/trainer/config/ppo_trainer.yaml").unlink()
    assert installed.installed() is None
    assert read(None, ["actor_rollout_ref.rollout.name=vllm"]).config.framework_version == "head"  # newer than 0.9.1


def test_a_command_line_goes_to_hydra_with_its_places(site: Path) -> None:
    argv = ("python3", "-m", FULLY, "--config-path=config", "rollout.nnode=6")
    launched = Launched(argv=argv, places=tuple(f"run.sh:{n}" for n in range(5)), line=1, file="run.sh", environment={})
    with pytest.raises(
        BadInput, match=r"^run\.sh:4: Could not override 'rollout\.nnode'\. .*did you mean rollout\.nnodes\?"
    ):
        read(launched)
