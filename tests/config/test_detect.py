"""Whose configuration a file or a command line is, and what is said of one that nobody knows."""

from pathlib import Path

import pytest

from flowledger.config.detect import FLAGS, FRAMEWORKS, Asked, framework_of, read
from flowledger.config.settings import table
from flowledger.flow.errors import BadInput

ROOT = Path(__file__).parents[2]
EXAMPLES, DATA = ROOT / "examples", ROOT / "tests" / "data"


@pytest.mark.parametrize(
    ("command", "framework"),
    [
        ("python3 -m verl.trainer.main_ppo a.b=1", "verl"),
        ("python -m recipe.dapo.main_dapo algorithm.adv_estimator=grpo", None),
        ("python -m recipe.dapo.src.main_ppo_dapo", "verl"),
        ("python -m verl.experimental.fully_async_policy.fully_async_main", "verl"),
        ("python3 -m openrlhf.cli.train_ppo_ray --pretrain x", "openrlhf"),
        ("ray job submit -- python3 train.py --actor-num-nodes 1", "slime"),
        ("python train_async.py --rollout-batch-size 32", "slime"),
        ("trl grpo --config a.yaml", "trl"),
        ("accelerate launch train_grpo.py --num_generations 8", "trl"),
        ("python examples/run_grpo_math.py --config a.yaml", "nemo_rl"),
        ("python -m areal.launcher.local examples/math/gsm8k_grpo.py --config a.yaml", "areal"),
        ("accelerate launch train.py --num_generations 8 --per_device_train_batch_size 8", "trl"),
        ("accelerate launch run_grpo.py --max-completion-length=512", "trl"),
        ("accelerate launch train.py --config a.yaml", None),  # slime is not started so
        ("deepspeed train.py --vllm_num_engines 2 --micro_rollout_batch_size 8", "openrlhf"),
        ("python grpo.py --hf-checkpoint x --num-rollout 9", "slime"),
        ("python3 -m verl.trainer.main_ppo --num_generations 8", "verl"),
        ("python prepare_data.py --out /tmp", None),
        ("echo --note=verl", None),  # words of options are not what is started
    ],
)
def test_a_command_line_names_its_framework(command: str, framework: str | None) -> None:
    assert framework_of(command.split()) == framework


def test_a_flag_that_tells_a_framework_is_known_to_that_one_alone() -> None:
    flags = {name: table(name)["flag"] for name in ("slime", "openrlhf")}
    knows = {
        "trl": {name for key in ("defaults", "unset", "older", "lists") for name in table("trl")[key]},
        "slime": {row["key"] for row in flags["slime"]} | {*table("slime")["others"], *table("slime")["megatron"]},
        "openrlhf": {row[key] for row in flags["openrlhf"] for key in ("key", "older") if key in row},
    }
    for framework, names in FLAGS.items():
        for name in names:
            assert [one for one, known in knows.items() if name in known] == [framework], name


def test_a_guess_by_a_program_s_name_that_fails_says_what_it_rests_on(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"taken for slime because of train\.py: --framework says otherwise$"):
        read(script(tmp_path, "python train.py --lr 1e-6"), Asked())
    for line, asked in (("python train.py --hf-checkpoint x", Asked()), ("python train.py", Asked(framework="slime"))):
        with pytest.raises(BadInput) as error:
            read(script(tmp_path, line), asked)
        assert "taken for" not in str(error.value)


@pytest.mark.parametrize(
    ("path", "framework"),
    [
        ("examples/tiny.yaml", "flowledger"),
        ("examples/verl_qwen3_8b_fsdp.sh", "verl"),
        ("examples/verl_qwen3_235b_megatron.sh", "verl"),
        ("tests/data/areal/fsdp.yaml", "areal"),
        ("tests/data/nemo_rl/dense.yaml", "nemo_rl"),
        ("tests/data/scripts/openrlhf_grpo.sh", "openrlhf"),
        ("tests/data/scripts/slime_qwen3_4b.sh", "slime"),
        ("tests/data/scripts/trl_accelerate.sh", "trl"),
    ],
)
def test_files_are_recognised_by_what_they_hold(path: str, framework: str) -> None:
    """The reader that takes it is that of its framework, whatever else it then says of the file."""
    try:
        assert read(str(ROOT / path), Asked()).config.framework == framework
    except BadInput as error:
        named = str(error)
        assert "no framework is recognised" not in named and "starts no training that is known" not in named


def test_overrides_follow_those_of_the_file() -> None:
    found = read(str(EXAMPLES / "verl_qwen3_8b_fsdp.sh"), Asked(overrides=["data.train_batch_size=128"]))
    assert found.config.data.prompts_per_step == 128
    own = read(str(EXAMPLES / "tiny.yaml"), Asked(overrides=["steps=3"]))
    assert own.config.steps == 3 and own.ignored == ()


def test_a_name_of_a_framework_and_overrides_alone_are_a_configuration() -> None:
    found = read(
        "verl",
        Asked(
            overrides=[
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
                "data.train_batch_size=64",
            ]
        ),
    )
    assert (found.config.framework, found.config.data.prompts_per_step) == ("verl", 64)


def script(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "launch.sh"
    path.write_text("\n".join(["#!/bin/bash", *lines]) + "\n")
    return str(path)


VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm actor_rollout_ref.model.path=Qwen/Qwen3-8B data.train_batch_size={}"


def test_of_several_trainings_the_last_is_meant_or_the_one_that_is_named(tmp_path: Path) -> None:
    path = script(tmp_path, "python prepare.py", VERL.format(64), VERL.format(128))
    sizes = [read(path, Asked(launch=launch)).config.data.prompts_per_step for launch in (None, 1, 2)]
    assert sizes == [128, 64, 128]
    for launch in (0, 3):
        with pytest.raises(BadInput, match=rf"starts 2 trainings; --launch {launch}"):
            read(path, Asked(launch=launch))


def test_a_script_is_known_by_its_first_line_too(tmp_path: Path) -> None:
    path = Path(script(tmp_path, VERL.format(32))).rename(tmp_path / "launch")
    assert read(str(path), Asked()).config.data.prompts_per_step == 32


def test_assumptions_fill_what_a_script_leaves_open(tmp_path: Path) -> None:
    path = script(tmp_path, VERL.format("$BATCH"))
    assert read(path, Asked(assume={"BATCH": "96"})).config.data.prompts_per_step == 96


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("python prepare.py --x 1", ["starts no training that is known", "prepare.py", "--framework"]),
        ("echo nothing", ["launch.sh"]),
        ("python run_grpo_math.py a.b=1", ["nemo_rl is started without --config"]),
        ("python run_grpo_math.py --config gone.yaml", ["--config gone.yaml", "no such file"]),
    ],
)
def test_scripts_that_cannot_be_planned_say_why_in_one_line(tmp_path: Path, line: str, words: list[str]) -> None:
    with pytest.raises(BadInput) as caught:
        read(script(tmp_path, line), Asked())
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


def test_unknown_frameworks_and_files_are_named_with_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="did you mean verl"):
        read(str(EXAMPLES / "tiny.yaml"), Asked(framework="verll"))
    (tmp_path / "odd.yaml").write_text("zebra: 1\n")
    with pytest.raises(BadInput, match=r"no framework is recognised by its keys \(zebra\)") as caught:
        read(str(tmp_path / "odd.yaml"), Asked())
    assert all(name in str(caught.value) for name in FRAMEWORKS)
    with pytest.raises(BadInput, match="no such file"):
        read(str(tmp_path / "gone.yaml"), Asked())
    with pytest.raises(BadInput, match="flowledger"):
        read(script(tmp_path, VERL.format(8)), Asked(framework="flowledger"))


def test_python_is_named_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("x: y: z\n")
    with pytest.raises(BadInput, match=r"train\.py is Python, which is never executed"):
        read(str(tmp_path / "train.py"), Asked())
