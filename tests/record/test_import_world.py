"""What an import knows of the job as a whole: how it ended, how many ranks it had, and how they were cut."""

import json
from pathlib import Path

import pytest

from flowledger.ledger.directory import open_run
from flowledger.ledger.manifest import Manifest
from flowledger.ledger.reader import Ledger
from flowledger.record.importers.imported import import_into
from flowledger.record.importers.world import heard_of, mesh, ranks
from flowledger.show.page.book import Book
from flowledger.show.page.overview import facts

STEP = "(TaskRunner pid=100) step:{n} - actor/grad_norm:0.5 - training/global_step:{n}\n"
OOM = (
    "({who}) Traceback (most recent call last):\n"
    '({who})   File "/verl/workers/actor/dp_actor.py", line 500, in update_policy\n'
    "({who})     loss.backward()\n"
    "({who}) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 10.43 GiB. GPU 0 has a total capacity of 79.11 GiB of which 7.62 GiB is free.\n"
)
CONFIG = {
    "actor_rollout_ref": {"actor": {"strategy": "fsdp", "ulysses_sequence_parallel_size": 2}, "rollout": {"n": 4}},
    "data": {"train_batch_size": 64}, "trainer": {"nnodes": 2, "n_gpus_per_node": 8}, "critic": {}, "algorithm": {},
}  # fmt: skip


def manifest(tmp_path: Path, text: str, name: str = "job.log") -> Manifest:
    (tmp_path / name).write_text(text)
    import_into([tmp_path / name], tmp_path / "run")
    return open_run(tmp_path / "run").manifest


def test_a_log_that_ends_in_a_crash_is_a_crashed_run_of_the_workers_that_it_names(tmp_path: Path) -> None:
    who = [f"WorkerDict pid={5200 + n}, ip=10.0.0.2" for n in range(3)]
    made = manifest(tmp_path, "".join(STEP.format(n=n) for n in range(3)) + "".join(OOM.format(who=one) for one in who))
    assert (made.state, made.ranks, made.mesh) == ("crashed", 3, {})
    with Ledger(tmp_path / "run") as ledger:
        told = dict(facts(Book(ledger=ledger)))
    assert told["fact_state"] == "crashed" and told["fact_mesh"]["en"] == "3 ranks or more"


def test_a_log_that_went_on_after_an_exception_is_closed_and_of_nobody_known(tmp_path: Path) -> None:
    one = OOM.format(who="TaskRunner pid=100")
    made = manifest(tmp_path, one + "".join(STEP.format(n=n) for n in range(3)))
    assert (made.state, made.ranks) == ("closed", 0)
    with Ledger(tmp_path / "run") as ledger:
        assert "fact_mesh" not in dict(facts(Book(ledger=ledger)))  # not "one rank": nothing says so


def test_a_run_that_somebody_stopped_was_interrupted(tmp_path: Path) -> None:
    stop = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    main()\nKeyboardInterrupt\n'
    assert manifest(tmp_path, STEP.format(n=1) + stop).state == "interrupted"


def test_ranks_of_a_launcher_are_counted_from_0(tmp_path: Path) -> None:
    text = STEP.format(n=1) + "".join(OOM.format(who="").replace("() ", f"[rank{n}]: ") for n in (2, 5))
    assert manifest(tmp_path, text).ranks == 6


def test_the_configuration_in_a_log_says_how_many_and_along_which_axes(tmp_path: Path) -> None:
    made = manifest(
        tmp_path,
        json.dumps(CONFIG).replace('"', "'").replace("{'actor_", "{'actor_", 1).replace(", 'data'", ",\n 'data'")
        + "\n"
        + STEP.format(n=1),
    )
    assert (made.ranks, made.mesh) == (16, {"dp": 8, "sp": 2}) and made.framework == "verl"


MEGATRON = {
    "actor_rollout_ref": {"actor": {"strategy": "megatron", "ulysses_sequence_parallel_size": 1, "megatron": {
        "tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2, "context_parallel_size": 1}}},
}  # fmt: skip


def test_axes_are_those_of_the_strategy_and_only_where_they_fit() -> None:
    assert mesh("verl", MEGATRON, 32) == {"dp": 4, "tp": 4, "pp": 2, "cp": 1}
    assert mesh("verl", MEGATRON, 12) == {}  # 12 is no multiple of 8: one of the two is not what we take it for
    assert mesh(None, MEGATRON, 32) == {} and mesh("verl", {}, 8) == {}


@pytest.mark.parametrize(
    ("command", "many"),
    [
        ("torchrun --nproc_per_node=8 --nnodes=2 train.py", 16), ("torchrun --nproc-per-node 4 train.py", 4), ("accelerate launch --num_processes 6 x.py", 6),
        ("python3 -m verl.trainer.main_ppo trainer.n_gpus_per_node=8 trainer.nnodes=4", 32), ("python train.py", 0), (None, 0),
    ],
)  # fmt: skip
def test_a_launch_says_how_many(command: str | None, many: int) -> None:
    assert ranks(None, {}, command, None) == many


def test_what_is_told_counts_before_what_was_heard() -> None:
    assert ranks("verl", CONFIG, "torchrun --nproc_per_node=8", 4) == 16
    assert ranks("verl", {}, "torchrun --nproc_per_node=8", 4) == 4
    assert ranks("verl", {"trainer": {"nnodes": True, "n_gpus_per_node": -8}}, None, None) == 0
    assert heard_of([1], 3, []) == 3 and heard_of([5], 3, ["of GPU 1 …"]) == 6 and heard_of([], 0, []) == 0
    assert heard_of([], 1, ["CUDA out of memory. GPU 3 has a total capacity of 79.11 GiB"]) == 4


@pytest.mark.parametrize(
    ("command", "many", "least"),
    [
        ("torchrun --nnodes=1:4 --nproc_per_node=8 train.py", 0, 8),  # one to four machines: eight ranks or more
        ("torchrun --nnodes 2:2 --nproc-per-node 4 train.py", 8, 8),
        ('torchrun --nnodes="2" --nproc_per_node="4" train.py', 8, 8), ("torchrun --nnodes='1:4' --nproc_per_node=8 train.py", 0, 8),
        ("torchrun --nnodes=$NNODES --nproc_per_node=8 train.py", 0, 8), ("torchrun --nnodes=1:max --nproc_per_node=8 train.py", 0, 8),
        ("torchrun --nnodes=4:1 --nproc_per_node=8 train.py", 0, 0),  # no range
        ("torchrun --nproc_per_node=0 train.py", 0, 0), ("torchrun --nnodes=999999 --nproc_per_node=99999 train.py", 0, 0),
        ("accelerate launch --num_processes 9999999 x.py", 0, 0),
    ],
)  # fmt: skip
def test_a_launch_of_as_many_machines_as_come_says_how_many_at_least(command: str, many: int, least: int) -> None:
    assert ranks(None, {}, command, None) == many and heard_of([], 0, [], command) == least


@pytest.mark.parametrize(
    ("line", "many"),
    [
        ("torchrun --nproc_per_node=8 --nnodes=2 train_grpo.py", 16), ("$ torchrun --nproc_per_node 4 train_grpo.py", 4),
        ("CUDA_VISIBLE_DEVICES=0,1 accelerate launch --num_processes 2 train_grpo.py", 2), ("Running command: /opt/bin/torchrun --nproc-per-node 4 -m trl.grpo", 4),
        ("python3 -m torch.distributed.run --nproc_per_node=4 train_grpo.py", 4), ("+ torchrun --nproc_per_node=8 train.py", 8),
        ("torchrun is used to train with --nproc_per_node=8 processes", 0), ("accelerate and deepspeed train.py --num_processes 6 were tried", 0),
        ("torchrun --nnodes=1:4 --nproc_per_node=8 train_grpo.py", 8),
    ],
)  # fmt: skip
def test_a_launch_is_read_with_the_shells_plus_and_without(tmp_path: Path, line: str, many: int) -> None:
    assert manifest(tmp_path, f"{line}\n" + STEP.format(n=1)).ranks == many


@pytest.mark.parametrize("who", ["[rank123456]: ", "[rank1234567890]: ", "[default999999]:", "[Rank 123456] "])
def test_a_number_that_no_rank_has_is_none(tmp_path: Path, who: str) -> None:
    text = STEP.format(n=1) + OOM.format(who="").replace("() ", who).replace("GPU 0 has", "GPU has")
    assert manifest(tmp_path, text).ranks == 0
    with Ledger(tmp_path / "run") as ledger:
        assert ledger.rows("select count(*) as many from findings where rank is not null")[0]["many"] == 0
