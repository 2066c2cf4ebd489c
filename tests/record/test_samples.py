"""One row a sample and stage, from tensors with a value for each sample."""

from conftest import PROBES
from flowledger.flow.seams import Probe


def test_the_rollout_tells_lengths_group_and_end_of_each_sample(record, job):
    with record() as rows:
        job.run()
    found = {row.sample_id: row for row in rows.of("samples", stage="rollout")}
    assert [found[str(n)].prompt_length for n in range(4)] == [2, 2, 1, 1]  # [B_prompt] repeated over G
    assert [found[str(n)].response_length for n in range(4)] == [3, 2, 1, 3]
    assert [found[str(n)].finish_reason for n in range(4)] == ["length", "stop", "abort", "timeout"]
    assert [found[str(n)].group_id for n in range(4)] == ["0", "0", "1", "1"]


def test_each_sample_is_trained_where_its_micro_batch_stood(record, job):
    with record() as rows:
        job.run(2)
    trained = {row.sample_id: row.trained for row in rows.of("samples", stage="update_actor") if row.trained}
    assert sorted(trained, key=int) == [str(n) for n in range(8)]
    places = {
        sample: [(t.epoch, t.mini_batch, t.micro_batch, t.stop) for t in found] for sample, found in trained.items()
    }
    assert places["0"] == [(0, 0, 0, 5)]
    assert places["3"] == [(0, 1, 1, 5)]


def test_reward_components_go_by_name_and_drops_by_reason(record):
    import stage_functions
    import torch

    def reward(*, sample_id):
        return {
            "reward_components": torch.tensor([[1.0, 0.0], [0.5, 2.0]]), "names": ("task", "format"),
            "dropped": (None, "timeout"), "reward": torch.tensor([1.0, 2.5]),
        }  # fmt: skip

    stage_functions.reward = reward
    probe = Probe(
        stage="reward", target="stage_functions:reward", args={"sample_id": "sample_id"},
        results={
            "reward_components": "reward_components", "reward": "reward", "names": "@component_names",
            "dropped": "@dropped_reason",
        },
    )  # fmt: skip
    with record(probes=(*PROBES, probe)) as rows:
        stage_functions.reward(sample_id=torch.tensor([7, 8]))
    del stage_functions.reward
    first, second = rows.of("samples")
    assert (first.sample_id, first.rewards, first.reward, first.dropped_reason) == (
        "7", {"task": 1.0, "format": 0.0}, 1.0, None,
    )  # fmt: skip
    assert (second.rewards, second.dropped_reason) == ({"task": 0.5, "format": 2.0}, "timeout")
