class Accelerator:
    def backward(self, loss, **kwargs):
        loss.backward()

    def clip_grad_norm_(self, parameters, max_norm):
        import torch

        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
