import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import torch

from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils import losses


class TrainingWorker:
    model_config = SimpleNamespace(
        tokenizer=SimpleNamespace(eos_token_id=28), generation_config=SimpleNamespace(eos_token_id=[38, 16])
    )

    def __init__(self):
        self.engine = FSDPEngineWithLMHead()

    def infer_batch(self, data):
        return self.engine.forward_backward_batch(data, None, forward_only=True)

    def train_mini_batch(self, data):
        return self.train_batch(data)

    def train_batch(self, data):
        made = self.engine.forward_backward_batch(data, losses.ppo_loss)
        self.engine.optimizer_step()
        return made


class ActorRolloutRefWorker:
    config = SimpleNamespace(rollout=SimpleNamespace(n=2, response_length=4))

    def init_model(self):
        self.actor = TrainingWorker()

    def compute_log_prob(self, data):
        self.actor.infer_batch(data)

    def compute_ref_log_prob(self, data):
        self.actor.infer_batch(data)

    def update_actor(self, data):
        self.actor.train_mini_batch(data)

    def update_weights(self, global_steps=None):
        asyncio.run(self._update_weights(global_steps))

    async def _update_weights(self, global_steps):
        weights, _ = self.actor.engine.get_per_tensor_param()
        await asyncio.sleep(0)
        torch.save(
            [(name, weight.clone()) for name, weight in weights], Path(os.environ["SENT"]) / f"{global_steps}.pt"
        )

    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0): ...
    def load_checkpoint(self, local_path): ...
