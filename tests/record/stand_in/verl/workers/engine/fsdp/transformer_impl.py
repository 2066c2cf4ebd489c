import torch

from verl.batch import part


class FSDPEngine:
    def __init__(self):
        self.weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        return [self.forward_step(part(data, start, start + 2), loss_function, forward_only) for start in (0, 2)]

    def optimizer_step(self):
        for weight in self.weights.values():
            weight += 1
        return 0.25

    def get_per_tensor_param(self, **kwargs):
        return iter(self.weights.items()), None


class FSDPEngineWithLMHead(FSDPEngine):
    def forward_step(self, micro_batch, loss_function, forward_only):
        inputs, _ = self.prepare_model_inputs(micro_batch)
        made = self.prepare_model_outputs(inputs, {}, micro_batch)
        return loss_function(None, made, micro_batch) if loss_function else made

    def prepare_model_inputs(self, micro_batch):
        ids = micro_batch["input_ids"].to_padded_tensor(0)
        return {"input_ids": ids, "attention_mask": (ids > 0).int(), "position_ids": torch.zeros_like(ids)}, {}

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func=None):
        rows = [torch.rand(len(row)) for row in micro_batch["input_ids"].unbind()]
        return {"log_probs": torch.nested.nested_tensor(rows, layout=torch.jagged)}
