"""What ended a run: the exception that the others follow from, whose it is, its stage, and the sizes that it states."""

from pathlib import Path

import pytest

from flowledger.cli.imports import imported
from flowledger.ledger.reader import Ledger
from flowledger.ledger.rows import FindingRow, MemoryRow, Row
from flowledger.record.importers import logs, oom
from flowledger.record.importers.notes import Notes
from flowledger.record.importers.source import Source

GIB = 1 << 30
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 58.15 GiB. GPU 0 has a total capacity of 79.11 GiB of which "
    "3.04 GiB is free. Process 4 has 76.06 GiB memory in use. Of the allocated memory 70.24 GiB is allocated by PyTorch, and "
    "3.51 GiB is reserved by PyTorch but unallocated."
)


def read(folder: Path, text: str) -> list[Row]:
    path = folder / "job.log"
    path.write_text(text, encoding="utf-8")
    return list(logs.read(Source(path), Notes()))


def crash(folder: Path, text: str) -> FindingRow:
    (found,) = [row for row in read(folder, text) if isinstance(row, FindingRow) and row.id == "crash"]
    assert found.verdict == "fail"
    return found


UNDER_RAY = f"""(TaskRunner pid=100) step:1 - actor/pg_loss:0.5
Error executing job with overrides: ['algorithm.adv_estimator=grpo']
Traceback (most recent call last):
  File "/v/verl/trainer/ppo/ray_trainer.py", line 1000, in fit
    actor_output = self.actor_rollout_wg.update_actor(batch)
  File "/v/ray/_private/worker.py", line 2782, in get
    raise value.as_instanceof_cause()
ray.exceptions.RayTaskError(OutOfMemoryError): ray::WorkerDict.actor_rollout_update_actor() (pid=72311, ip=192.0.2.2, actor_id=a1, repr=<W object at 0x7f>)
  File "/v/verl/workers/actor/dp_actor.py", line 300, in update_policy
    entropy, log_prob = self._forward_micro_batch(micro_batch=data)
  File "/v/verl/workers/actor/dp_actor.py", line 150, in _forward_micro_batch
    entropy_rmpad = self.compute_entropy_from_logits(logits_rmpad)
{OOM}

Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.
"""


def test_the_far_process_of_ray_is_found_with_its_stage_and_sizes(tmp_path):
    rows = read(tmp_path, UNDER_RAY)
    found = crash(tmp_path, UNDER_RAY)
    assert found.message.startswith("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 58.15 GiB.")
    assert "pid 72311 on 192.0.2.2" in found.message
    assert (found.stage, found.phase, found.step, found.severity) == ("update_actor", "forward", 2, "critical")
    assert any("dp_actor.py:150 in _forward_micro_batch" in line for line in found.evidence)
    assert f"it asked for 58.15 GiB ({round(58.15 * GIB):,} bytes)" in found.evidence
    (memory,) = [row for row in rows if isinstance(row, MemoryRow)]
    assert (memory.kind, memory.instant, memory.step, memory.stage) == ("total", "crash", 2, "update_actor")
    assert memory.allocated == round(70.24 * GIB) and memory.limit == round(79.11 * GIB)
    assert memory.reserved == round(70.24 * GIB) + round(3.51 * GIB)
    assert memory.device_used == round(79.11 * GIB) - round(3.04 * GIB)


def test_of_a_chain_the_cause_is_the_crash_and_the_rest_its_evidence(tmp_path):
    found = crash(tmp_path, '''Traceback (most recent call last):
  File "/v/reward.py", line 3, in compute_score
    return table[key]
           ~~~~~^^^^^
KeyError: 'gsm8k'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/v/loop.py", line 9, in main
    raise RuntimeError("reward failed") from error
RuntimeError: reward failed
''')  # fmt: skip
    assert found.message.startswith("KeyError: 'gsm8k'") and found.stage == "reward"
    assert "raised through RuntimeError: reward failed" in found.evidence


def test_of_many_processes_the_one_that_died_first_of_its_own_is_told(tmp_path):
    found = crash(tmp_path, f'''(WorkerDict pid=2) Traceback (most recent call last):
(WorkerDict pid=3) Traceback (most recent call last):
(WorkerDict pid=2)   File "/v/dp_actor.py", line 7, in compute_log_prob
(WorkerDict pid=3)   File "/v/comm.py", line 9, in all_reduce
(WorkerDict pid=2)     logits = model(ids)
(WorkerDict pid=3)     work.wait()
(WorkerDict pid=3) torch.distributed.DistBackendError: NCCL error: ncclRemoteError: remote process exited or there was a network error
(WorkerDict pid=2) {OOM}
Traceback (most recent call last):
  File "/v/main_ppo.py", line 3, in main
    trainer.fit()
ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
''')  # fmt: skip
    assert found.message.startswith("torch.OutOfMemoryError") and found.stage == "old_log_prob"
    assert "pid 2" in found.message
    assert any("ncclRemoteError" in line for line in found.evidence)
    assert any("ActorDiedError" in line for line in found.evidence)


def test_the_engines_log_has_a_prefix_on_every_line(tmp_path):
    lines = '''Traceback (most recent call last):
  File "/v/vllm/v1/engine/core.py", line 60, in _initialize_kv_caches
    kv_cache_configs = get_kv_cache_configs(...)
ValueError: To serve at least one request with the models's max seq len (32768), (4.00 GiB KV cache is needed, which is larger than the available KV cache memory (3.20 GiB).'''  # fmt: skip
    text = "".join(f"(EngineCore_DP0 pid=9) ERROR 09-01 12:00:00 [core.py:700] {line}\n" for line in lines.splitlines())
    found = crash(tmp_path, text + "RuntimeError: Engine core initialization failed. See root cause above.\n")
    assert found.message.startswith("ValueError: To serve at least one request") and found.stage == "rollout"


@pytest.mark.parametrize(
    ("line", "message", "rank"),
    [
        (
            "[rank3]:[E1129 16:15:21.859 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600050 milliseconds before timing out.",
            "NCCL watchdog timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE", 3,
        ),
        ("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0.", "host out of memory", None),
        ("Signal 9 (SIGKILL) received by PID 1234", "killed by a signal: Signal 9 (SIGKILL)", None),
        (OOM, "torch.OutOfMemoryError: CUDA out of memory", None),
        ("ValueError: No available memory for the cache blocks.", "ValueError: No available memory", None),
    ],
)  # fmt: skip
def test_last_words_without_a_traceback(tmp_path, line, message, rank):
    found = crash(tmp_path, f"step:1 - a:1\n{line}\n")
    assert message in found.message and found.rank == rank


def test_an_exception_that_the_run_went_on_after_is_told_as_such(tmp_path):
    text = 'Traceback (most recent call last):\n  File "/v/r.py", line 1, in compute_score\nTimeoutError: too slow\n'
    rows = read(tmp_path, f"step:1 - a:1\n{text}step:2 - a:1\n")
    assert [(row.id, row.verdict) for row in rows if isinstance(row, FindingRow)] == [("exception", "pass")]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 23.69 GiB total capacity; 22.33 GiB already allocated; 14.94 MiB free; "
            "22.60 GiB reserved in total by PyTorch)",
            {"asked": 20 << 20, "capacity": round(23.69 * GIB), "allocated": round(22.33 * GIB), "free": round(14.94 * (1 << 20)), "reserved": round(22.6 * GIB)},
        ),
        (
            "NPU out of memory. Tried to allocate 2.00 GiB (NPU 1; 60.97 GiB total capacity; 56.11 GiB already allocated; 56.11 GiB current active; "
            "1.20 GiB free; 57.90 GiB reserved in total by PyTorch)",
            {"asked": 2 * GIB, "capacity": round(60.97 * GIB), "allocated": round(56.11 * GIB), "free": round(1.2 * GIB), "reserved": round(57.9 * GIB)},
        ),
        ("list index out of range", {}),
    ],
)  # fmt: skip
def test_sizes_of_older_and_other_allocators(message, expected):
    assert {name: size for name, size in oom.sizes(message)._asdict().items() if size is not None} == expected


def test_a_far_process_of_a_far_process_with_the_remains_of_progress_bars(tmp_path):
    found = crash(tmp_path, f'''2025-10-18 15:15:23 Traceback (most recent call last):
2025-10-18 15:15:23   File "/v/ray/worker.py", line 937, in get_objects██████████| 37.0/37.0 [08:36<00:00, 3.90s/it]
2025-10-18 15:15:23     raise value.as_instanceof_cause()
2025-10-18 15:15:23 ray.exceptions.RayTaskError(OutOfMemoryError): ray::Runner.run() (pid=10, ip=192.0.2.7, actor_id=3, repr=<R>)   | 1.00/36.0 [00:04<02:52, 4.93s/it]
2025-10-18 15:15:23   File "/v/verl/trainer/ray_trainer.py", line 657, in fit
2025-10-18 15:15:23     actor_output = self.actor_rollout_ref_wg.update_actor(batch)
2025-10-18 15:15:23 ray.exceptions.RayTaskError(OutOfMemoryError): ray::WorkerDict.actor_rollout_ref_update_actor() (pid=11, ip=192.0.2.7, actor_id=b, repr=<W>)
2025-10-18 15:15:23   File "/v/verl/single_controller/ray/base.py", line 432, in func
2025-10-18 15:15:23     return getattr(self.worker_dict[key], name)(*args)
2025-10-18 15:15:23 {OOM}
''')  # fmt: skip
    assert (
        found.message.startswith("torch.OutOfMemoryError")
        and found.stage == "update_actor"
        and "pid 11 on" in found.message
    )
    assert "frame /v/ray/worker.py:937 in get_objects" in found.evidence


def test_an_actor_that_died_while_it_was_made_has_no_head(tmp_path):
    found = crash(tmp_path, '''(pid=7) Exception raised in creation task: The actor died because of an error raised in its creation task, ray::vLLMHttpServer.__init__() (pid=7, ip=192.0.2.1, repr=<S>)
(pid=7)   File "/v/verl/workers/rollout/vllm.py", line 7, in __init__
(pid=7)     self.engine = AsyncLLM(...)
(pid=7) ValueError: Free memory on device (30.1/79.1 GiB) on startup is less than desired GPU memory utilization (0.9, 71.2 GiB).
''')  # fmt: skip
    assert found.message.startswith("ValueError: Free memory on device") and found.stage == "rollout"


def test_an_older_watchdog_and_a_line_number_before_it(tmp_path):
    for head in (
        "[80746] [rank4]:[E321 02:07:08.4 ProcessGroupNCCL.cpp:607] [Rank 4]",
        "[rank4]:[E ProcessGroupNCCL.cpp:563] [Rank 4]",
    ):
        found = crash(
            tmp_path,
            f"{head} Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=GATHER) ran for 6 milliseconds\n",
        )
        assert found.rank == 4 and "OpType=GATHER" in found.message


def test_memory_as_the_first_versions_of_verl_printed_it(tmp_path):
    (row,) = [
        row
        for row in read(
            tmp_path, "(WorkerDict pid=3) before init cache memory allocated: 5.96926464GB, reserved: 6.079643648GB\n"
        )
        if isinstance(row, MemoryRow)
    ]
    assert (row.instant, row.allocated, row.reserved) == ("before init cache", 5969264640, 6079643648)


def test_a_crash_that_a_later_log_goes_on_after_ended_nothing(tmp_path):
    crashed = "step:1 - a:1\n" + UNDER_RAY.replace("step:1 ", "step:2 ")
    (tmp_path / "log_1").write_text(crashed)
    (tmp_path / "log_2").write_text("step:2 - a:1\nstep:3 - a:1\n")
    for sources, ids in ((["log_1"], ["crash"]), (["log_1", "log_2"], ["exception"])):
        run = tmp_path / f"run{len(sources)}"
        imported([tmp_path / source for source in sources], run)
        with Ledger(run) as ledger:
            found = ledger.rows("SELECT id, verdict FROM findings ORDER BY id")
        assert [row["id"] for row in found if row["id"] != "import_remarks"] == ids


@pytest.mark.parametrize(
    ("head", "group"),
    [
        ("[Rank 1]", ""),
        ("[PG 3 Rank 1]", " of group 3"),
        ("[PG ID 0 PG GUID 0(default_pg) Rank 1]", " of group 0"),
    ],
)
def test_what_each_rank_waits_in_is_kept_though_the_lines_differ_by_numbers_alone(tmp_path, head, group):
    said = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum={}, OpType=_ALLGATHER_BASE, NumelIn=1, Timeout(ms)=600000)"
    lines = [
        f"[rank{rank}]:[E1129 16:15:21.859 ProcessGroupNCCL.cpp:616] {head} {said.format(number)} ran for 600042 milliseconds\n"
        for rank, number in ((2, 48211), (5, 48213))
    ]
    found = crash(tmp_path, "step:1 - a:1\n" + "".join(lines))
    assert [line for line in found.evidence if "waits in" in line] == [
        f"rank 2 waits in collective 48211 ALLGATHER{group}", f"rank 5 waits in collective 48213 ALLGATHER{group}",
    ]  # fmt: skip
    assert found.rank == 2


NUMBERS = "{{'loss': 0.01, 'reward': 0.41, 'epoch': {epoch}}}\n"
RAISED = f'Traceback (most recent call last):\n  File "/w/train.py", line 40, in <module>\n    trainer.train()\n{OOM}\n'
BARS = "  0%|     | 0/100 [00:10<10:00,  6.10s/it]  1%|#    | 1/100 [00:11<10:00,  6.10s/it]\n"


@pytest.mark.parametrize(
    ("text", "step"),
    [
        (NUMBERS.format(epoch=0.01) + RAISED, 2),
        (NUMBERS.format(epoch=0.01) + NUMBERS.format(epoch=0.02) + RAISED, 3),
        (BARS + NUMBERS.format(epoch=0.01) + RAISED, 2),
    ],
    ids=["one dict", "two dicts", "bars in one line"],
)
def test_a_dict_that_waits_for_its_bar_is_no_progress_after_a_crash(tmp_path: Path, text: str, step: int) -> None:
    assert crash(tmp_path, text).step == step


def test_a_trainer_that_prints_numbers_after_an_exception_went_on(tmp_path: Path) -> None:
    rows = read(tmp_path, NUMBERS.format(epoch=0.01) + RAISED + NUMBERS.format(epoch=0.02))
    assert [row.id for row in rows if isinstance(row, FindingRow)] == ["exception"]
