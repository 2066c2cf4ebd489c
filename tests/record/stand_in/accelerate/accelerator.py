class Accelerator:
    def backward(self, loss, **kwargs):
        loss.backward()
