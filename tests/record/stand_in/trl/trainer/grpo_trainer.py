"""A trainer that calls what TRL's calls, in its order, by its names and with its shapes; it learns nothing worth having.

torch is imported when a trainer is made: most of what is tested needs none.
"""

from contextlib import nullcontext
from types import SimpleNamespace

from accelerate.optimizer import AcceleratedOptimizer
from transformers.trainer import Trainer

PROMPTS, G, S_PROMPT, S_RESP, V, END = 2, 4, 6, 5, 11, 1


class GRPOTrainer(Trainer):
    def __init__(self, adapter=False, evaluates=False):
        global torch
        import torch

        super().__init__()
        torch.manual_seed(0)
        self.model, self.ref_model = torch.nn.Embedding(V, V), None if adapter else torch.nn.Embedding(V, V)
        self.model._adapters_disabled, self.model.config = False, SimpleNamespace(vocab_size=V, hidden_size=V)
        self.num_generations, self.reward_func_names, self.rows = G, ["length", "style"], PROMPTS * G
        self.reward_weights, self.eos_token_ids, self._tokenizer = torch.tensor([1.0, 0.5]), [END], None
        self.args = SimpleNamespace(generation_batch_size=self.rows, steps_per_generation=2, evaluates=evaluates)
        self.optimizer = AcceleratedOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.state, self._step, self._metrics = SimpleNamespace(global_step=0), 0, {}

    def _prepare_inputs(self, generation_batch):
        parts = self.args.steps_per_generation
        if self._step % parts == 0:
            order, rows = torch.randperm(len(generation_batch)), len(generation_batch) // parts
            batch = self._generate_and_score_completions(generation_batch)
            batch = {name: x[order] if x.dim() else x for name, x in batch.items()}
            self._buffered_inputs = [
                {name: x[at : at + rows] if x.dim() else x for name, x in batch.items()}
                for at in range(0, len(order), rows)
            ]
        self._step += 1
        return self._buffered_inputs[(self._step - 1) % parts]

    def _generate_and_score_completions(self, inputs):
        prompts, completions, *_ = self._generate([row["prompt"] for row in inputs])
        prompt_mask = torch.ones(len(inputs), S_PROMPT, dtype=torch.int64)
        prompt_mask[:, 0] = 0
        mask = torch.tensor([[int(i < len(ids)) for i in range(S_RESP)] for ids in completions])
        completions = torch.tensor([ids + [0] * (S_RESP - len(ids)) for ids in completions])
        prompts = torch.tensor(prompts)
        scored = torch.cat([prompts, completions], 1), torch.cat([prompt_mask, mask], 1), S_RESP
        with torch.no_grad():
            old, *_ = self._get_per_token_logps_and_entropies(self.model, *scored)
            with self._reference() as model:
                ref, *_ = self._get_per_token_logps_and_entropies(model, *scored)
        rewards = (self._calculate_rewards(inputs, None, None, None) * self.reward_weights).nansum(1)
        self._metrics["reward"] = rewards.mean().item()
        return {
            "prompt_ids": prompts, "prompt_mask": prompt_mask, "completion_ids": completions, "completion_mask": mask,
            "advantages": rewards - rewards.mean(), **self._old(old, mask), "ref_per_token_logps": ref,
            "num_items_in_batch": mask.sum(),
        }  # fmt: skip

    def _old(self, log_probs, mask):
        return {"old_per_token_logps": log_probs}

    def _reference(self):
        """The reference; where there is an adapter, the same model without it."""
        return nullcontext(self.ref_model) if self.ref_model is not None else Without(self.model)

    def _generate(self, prompts):
        lengths = [1 + i % S_RESP for i in range(len(prompts))]
        ids = torch.randint(2, V, (len(prompts), S_RESP)).tolist()
        completions = [[*row[: n - 1], END] if n < S_RESP else row for row, n in zip(ids, lengths, strict=True)]
        self._metrics["completions/mean_length"] = sum(lengths) / len(lengths)
        return [[i // G] * S_PROMPT for i in range(len(prompts))], completions, None

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **_):
        log_probs = model(input_ids[:, :-1]).log_softmax(-1)[:, -logits_to_keep:]
        return log_probs.gather(-1, input_ids[:, -logits_to_keep:, None])[..., 0], log_probs.exp().sum(-1), None

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        lengths = torch.arange(float(len(inputs)))
        return torch.stack([lengths, torch.full_like(lengths, float("nan"))], 1)

    def compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        new, *_ = self._get_per_token_logps_and_entropies(model, ids, mask, S_RESP)
        return -(new * inputs["advantages"][:, None]).mean()

    def _save_checkpoint(self, model, trial): ...

    def log(self, logs, start_time=None):
        logs.update(vars(self).get("_metrics", {}))
        super().log(logs, start_time)


class Without:
    """A model while its adapter is off."""

    def __init__(self, model):
        self.model = model

    def __enter__(self):
        self.model._adapters_disabled = True
        return self.model

    def __exit__(self, *_):
        self.model._adapters_disabled = False
