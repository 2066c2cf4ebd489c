"""A trainer that calls what TRL's calls, in its order, by its names and with its shapes; it learns nothing worth having.

torch is imported when a trainer is made: most of what is tested needs none.
"""

from types import SimpleNamespace

from accelerate.accelerator import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from transformers.trainer_callback import CallbackHandler

PROMPTS, G, S_PROMPT, S_RESP, V = 2, 4, 6, 5, 11


class GRPOTrainer:
    def __init__(self):
        global torch
        import torch

        torch.manual_seed(0)
        self.model, self.ref_model = torch.nn.Embedding(V, V), torch.nn.Embedding(V, V)
        self.num_generations, self.reward_func_names = G, ["length"]
        self.accelerator, self.callback_handler = Accelerator(), CallbackHandler()
        self.optimizer = AcceleratedOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.state = SimpleNamespace(global_step=0)

    def train(self, steps=2, micro_batches=2):
        for _ in range(steps):
            self.callback_handler.on_step_begin(None, self.state, None)
            batch = self._generate_and_score_completions([{"prompt": "a"}] * (PROMPTS * G))
            rows = PROMPTS * G // micro_batches
            for i in range(micro_batches):
                loss = self.compute_loss(self.model, {name: x[i * rows : (i + 1) * rows] for name, x in batch.items()})
                self.accelerator.backward(loss)
            self.optimizer.step()
            self.state.global_step += 1
            self.callback_handler.on_step_end(None, self.state, None)
            self.log({"loss": float(loss.detach()), "reward": 0.5})
        self._save_checkpoint(self.model, None)

    def _generate_and_score_completions(self, inputs):
        prompts, completions, *_ = self._generate([row["prompt"] for row in inputs])
        ids, mask = torch.cat([prompts, completions], 1), torch.ones(len(inputs), S_PROMPT + S_RESP, dtype=torch.int64)
        with torch.no_grad():
            old, *_ = self._get_per_token_logps_and_entropies(self.model, ids, mask, S_RESP)
            ref, *_ = self._get_per_token_logps_and_entropies(self.ref_model, ids, mask, S_RESP)
        rewards = self._calculate_rewards(inputs, None, None, None)
        return {
            "prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts), "completion_ids": completions,
            "completion_mask": torch.ones_like(completions), "advantages": rewards[:, 0] - rewards.mean(),
            "old_per_token_logps": old, "ref_per_token_logps": ref,
        }  # fmt: skip

    def _generate(self, prompts):
        return torch.ones(len(prompts), S_PROMPT, dtype=torch.int64), torch.randint(V, (len(prompts), S_RESP)), None

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **_):
        log_probs = model(input_ids[:, :-1]).log_softmax(-1)[:, -logits_to_keep:]
        return log_probs.gather(-1, input_ids[:, -logits_to_keep:, None])[..., 0], log_probs.exp().sum(-1), None

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        return torch.arange(float(len(inputs)))[:, None]

    def compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        new, *_ = self._get_per_token_logps_and_entropies(model, ids, torch.ones_like(ids), S_RESP)
        return -(new * inputs["advantages"][:, None]).mean()

    def _save_checkpoint(self, model, trial): ...
    def log(self, logs, start_time=None): ...
