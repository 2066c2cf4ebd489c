"""What a launch script leaves open: values of the run, variables that are not set, assumptions, and who is told what."""

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from flowledger.config.detect import Asked, read
from flowledger.config.foreign import Reading
from flowledger.config.near_key import near
from flowledger.config.settings import UNKNOWN_MODEL, table
from flowledger.config.shown import shown
from flowledger.flow.errors import BadInput

VERL = """NG=$(nvidia-smi -L | wc -l)
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.name=vllm \\
  actor_rollout_ref.actor.use_dynamic_bsz=true trainer.experiment_name=run-`git rev-parse HEAD` \\
  actor_rollout_ref.model.path={model} \\
  {key}={value}
"""
SLIME = """python3 train.py --actor-num-nodes 1 --rollout-batch-size 32 --n-samples-per-prompt 8 --num-layers 36 \\
  --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32 --group-query-attention --num-query-groups 8 \\
  --vocab-size 151936 --global-batch-size 256 --hf-checkpoint Qwen/Qwen3-8B \\
  --actor-num-gpus-per-node {value}
"""
OPENRLHF = """python3 -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen3-8B --train_batch_size 128 --rollout_batch_size 128 \\
  --actor_num_gpus_per_node {value} --micro_train_batch_size 2
"""
TRL = """accelerate launch --num_processes {value} -m trl.scripts.grpo --model_name_or_path Qwen/Qwen3-8B
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "run.sh"
    path.write_text(text)
    return path


def reading(
    path: Path, *overrides: str, assume: Mapping[str, str] | None = None, arguments: tuple[str, ...] = ()
) -> Reading:
    asked = Asked(overrides=overrides, assume=assume, script_arguments=arguments, version=None)
    return read(str(path), asked)


def fault(path: Path, *overrides: str, assume: Mapping[str, str] | None = None) -> str:
    with pytest.raises(BadInput) as refusal:
        reading(path, *overrides, assume=assume)
    return str(refusal.value).replace(f"{path.parent}/", "")


def verl(folder: Path, value: str, key: str = "trainer.n_gpus_per_node", model: str = "Qwen/Qwen3-8B") -> Path:
    return script(folder, VERL.format(key=key, value=value, model=model))


def test_an_unknown_number_is_named_and_any_way_of_giving_it_helps(tmp_path: Path) -> None:
    path = verl(tmp_path, "$NG")
    assert fault(path) == (
        "run.sh:5: trainer.n_gpus_per_node = $(nvidia-smi -L | wc -l) is not known before the run; "
        "give trainer.n_gpus_per_node=N or --assume NG=N"
    )
    for found in (
        reading(path, "trainer.n_gpus_per_node=4"),
        reading(path, assume={"NG": "4"}),
        reading(path, assume={"trainer.n_gpus_per_node": "4"}),
    ):
        assert found.config.hardware.gpus_per_node == 4
        assert not any("not needed" in note for note in found.notes)
    assert "--assume trainer.n_gpus_per_node=N" in fault(verl(tmp_path, "`nvidia-smi -L | grep -c H100`"))


@pytest.mark.parametrize(
    ("text", "name", "override"),
    [
        (SLIME, "--actor-num-gpus-per-node", "actor_num_gpus_per_node=4"),
        (OPENRLHF, "--actor_num_gpus_per_node", "actor.num_gpus_per_node=4"),
        (TRL, "accelerate.num_processes", None),
    ],
)
def test_the_other_frameworks_say_the_same(tmp_path: Path, text: str, name: str, override: str | None) -> None:
    direct = script(tmp_path, text.format(value="$(nvidia-smi -L | wc -l)"))
    assert f"{name} = $(nvidia-smi -L | wc -l) is not known before the run; give" in fault(direct)
    if override:
        assert reading(direct, override).config.hardware.gpus_per_node == 4
    path = script(tmp_path, "N=$(nproc --of-gpus)\n" + text.format(value="$N"))
    assert "--assume N=N" in fault(path)
    assert reading(path, assume={"N": "4"}).config.hardware.gpus_per_node == 4
    unset = fault(script(tmp_path, text.format(value="$N_GPUS")))
    assert f"N_GPUS is not set ({name} = ''); give --assume N_GPUS=… or export it" in unset


def test_sources_have_the_users_own_spelling(tmp_path: Path) -> None:
    config = reading(script(tmp_path, OPENRLHF.format(value="8"))).config
    assert config.source_of("actor.mini_batch_samples") == f"--train_batch_size@{tmp_path}/run.sh:1"
    assert config.source_of("rollout.samples_per_prompt").startswith("--n_samples_per_prompt default@openrlhf")


def test_a_variable_that_is_not_set_is_named_with_its_key(tmp_path: Path) -> None:
    said = "run.sh:5: NNODES is not set (trainer.nnodes = ''); give --assume NNODES=… or export it"
    assert fault(verl(tmp_path, "$NNODES", "trainer.nnodes")) == said
    in_array = "ARGS=(algorithm.adv_estimator=grpo\n trainer.nnodes=$NODES\n data.train_batch_size=$BATCH)\n"
    launch = 'python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm "${ARGS[@]}"\n'
    both = fault(script(tmp_path, in_array + launch)).splitlines()
    assert [line.partition(";")[0] for line in both] == [
        "run.sh:2: NODES is not set (trainer.nnodes = '')",
        "run.sh:3: BATCH is not set (data.train_batch_size = '')",
    ]


@pytest.mark.parametrize(("word", "way"), [("$MODEL", "--assume MODEL=… or export it"), ("$1", "--arg VALUE")])
def test_a_model_that_is_left_open_is_a_placeholder_that_says_why(tmp_path: Path, word: str, way: str) -> None:
    path = verl(tmp_path, "8", model=word)
    found = reading(path)
    assert found.config.model.path == UNKNOWN_MODEL
    why = found.config.source_of("model.path")
    assert why.endswith(
        f"run.sh:4: {word.replace('$MODEL', 'MODEL')} is not set (actor_rollout_ref.model.path = ''); give {way}"
    )
    assert why in found.notes
    assert reading(path, assume={"MODEL": "x"}, arguments=("x",)).config.model.path == "x"


def test_assumptions_that_nothing_asked_for_are_named(tmp_path: Path) -> None:
    assume = {"foo": "bar", "data.train_batch_size": "7", "NG": "2", "my_token": "hf_x"}
    notes = reading(verl(tmp_path, "$NG", model="m"), "data.train_batch_size=8", assume=assume).notes
    assert "--assume foo=bar was not needed: nothing asked for it" in notes
    assert any(note.startswith("--assume my_token=… was not needed") for note in notes)
    assert not any("--assume NG" in note for note in notes)
    own = "--assume data.train_batch_size=7 was not needed: the launch sets data.train_batch_size itself, and its own value counts"
    assert own in notes


def test_every_wrong_key_of_a_launch_is_named_and_no_value_of_theirs(tmp_path: Path) -> None:
    path = verl(
        tmp_path, "4 data.train_batchsize=4 actor_rollout_ref.rollout.tensor_parallel_size=2 trainer.hf_token=hf_SECRET"
    )
    lines = fault(path).splitlines()
    assert len(lines) == 3 and "hf_SECRET" not in "".join(lines)
    assert "did you mean data.train_batch_size?" in lines[0]
    assert "did you mean actor_rollout_ref.rollout.tensor_model_parallel_size?" in lines[1]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu='8'", "is text, and verl computes with it; give a number, or null"),
        ("actor_rollout_ref.rollout.max_model_len=''", "is empty"),
        ("data.train_batch_size='256'", "is text, and verl computes with it; give a number, such as 1024"),
        ("actor_rollout_ref.rollout.gpu_memory_utilization=null", "is nothing; give a number, such as 0.5"),
        ("actor_rollout_ref.rollout.name=vlm", "is no inference engine of verl; did you mean vllm?"),
        ("trainer.v1.trainer_mode=bogus", "is no mode of verl"),
    ],
)  # fmt: skip
def test_verl_refuses_what_its_trainer_cannot_compute_with(tmp_path: Path, setting: str, said: str) -> None:
    assert said in fault(verl(tmp_path, "8"), setting)


@pytest.mark.parametrize(
    "text",
    [
        "x=x; for i in {1..60}; do x=$x$x; done\n",
        "a=(1 2); for i in {1..60}; do a=(${a[@]} ${a[@]}); done\n",
        "x={a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}; echo {a,b}"
        "{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}\n",
        "f() { f; f; }; f\n",
        "".join(f"a{n}='a{n + 1}+a{n + 1}'\n" for n in range(40)) + "echo $((a0))\n",
    ],
)
def test_a_script_that_grows_without_end_is_one_line_and_soon(tmp_path: Path, text: str) -> None:
    start = time.process_time()
    assert "\n" not in fault(script(tmp_path, text + "python3 -m verl.trainer.main_ppo\n"))
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("a.rollout.tensor_parallel_size", "a.rollout.tensor_model_parallel_size"),
        ("a.actor.gpu_memory", "a.rollout.gpu_memory"),
        ("actor.lr", "a.actor.lr"),
        ("a.actor.entropy_coef", "a.actor.entropy_coeff"),
    ],
)
def test_the_nearest_key_is_of_the_same_section_first(key: str, wanted: str) -> None:
    known = [
        "a.rollout.tensor_model_parallel_size", "a.actor.turbo.tensor_parallel_size", "a.rollout.gpu_memory", "a.actor.lr",
        "a.actor.entropy_coeff", "b.entropy_coef_x",
    ]  # fmt: skip
    assert near(key, known) == f"; did you mean {wanted}?"
    assert near("zzz.qqq", known) == ""


def test_what_took_a_keys_place_is_a_key_of_the_table() -> None:
    trl = {*table("trl")["defaults"], *table("trl")["unset"]}
    for key, sentence in table("trl")["moved"].items():
        assert key not in trl
        assert not sentence.startswith("it is ") or sentence.split()[2].strip(":,") in trl


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("trainer.hf_token", "x", "…"),
        ("env.WANDB_API_KEY", "x", "…"),
        ("reward.foo_password", "x", "…"),
        ("data.prompt_key", "prompt", "prompt"),
        ("actor.ppo_max_token_len_per_gpu", 4096, "4096"),
        ("data.train_files", "https://user:hunter2@host/x", "https://…@host/x"),
    ],
)
def test_no_secret_is_shown(key: str, value: object, text: str) -> None:
    assert shown(key, value) == text


def test_what_a_missing_backslash_cuts_off_is_named_and_a_whole_unknown_word_is_noted(tmp_path: Path) -> None:
    text = (
        VERL.format(key="trainer.nnodes", value="1", model="m").rstrip() + " $(cat more)\n  data.train_batch_size=64\n"
    )
    notes = reading(script(tmp_path, text), assume={"NG": "8"}).notes
    assert any("data.train_batch_size=64 stands alone as a command" in note for note in notes)
    assert "$(cat more) is not known before the run" in notes
