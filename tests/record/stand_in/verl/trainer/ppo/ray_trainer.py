from types import SimpleNamespace

import torch

from verl.batch import prompts, union
from verl.checkpoint_engine.base import CheckpointEngineManager
from verl.experimental.agent_loop.agent_loop import AgentLoopManager
from verl.utils.profiler.performance import marked_timer
from verl.utils.tracking import Tracking


def compute_advantage(data, adv_estimator=None):
    data.batch["token_level_rewards"] = data.batch["rm_scores"]
    data.batch["advantages"] = data.batch["returns"] = data.batch["response_mask"].float()
    return data


class RayPPOTrainer:
    config = SimpleNamespace(
        data=SimpleNamespace(train_batch_size=2),
        actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(n=2)),
    )

    def __init__(self):
        self.rollouts, self.sync = AgentLoopManager(), CheckpointEngineManager()

    def init_workers(self): ...

    def fit(self):
        self.sync.update_weights(global_steps=0)
        for step in (1, 2):
            self.one_step(step, {}, {})

    def one_step(self, step, timing_raw, metrics):
        with marked_timer("start_profile", timing_raw):
            pass
        with marked_timer("step", timing_raw):
            with marked_timer("gen", timing_raw, color="red"):
                asked = prompts(step)
                batch = union(asked, self.rollouts.generate_sequences(asked))
            with marked_timer("reward", timing_raw):
                metrics["critic/score/mean"] = float(batch.batch["rm_scores"].sum(-1).mean())
            with marked_timer("old_log_prob", timing_raw):
                old, _ = self._compute_old_log_prob(batch)
                batch.batch |= {"old_log_probs": old.batch["old_log_probs"]}
            with marked_timer("adv", timing_raw):
                batch = compute_advantage(batch, adv_estimator="grpo")
            with marked_timer("update_actor", timing_raw):
                self._update_actor(batch)
            with marked_timer("update_weights", timing_raw):
                self.sync.update_weights(global_steps=step)
        metrics |= {"response_length/mean": 3.25, **{f"timing_s/{name}": value for name, value in timing_raw.items()}}
        Tracking().log(data=metrics, step=step)

    def _compute_old_log_prob(self, batch):
        return SimpleNamespace(batch={"old_log_probs": torch.rand(4, 4), "entropys": torch.rand(4, 4)}), 0.5

    def _compute_ref_log_prob(self, batch): ...
    def _compute_values(self, batch): ...

    def _update_actor(self, batch): ...
