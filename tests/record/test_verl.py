"""verl's driver, and a worker of it, recorded from outside: a stand-in calls what verl calls, in processes of their own."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowledger.diagnose import agreement
from flowledger.ledger.reader import Ledger

STAND_IN = Path(__file__).parent / "stand_in"
DRIVER = "from verl.trainer.ppo.ray_trainer import RayPPOTrainer; t = RayPPOTrainer(); t.init_workers(); t.fit()"
WORKER = """
from verl.batch import for_workers, sampled
from verl.workers.engine_workers import ActorRolloutRefWorker
worker = ActorRolloutRefWorker()
worker.init_model()
worker.update_weights(0)
for step in (1, 2):
    worker.compute_log_prob(for_workers(sampled(step)))
    worker.update_actor(for_workers(sampled(step)))
    worker.update_weights(step)
"""
CRITIC = """
from verl.batch import for_workers, sampled
from verl.workers.engine_workers import TrainingWorker
critic = TrainingWorker()
for step in (1, 2):
    critic.infer_batch(for_workers(sampled(step)))
    critic.train_mini_batch(for_workers(sampled(step)))
"""
ENGINE = """
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
engine = vLLMColocateWorkerExtension()
for _ in range(3):
    engine.update_weights_from_ipc()
"""
WITHOUT_PADDING = """
from verl.batch import sampled, without_padding
from verl.workers.engine_workers import ActorRolloutRefWorker
worker = ActorRolloutRefWorker()
worker.init_model()
data = without_padding(sampled(1))
worker.compute_log_prob(data)
worker.update_actor(data)
print([row.tolist() for row in data["input_ids"].unbind()], [row.tolist() for row in data["rollout_log_probs"].unbind()])
"""
LAUNCHER = """
import os, subprocess, sys
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
get_ppo_ray_runtime_env()
subprocess.run([sys.executable, "-c", os.environ["WORKER"]], env=dict(os.environ, RANK="1", WORLD_SIZE="2"), check=True)
subprocess.run([sys.executable, "-c", os.environ["ENGINE"]], check=True)
"""


def job(code: str, **environment: str) -> str:
    own = {name: value for name, value in os.environ.items() if not name.startswith("FLOWLEDGER")}
    own |= {"PYTHONPATH": str(STAND_IN), "PYTHONDONTWRITEBYTECODE": "1"} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], env=own, capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def rows(path: Path, query: str) -> list[tuple[object, ...]]:
    with Ledger(path) as ledger:
        return ledger.query(query)[1]


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    path = tmp_path_factory.mktemp("driver") / "run"
    return path, job(DRIVER, FLOWLEDGER_RUN=str(path))


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    """A worker of two, and the engine that it sends its weights to."""
    folder = tmp_path_factory.mktemp("worker")
    (folder / "sent").mkdir()
    job(LAUNCHER, FLOWLEDGER_RUN=str(folder / "run"), SENT=str(folder / "sent"), WORKER=WORKER, ENGINE=ENGINE)
    return folder / "run"


def test_it_changes_nothing(driver):
    assert driver[1] == job(DRIVER)


def test_the_driver_is_no_rank_and_its_timers_are_the_stages_of_its_steps(driver):
    spans = rows(driver[0], "SELECT step, name FROM spans WHERE event = 'end' AND span_kind = 'stage' ORDER BY seq")
    stages = ("rollout", "reward", "old_log_prob", "advantage", "update_actor", "weight_sync", "step")
    assert spans == [(step, name) for step in (1, 2) for name in stages]
    assert rows(driver[0], "SELECT role, rank FROM processes") == [("driver", None)]


def test_a_worker_knows_why_each_response_ended(worker):
    """[…, 28], […, 38] and […, 16] end a response for the tokenizer or the model; four tokens are the limit."""
    found = rows(
        worker,
        "SELECT step, list(finish_reason ORDER BY finish_reason) FROM samples_merged GROUP BY step ORDER BY step",
    )
    assert found == [(1, ["length", "length", "stop", None]), (2, ["length", "stop", "stop", None])]


def test_the_drivers_batches_have_the_flows_names_and_sizes(driver):
    found = dict(
        rows(driver[0], "SELECT tensor_name, list(DISTINCT dims) FROM tensors WHERE stage = 'rollout' GROUP BY 1")
    )
    assert found["response_ids"] == ["B_prompt*G, S_resp"]
    assert found["attention_mask"] == ["B_prompt*G, S_prompt + S_resp"]
    assert set(found) == {
        "prompt_ids", "response_ids", "response_mask", "full_sequence", "attention_mask", "position_ids",
        "rollout_log_prob", "token_level_reward",
    }  # fmt: skip
    with Ledger(driver[0]) as ledger:
        bound = ledger.directory.manifest.bindings
    assert (bound["B_prompt"], bound["G"]) == (2, 2)


def test_a_sample_is_followed_from_its_rollout_on(driver):
    found = rows(
        driver[0],
        "SELECT group_id, versions, prompt_length, response_length, reward FROM samples_merged ORDER BY group_id, reward",
    )
    assert found == [
        row
        for step in (1, 2)
        for row in (
            (f"{step}-a", [step - 1], 2, 2, 0.0), (f"{step}-a", [step - 1], 2, 4, 1.0),
            (f"{step}-b", [step - 1], 3, 4, 0.25), (f"{step}-b", [step - 1], 3, 3, 0.5),
        )
    ]  # fmt: skip


def test_its_metrics_have_canonical_names_and_are_compared_with_the_samples(driver):
    told = rows(
        driver[0], "SELECT step, name, raw_name, value FROM metrics WHERE raw_name LIKE 'critic/%' ORDER BY step"
    )
    assert told == [(step, "reward/mean", "critic/score/mean", 0.4375) for step in (1, 2)]
    with Ledger(driver[0]) as ledger:
        (finding,) = agreement.check(ledger)
    assert (finding.id, finding.verdict) == (
        "metrics_agree",
        "pass",
    )  # mean reward, and mean length of (4 + 2 + 3 + 4) / 4


def test_a_worker_is_a_rank_and_its_passes_are_seen_by_micro_batch(worker):
    assert rows(worker, "SELECT role, rank FROM processes ORDER BY role") == [
        ("actor", 1), ("launcher", None), ("rollout", None),
    ]  # fmt: skip
    with Ledger(worker) as ledger:
        assert ledger.mesh == {"dp": 2}
    passes = rows(
        worker,
        "SELECT DISTINCT stage, step, micro_batch, local_shape, padding, numel FROM tensors WHERE tensor_name = 'new_log_prob' "
        "ORDER BY ALL",
    )
    # prompts of 2, 2, 3, 3 tokens and responses of 4, 2, 3, 4: sequences of 6 and 4, then of 6 and 7
    assert passes == [
        (stage, step, micro, [2, longest], "jagged", tokens)
        for stage in ("old_log_prob", "update_actor")
        for step in (1, 2)
        for micro, longest, tokens in ((0, 6, 10), (1, 7, 13))
    ]
    trained = rows(worker, "SELECT trained FROM samples_merged WHERE step = 1")
    assert sorted((one["micro_batch"], one["stop"]) for (several,) in trained for one in several) == [
        (0, 4), (0, 6), (1, 6), (1, 7),
    ]  # fmt: skip


def test_weights_are_the_same_where_they_arrive(worker):
    with Ledger(worker) as ledger:
        found = {finding.id: finding for finding in agreement.check(ledger)}["weights_arrived"]
    assert (found.verdict, found.message) == ("pass", "3 synchronisations of weights, as sent and as received: equal")
    sent = rows(worker, "SELECT value FROM metrics WHERE name = 'weight_sync/sent_bytes'")
    assert sent == [(6 * 4 + 4 * 2,)] * 3
    checksums = rows(worker, "SELECT DISTINCT value FROM metrics WHERE name = 'weight_sync/sent_checksum'")
    assert len(checksums) == 3  # they were trained in between


def test_a_critic_has_stages_of_its_own(tmp_path):
    job(CRITIC, FLOWLEDGER_RUN=str(tmp_path / "run"))
    stages = rows(
        tmp_path / "run", "SELECT name, step FROM spans WHERE event = 'end' AND stage IS NOT NULL ORDER BY seq"
    )
    assert stages == [(name, step) for step in (0, 1) for name in ("values", "update_critic")]
    read = rows(tmp_path / "run", "SELECT DISTINCT stage FROM tensors WHERE tensor_name = 'response_ids' ORDER BY 1")
    assert read == [("update_critic",), ("values",)]


def test_a_killed_process_does_not_keep_the_others_of_its_job_out(tmp_path):
    path, common = tmp_path / "run", {"FLOWLEDGER_JOB": "one"}
    killed = (
        "import os, signal; from verl.trainer.constants_ppo import get_ppo_ray_runtime_env; get_ppo_ray_runtime_env()"
    )
    with pytest.raises(AssertionError, match="-9"):
        job(f"{killed}; os.kill(os.getpid(), signal.SIGKILL)", FLOWLEDGER_RUN=str(path), **common)
    job(DRIVER, FLOWLEDGER_RUN=str(path), **common)
    with Ledger(path) as ledger:
        assert ledger.directory.state == "closed"
        assert ledger.query("SELECT count(*) FROM spans WHERE name = 'step' AND event = 'end'")[1] == [(2,)]


def test_tokens_of_a_batch_without_padding_stand_where_they_stand_in_their_sample(tmp_path):
    printed = job(
        WITHOUT_PADDING, FLOWLEDGER_RUN=str(tmp_path / "run"), FLOWLEDGER_LEVEL="tokens", FLOWLEDGER_GROUPS="2"
    )
    ids, log_probs = ast.literal_eval(f"[{printed.strip().replace('] [', '], [')}]")
    found = rows(
        tmp_path / "run",
        "SELECT sample_id, list(token_id ORDER BY position), list(rollout_log_prob ORDER BY position) FROM tokens_merged "
        "GROUP BY 1 ORDER BY 1",
    )
    assert [sample for sample, *_ in found] == ["1-a_0", "1-a_1", "1-b_0", "1-b_1"]
    for (_, tokens, said), whole, response in zip(found, ids, log_probs, strict=True):
        assert tokens == whole
        prompt = len(whole) - len(response)
        assert said[:prompt] == [None] * prompt
        assert said[prompt:] == pytest.approx(response)


def test_a_reward_loop_has_a_call_for_each_sample(tmp_path):
    code = "import asyncio; from verl.experimental.reward_loop.reward_loop import RewardLoopWorker as R; "
    printed = job(code + "print(asyncio.run(R().compute_score_batch([1, 2, 3])))", FLOWLEDGER_RUN=str(tmp_path / "run"))
    assert printed == "[{'reward_score': 1.0}, {'reward_score': 2.0}, {'reward_score': 3.0}]\n"
    found = rows(
        tmp_path / "run",
        "SELECT processes.role, stage, count(*) FROM spans JOIN processes USING (process) GROUP BY ALL",
    )
    assert found == [("reward", "reward", 3)]


def test_a_process_whose_variables_came_late_is_found_as_a_plugin(tmp_path):
    late = f"import os; os.environ['FLOWLEDGER_RUN'] = {str(tmp_path / 'run')!r}; import flowledger.record.plugin; "
    job(late + DRIVER)
    assert rows(tmp_path / "run", "SELECT count(*) FROM spans WHERE name = 'step' AND event = 'end'") == [(2,)]
